"""Hangs on a real Slurm: the rank that the others wait for is named, and the tasks end for it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hangs.__main__ import SCRIPT
from launcher.sandbox.lifecycle import Sandbox
from slipway.watch.alerts import read_alerts
from tests.integration.conftest import SLIPWAY, run_command

WATCH = ["watch.tell.every=1", "env_vars.OMP_NUM_THREADS='1'", "cluster=sandbox"]
TRAINING = [
    *("training=gpt3/tiny", "training.trainer.num_nodes=2", "training.trainer.devices=2"),
    *("training.trainer.max_steps=100000", "training.trainer.limit_val_batches=0"),
    *("training.model.num_layers=1", "training.model.hidden_size=32", "training.model.encoder_seq_length=32"),
    *("training.model.max_position_embeddings=32", "training.model.data.data_impl=mock"),
    *("training.model.micro_batch_size=1", "training.model.global_batch_size=4"),
    *("+training.model.override_vocab_size=512", f"cluster.python={sys.executable}"),
]


def until(what: str, condition: Callable[[], Any], seconds: float = 180) -> Any:
    """Return what a condition returns once that is true."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return result


def end_mark(run: Path) -> dict[str, Any] | None:
    marks = list(run.glob("newest/marks/*.ended.json"))
    content = json.loads(marks[0].read_text()) if marks else {}
    return content if content.get("rule") else None


def process_of(run: Path, rank: int) -> int:
    """Return the process of a rank: the oldest Python with its environment."""
    tag = json.loads((run / "newest/supervisor.json").read_text())["tag"]
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            if {f"SLIPWAY_TAG={tag}".encode(), f"RANK={rank}".encode()} <= set(variables):
                name = (path / "cmdline").read_bytes()
                found += [int(path.name)] if b"slipway.trainer.pretrain" in name else []
        except OSError:
            continue
    return min(found)


@pytest.mark.slurm
@pytest.mark.trainer
def test_hanging_ranks_are_named_and_slow_ones_are_left_alone(tmp_path: Path, plain_sandbox: Sandbox) -> None:
    conf = {"SLURM_CONF": plain_sandbox.environment()["SLURM_CONF"]}

    def launch(name: str, *words: str, tasks: int = 2, first: int = 10) -> Path:
        own = [
            *("stages=[command]", f"command.run.name={name}", f"command.tasks_per_node={tasks}"),
            "command.nodes=2",
            f"command.argv=[{sys.executable},{SCRIPT},{','.join(words)}]",
            f"watch.no_step={{reaction: restart, first: {first}, pause: 5}}",
        ]
        run_command(SLIPWAY, "launch", *WATCH, *own, cwd=tmp_path, **conf)
        return tmp_path / "results" / name

    own = ["training.run.name=trains", "watch.no_step={reaction: restart, least: 5, pause: 5}"]
    run_command(SLIPWAY, "launch", *WATCH, *TRAINING, *own, cwd=tmp_path, **conf)
    trains = tmp_path / "results/trains"
    metrics = trains / "newest/results/metrics.jsonl"
    until("it trains", lambda: metrics.exists() and metrics.read_text().count('"train"') > 9)
    os.kill(process_of(trains, 2), signal.SIGSTOP)
    skips, slow = launch("skips", "skip", "'3'", "'20'"), launch("slow", "slow", "'0'", "'20'", tasks=1)

    stopped = "rank 2 on n2 is stopped (state T) while 3 ranks wait in all_reduce"
    why = until("the training ends", lambda: end_mark(trains))["why"]
    assert why.startswith("no new step for ") and why.endswith(stopped), why
    mark = until("the script ends", lambda: end_mark(skips))
    lines = SCRIPT.read_text().splitlines()
    line = lines.index("def evaluate() -> None:") + 2
    assert mark["rule"] == "hang"
    assert mark["why"].endswith(
        f"rank 3 on n2 stands in {SCRIPT.name}:{line} (evaluate) while 3 ranks wait in all_reduce"
    )
    assert until("the slow one ends", lambda: end_mark(slow))["verdict"] == "done"
    assert [alert.first.detector for alert in read_alerts(slow)] == []

    (alert,) = (alert for alert in read_alerts(trains) if alert.first.detector == "no_step")
    assert (alert.first.why, alert.first.reaction) == (why, "restart")
    (record,) = trains.glob("newest/hangs/*.json")
    content = json.loads(record.read_text())
    assert (content["suspects"], content["hosts"], content["moves"]) == ([2], ["n2"], False)
    # The others may wait in two collectives.
    assert [2] in [group["ranks"] for group in content["groups"]]
    answer = json.loads(run_command(SLIPWAY, "incident", str(trains), "--json", cwd=tmp_path, **conf).stdout)
    assert (Path(answer["directory"]) / "hangs" / record.name).is_file()
    history = run_command(SLIPWAY, "history", str(trains), cwd=tmp_path, **conf).stdout
    assert stopped[:20] in history.replace("\n", " ")
