"""The two sides agree: our trainer has a word for every key of the families that it trains."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config.compose import compose, list_options
from launcher.stages.planning import plan_launch
from trainer.config.check import check_keys
from trainer.config.keys import status_of
from trainer.config.load import flatten
from trainer.errors import UserError

# The others it refuses: their model classes are not in it yet.
SIZES = [size for size in list_options("training") if size.startswith(("gpt3/", "gpt2/"))]

# What the larger sizes ask for beyond this version of the trainer.
BEYOND = {
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.sequence_parallel",
}
LARGE = {
    "gpt3/5b_64k",
    "gpt3/20b",
    *(f"gpt3/40b{kind}" for kind in ("", "_16k", "_32k", "_64k", "_improved")),
    *(f"gpt3/175b{kind}" for kind in ("", "_16k", "_32k")),
}


def config_of(size: str) -> dict[str, Any]:
    config = compose([f"training={size}", "engine=megatron"]).config
    plan = plan_launch(config, number=1, tag="x")
    assert plan.job.config is not None
    return flatten(dict(plan.job.config))


@pytest.mark.parametrize("size", SIZES)
def test_no_key_of_a_size_is_unknown(size: str) -> None:
    assert [key for key in config_of(size) if status_of(key) is None] == []


@pytest.mark.parametrize("size", SIZES)
def test_no_value_is_refused_but_the_layouts_of_large_models(size: str) -> None:
    config = config_of(size)
    if size in LARGE:
        with pytest.raises(UserError):
            check_keys(config)
        config = {key: value for key, value in config.items() if key not in BEYOND}
    check_keys(config)
