"""The world, the pace, log records, and the vocabulary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.load import flatten, load_config
from slipway.trainer.logs import record_mistake
from slipway.trainer.report.progress import count, duration, step_line, time_left
from slipway.trainer.world import World

pytestmark = pytest.mark.trainer


def test_the_world_comes_from_torchruns_variables() -> None:
    names = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "4242"}
    world = World.from_environment(names)
    assert (world.rank, world.size, world.local_rank, world.address, world.port) == (5, 8, 1, "n1", 4242)
    alone = World.from_environment({})
    assert (alone.rank, alone.size, alone.is_main) == (0, 1, True)
    assert World.from_environment({"OMP_NUM_THREADS": "3"}).threads({"OMP_NUM_THREADS": "3"}) == 3


@pytest.mark.parametrize("names", [{"RANK": "one"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}])
def test_broken_environment_is_reported(names: dict[str, str]) -> None:
    with pytest.raises(UserError, match=next(iter(names))):
        World.from_environment(names)


@pytest.mark.parametrize(("found_by", "reporters"), [("job", [0]), ("node", [0, 2]), ("rank", [0, 1, 2, 3])])
def test_mistake_is_reported_by_one_of_the_ranks_that_find_it(
    found_by: Any, reporters: list[int], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait: the first rank to end stops the job, the reporting one included."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)

    def reports(rank: int) -> bool:
        two_nodes = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2)}
        record_mistake(None, World.from_environment(two_nodes), UserError("wrong", found_by))
        return bool(capsys.readouterr().err == "error: wrong\n")

    assert [rank for rank in range(4) if reports(rank)] == reporters
    assert len(waits) == 4 - len(reporters)


def test_the_time_to_the_end_is_never_negative() -> None:
    assert time_left(2, [2.0, 4.0]) == 6.0
    assert time_left(100 - 51, [2.0]) == 98.0
    assert time_left(0, [2.0]) == 0.0
    assert time_left(-2, [2.0, 4.0]) == 0.0


def test_numbers_are_formatted_for_people() -> None:
    line = step_line(12, 200, 5.43214, 1.2e-3, 0.874, 3412.4, 0.301, 56.2)
    assert line == (
        "step  12/200 | loss 5.4321 | lr 1.2e-03 | grad norm 0.87 | 3,412 tokens/s | 0.30 s/step | eta 0:56"
    )
    assert [duration(s) for s in (59.6, 3600, 90061)] == ["1:00", "1:00:00", "1-01:01:01"]
    assert [count(n) for n in (999, 1_500, 125_300_000, 2 * 10**9)] == ["999", "1.5k", "125.3M", "2.0B"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {a: [}", "not valid YAML"),
        ("model: {a: 2026-13-01}", "not valid YAML: month must be in 1..12"),
        ("model: \udcff", "not valid YAML"),
        ("- 1", "expected a mapping"),
        ("modle: {}", "did you mean 'model'"),
        ("model: {}\ntrainer: {}", "missing root key 'exp_manager'"),
        ("model: 3", "'model' must be a mapping"),
    ],
)
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"a\.yaml") as error:
        load_config(tmp_path, "a")
    assert message in str(error.value)


def test_flattening_keeps_lists() -> None:
    nested: dict[str, Any] = {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None}
    assert flatten(nested) == {"a.b.c": 1, "a.d": [1, 2], "e": None}
