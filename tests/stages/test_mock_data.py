"""A training on mock data reads nothing below ``data_dir``, which then need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.checks.gathering.path_resolver import PathResolver
from launcher.checks.gathering.paths import find_missing_mounts
from launcher.config.compose import compose
from launcher.drafting import Request, draft
from launcher.stages.planning import plan_launch

MOCK = "training.model.data.data_impl=mock"
ELSEWHERE = (
    "training.model.tokenizer.vocab_file=/v/vocab.json",
    "training.model.tokenizer.merge_file=/v/m.txt",
)


@pytest.mark.parametrize(
    ("overrides", "mounted"),
    [
        ((), True),
        ((MOCK,), True),  # NeMo reads the tokenizer there
        ((MOCK, *ELSEWHERE), False),
        ((MOCK, "engine=megatron"), False),
        ((MOCK, "engine=megatron", "env_vars.TEXT=/no_such_data/text"), True),
        (("engine=megatron",), True),
    ],
)
def test_data_dir_is_mounted_where_the_job_may_read_there(overrides: tuple[str, ...], mounted: bool) -> None:
    container = plan_launch(
        compose(["data_dir=/no_such_data", *overrides]).config, number=1, tag="x"
    ).job.container
    assert container is not None
    assert ("/no_such_data" in {mount.source for mount in container.mounts}) is mounted


def test_mock_data_need_no_mount_of_a_missing_data_dir(tmp_path: Path) -> None:
    places = [f"data_dir={tmp_path}/none", f"base_results_dir={tmp_path}/results"]

    def missing_keys(*overrides: str) -> list[str]:
        launch = draft(Request([*places, *overrides], []))
        return [path.key for path in find_missing_mounts(PathResolver(launch)) or ()]

    assert missing_keys("engine=megatron") == ["data_dir"]
    assert missing_keys("engine=megatron", MOCK) == []
