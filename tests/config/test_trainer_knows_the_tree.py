"""The two sides agree: our trainer has a word for every key of every size that the launcher ships."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config.compose import compose, list_options
from launcher.stages.planning import plan_launch
from trainer.config.check import check_keys
from trainer.config.load import flatten


def config_of(size: str) -> dict[str, Any]:
    plan = plan_launch(compose([f"training={size}"]).config, number=1, tag="x")
    assert plan.job.config is not None
    return flatten(dict(plan.job.config))


@pytest.mark.parametrize("size", list_options("training"))
def test_no_key_of_a_size_is_unknown_or_refused(size: str) -> None:
    check_keys(config_of(size))
