"""The phases of a step: exclusive times, compared over the ranks, and named in a profiler's trace."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipway.common.errors import UserError
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.report.memory import find_fullest
from slipway.trainer.report.phases import PHASES, PhaseTimer, compare
from tests.trainer.conftest import Trainings

pytestmark = pytest.mark.trainer

# Longer than any phase of so small a model, and than what a busy machine adds to most of them.
DELAY_MS = 150


@pytest.fixture(scope="module")
def slow_training(trainings: Trainings) -> Any:
    """Return a training of two ranks; rank 1 sleeps before each forward pass."""
    changes = {
        "trainer.max_steps": 7,
        "trainer.val_check_interval": 5,
        "trainer.limit_val_batches": 1,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": 5,
        "model.torch_profile": {"enabled": True, "start_step": 2, "end_step": 3, "ranks": [1]},
        "model.memory_profile": {"enabled": True, "start_step": 2, "end_step": 3},
        "model.nsys_profile": {"enabled": False, "start_step": 10, "trace": ["cuda"]},
    }
    outcome = trainings("slowed", changes, world=2, fault=f"slow:1:{DELAY_MS}")
    assert outcome.codes == [0, 0], outcome.stderr
    return outcome


def test_slow_rank_shows_in_its_phase_and_waiting_in_that_of_the_other(slow_training: Any) -> None:
    lines = slow_training.lines("phases")
    steps = [step for line in lines for step in range(line["first_step"], line["last_step"] + 1)]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 7, 7]
    for line in lines:
        assert line["phases"]["forward_backward"]["max"] >= DELAY_MS / 1000
    middle = sorted(line["phases"]["forward_backward"]["spread"] for line in lines)[len(lines) // 2]
    assert middle > DELAY_MS / 2000
    slowest = [(line["phases"]["forward_backward"], line["phases"]["reduction"]) for line in lines[1:-1]]
    ranks = [(forward["slowest_rank"], reduction["slowest_rank"]) for forward, reduction in slowest]
    assert ranks.count((1, 0)) > len(ranks) / 2


def test_memory_is_that_of_the_fullest_rank(slow_training: Any) -> None:
    lines = slow_training.lines("memory")
    assert [line["step"] for line in lines] == [line["step"] for line in slow_training.lines("phases")]
    for line, train in zip(lines[:-1], slow_training.lines("train")[2:], strict=True):
        assert line["step"] == train["step"]
        # Rank 0 looks once more when the step has ended, and grows meanwhile, by less than a model.
        assert line["allocated_bytes"]["max"] > train["memory_bytes"] - (64 << 20)
    ranks = [[5.0, 6.0, 0.0], [7.0, 7.0, 0.0], [1.0, 9.0, 2.0]]
    assert find_fullest(ranks) == {
        "allocated_bytes": {"max": 7, "rank": 1},
        "reserved_bytes": {"max": 9, "rank": 2},
        "allocation_retries": {"max": 2, "rank": 2},
    }


def test_validation_and_save_count_to_the_step_after_them(slow_training: Any) -> None:
    *lines, last = slow_training.lines("phases")
    assert {"data", "forward_backward", "reduction", "optimizer"} <= set(lines[0]["phases"])
    assert not {"validation", "save"} & {name for line in lines for name in line["phases"]}
    assert {"validation", "save"} <= set(last["phases"])


def test_trace_of_profiled_steps_names_the_phases(slow_training: Any) -> None:
    (path,) = (slow_training.log_dir / "profile_logs").iterdir()
    assert path.name == "trace_rank1_step2.json"
    events = json.loads(path.read_text())["traceEvents"]
    ranges = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    # Two steps of two micro batches; each step reduces its gradients, and then its loss.
    phases = {name: ranges[name] for name in PHASES if name in ranges}
    assert phases == {"data": 4, "forward_backward": 2, "reduction": 4, "optimizer": 2}
    assert any(event["name"] == "aten::mm" for event in events)
    log = (slow_training.log_dir / "nemo_log_globalrank-0_localrank-0.txt").read_text()
    assert "model.memory_profile.enabled: no effect here: memory snapshots are of CUDA's allocator" in log


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_profile.start_step": 6}, "start_step=6: expected a step below trainer.max_steps=6"),
        ({"torch_profile.start_step": 3, "torch_profile.end_step": 2}, "end_step=2: expected a step from"),
        ({"torch_profile.ranks": [0, 1]}, r"torch_profile.ranks=\[0, 1\]: expected ranks 0 to 0"),
        ({"torch_profile.ranks": []}, "expected a list of ranks"),
        ({"memory_profile.enabled": True, "memory_profile.rank": 1}, "rank=1: expected ranks 0 to 0"),
        ({"nsys_profile.enabled": True}, "one profiler at a time"),
        ({"torch_profile.start_stop": 3}, "unknown key.*model.torch_profile.start_step"),
        ({"torch_profile": True}, "a profiler has keys"),
    ],
)
def test_invalid_profile_is_refused(
    configuration: Callable[[dict[str, Any]], dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    profile = {} if "torch_profile" in changes else {"model.torch_profile.enabled": True}
    output = {"exp_manager.explicit_log_dir": "/absent", "model.data.data_impl": "mock"}
    changes = {f"model.{key}": value for key, value in changes.items()}
    flat = flatten(configuration({**output, **profile, **changes}))
    with pytest.raises(UserError, match=message):
        check_keys(flat)
        read_settings(flat)


def test_phase_inside_another_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timer = PhaseTimer(torch.device("cpu"), completed=4)
    batches = timer.items("data", iter([1, 2]))
    for _ in range(2):
        with timer.phase("forward_backward"):
            now += 1
            next(batches)
            timer.measure("reduction", lambda: None)()
            with timer.phase("reduction"):
                now += 4
            now += 2
        now += 100
        timer.end_step()
    assert timer.take()[0] == range(5, 6)
    timer.end()
    steps, seconds = timer.take()
    assert steps == range(6, 7)
    assert dict(zip(PHASES, seconds, strict=True)) == {
        **dict.fromkeys(PHASES, 0.0),
        "forward_backward": 3.0,
        "reduction": 4.0,
    }


def test_comparison_names_the_slowest_rank() -> None:
    ranks = [[0.0] * 6, [0.5, 0, 0, 0, 0, 0], [0.25, 0, 0, 0, 0, 0]]
    assert compare(ranks) == {"data": {"max": 0.5, "spread": 0.5, "slowest_rank": 1}}
