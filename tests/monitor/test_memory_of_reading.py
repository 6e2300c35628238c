"""The memory of verbs that read a long run does not grow with its steps and logs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from job_marks import leave_marks
from monitor_samples import COMPLETED, FakeScheduler, Runs, append, end, held_out, log, start, train

from launcher.cli.app import main

pytestmark = pytest.mark.usefixtures("fast")

_SHORT, _STEPS = 50, 30_000
_LOG = 12 << 20
# A block of a file at a time, and a few numbers for each step.
_MOST = 6 << 20


def _write_run(base: Path, name: str, steps: int, log_bytes: int) -> None:
    launch = Runs(base).launch(name, job_id="11" if steps == _STEPS else "12")
    losses = [train(step, loss=3.0 - step / 10_000) for step in range(1, steps + 1)]
    path = append(launch, [start(max_steps=steps), held_out(), *losses, end(steps, 1000.0 + steps)])
    assert path.stat().st_size > 100 * steps
    log(launch, "11").write_bytes(b"nothing that tells of an error\n" * (log_bytes // 31))
    leave_marks(launch, "11" if steps == _STEPS else "12", started=1000.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("long")
    _write_run(base, "short", _SHORT, 1 << 10)
    _write_run(base, "long", _STEPS, _LOG)
    return base


@pytest.mark.parametrize("verb", ["verify", "plot", "follow"])
def test_a_long_run_takes_little_memory(
    base: Path, scheduler: FakeScheduler, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in ("11", "12"):
        scheduler.set(job, COMPLETED)
    options = [] if verb == "follow" else ["--json"]
    assert main([verb, "short", *options, "--base-results-dir", str(base)]) in (0, 1)  # modules are imported
    capsys.readouterr()
    tracemalloc.start()
    try:
        assert main([verb, "long", *options, "--base-results-dir", str(base)]) in (0, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    output = capsys.readouterr().out
    assert str(_STEPS) in output
    assert peak < _MOST, f"{peak >> 10} KiB"
