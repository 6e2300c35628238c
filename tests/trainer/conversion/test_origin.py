"""The model card names the training that wrote the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.trainer.conversion.origin import provenance


def write_launch(run: Path, number: int, *saved: str) -> None:
    results = run / "launches" / str(number) / "results"
    results.mkdir(parents=True)
    manifest = {"run": "tiny", "overrides": [f"training.model.optim.lr={number}", "cluster.account=secret"]}
    (results.parent / "launcher.json").write_text(json.dumps(manifest))
    events = [{"kind": "train", "step": 1}] + [
        {"kind": "checkpoint", "step": 1, "path": f"/elsewhere/{name}"} for name in saved
    ]
    (results / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"kin')


@pytest.mark.parametrize(
    ("launches", "overrides"),
    [
        ([["step=1"], ["step=2"], []], ["training.model.optim.lr=1"]),
        ([["step=2"], ["step=1"], ["step=10"]], ["training.model.optim.lr=2"]),
        ([["step=1"], ["step=1"]], ["training.model.optim.lr=2"]),  # it was trained again from there
        ([["step=3"]], ["training.model.optim.lr=1"]),  # copied into the run of one launch
        ([["step=3"], []], None),
        ([], None),
    ],
)
def test_overrides_are_those_of_the_launch_that_wrote_the_checkpoint(
    tmp_path: Path, launches: list[list[str]], overrides: list[str] | None
) -> None:
    for number, saved in enumerate(launches, 1):
        write_launch(tmp_path, number, *saved)
    marker = SimpleNamespace(step=1, consumed_samples=8, training="t", data=[])
    checkpoint: Any = SimpleNamespace(path=tmp_path / "checkpoints" / "step=1", marker=marker)
    conversion: Any = SimpleNamespace(training=SimpleNamespace(directory=tmp_path, run="tiny"))
    assert provenance(conversion, checkpoint).get("overrides") == overrides
