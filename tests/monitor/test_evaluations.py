"""Evaluations of a run's checkpoints, as history and plot show them, and the files that verify looks for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.monitor.evaluations import evaluation_table, progress_rows, read_evaluations
from launcher.monitor.evidence import _is_empty, expected_outputs
from launcher.monitor.history import AttemptRow, LaunchRow, Steps, starts_of
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from slipway.common.node.marks import JobAttempt
from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.evaluation.results import weights_digest


def write_results(run_dir: Path, step: int, **content: Any) -> None:
    directory = run_dir / "evaluations"
    directory.mkdir(exist_ok=True)
    (directory / f"step-{step}.json").write_text(json.dumps({"version": 1, "step": step, **content}))


def arc_easy_results(value: float, **more: float) -> dict[str, dict[str, float]]:
    return {"arc_easy": {"alias": "x", "acc": value, "acc_stderr": 0.01, **more}}  # type: ignore[dict-item]


def test_results_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    write_results(
        tmp_path,
        100,
        perplexity={"loss": 4.0, "perplexity": 54.6, "tokens": 10},
        lm_eval=arc_easy_results(0.5),
    )
    write_results(
        tmp_path,
        20,
        perplexity={"loss": 5.0, "perplexity": 148.4, "tokens": 10},
        lm_eval=arc_easy_results(0.25),
    )
    write_results(tmp_path, 120, perplexity=None, lm_eval=arc_easy_results(0.625, acc_norm=0.75))
    evaluations = read_evaluations(tmp_path)
    columns, rows = evaluation_table(evaluations)
    assert columns == ("STEP", "HELD-OUT LOSS", "PERPLEXITY", "arc_easy acc")
    assert rows == [
        ("20", "5.0000", "148.41", "0.2500 ± 0.0100"),
        ("100", "4.0000", "54.60", "0.5000 ± 0.0100"),
        ("120", "-", "-", "-"),  # its main metric is acc_norm
    ]
    assert progress_rows(evaluations) == [
        ("evaluated loss", "5.0000 → 4.0000, steps 20 to 100, 2 checkpoints"),
        ("arc_easy acc", "0.2500 → 0.5000, steps 20 to 100, 2 checkpoints"),
        ("arc_easy acc_norm", "0.7500 at step 120"),
    ]


def save_checkpoint(run_dir: Path, step: int, serial: int, training: str, time: float) -> str:
    """Write a marker as our trainer does; return the digest of its weights."""
    path = run_dir / "checkpoints" / f"{training}-step={step}"
    path.mkdir(parents=True)
    marker = Marker(
        step, step, 1, 1, 1, {}, training=training, serial=serial, checksums={"a": f"{serial:08x}"}
    )
    marker.write(path)
    os.utime(path / "complete.json", (time, time))
    return weights_digest(Checkpoint(path, marker))


@pytest.fixture
def rewound(tmp_path: Path) -> Path:
    """Return a run that trained to step 40, and from step 20 again: at 1,000, and at 2,000 seconds."""
    for step, loss in ((20, 5.0), (30, 4.6), (40, 4.4)):
        digest = save_checkpoint(tmp_path, step, step // 10, "first", 1000.0 + step)
        write_results(tmp_path, step, perplexity={"loss": loss}, provenance={"weights": digest})
        os.utime(tmp_path / f"evaluations/step-{step}.json", (1500, 1500))
    return tmp_path


STARTS = [(0, 1000.0), (20, 2000.0)]


def states(run_dir: Path, starts: Any = STARTS) -> dict[int, bool]:
    return {item.step: item.is_abandoned for item in read_evaluations(run_dir, starts)}


def test_all_evaluations_are_current_before_a_rewind(rewound: Path) -> None:
    assert states(rewound, STARTS[:1]) == {20: False, 30: False, 40: False}
    assert states(rewound, [*STARTS[:1], (40, 2000.0)]) == {20: False, 30: False, 40: False}


def test_evaluations_of_an_abandoned_branch_are_told_apart(rewound: Path) -> None:
    assert states(rewound) == {20: False, 30: True, 40: True}
    evaluations = read_evaluations(rewound, STARTS)
    assert [row[0] for row in evaluation_table(evaluations)[1]] == ["20", "30, abandoned", "40, abandoned"]
    assert progress_rows(evaluations) == [("evaluated loss", "5.0000 at step 20")]
    assert [item.to_json()["abandoned"] for item in evaluations] == [False, True, True]


def test_other_weights_of_a_step_than_the_newest_are_abandoned(rewound: Path) -> None:
    """Compare by the digest alone: the events of the rewind may be gone."""
    save_checkpoint(rewound, 30, 5, "second", 2030.0)
    assert states(rewound, ()) == {20: False, 30: True, 40: False}


def test_an_evaluation_of_the_new_branch_is_current(rewound: Path) -> None:
    digest = save_checkpoint(rewound, 30, 5, "second", 2030.0)
    write_results(rewound, 30, perplexity={"loss": 4.5}, provenance={"weights": digest})
    assert states(rewound) == {20: False, 30: False, 40: True}


def test_abandoned_weights_that_are_evaluated_after_the_rewind_stay_abandoned(rewound: Path) -> None:
    os.utime(rewound / "evaluations/step-40.json", (2500, 2500))
    assert states(rewound)[40]


def test_evaluations_of_checkpoints_that_were_removed_stay(rewound: Path) -> None:
    shutil.rmtree(rewound / "checkpoints")
    assert states(rewound, STARTS[:1]) == {20: False, 30: False, 40: False}
    assert states(rewound) == {20: False, 30: True, 40: True}


def test_task_with_a_metric_wins_among_tasks_of_one_printed_name(tmp_path: Path) -> None:
    write_results(tmp_path, 7, lm_eval={"a\x1b": {"acc": 0.5}, "a\\x1b": {"alias": "x"}})
    (evaluation,) = read_evaluations(tmp_path)
    assert evaluation.metrics == {"a\\x1b": ("acc", 0.5, None)}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "{" * 3000,
        '{"perplexity": {"loss": NaN}, "lm_eval": {"a": 3, "b": {"acc": "x"}}}',
        '{"lm_eval": []}',
    ],
)
def test_files_of_any_content_are_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluations" / "earlier").mkdir(parents=True)
    (tmp_path / "evaluations" / "step-7.json").write_text(content)
    (tmp_path / "evaluations" / "step-x.json").write_text("{}")
    for evaluation in read_evaluations(tmp_path):
        assert (evaluation.step, evaluation.loss, evaluation.metrics) == (7, None, {})
    assert read_evaluations(tmp_path / "nowhere") == []


def test_task_names_are_escaped_for_the_terminal(tmp_path: Path) -> None:
    write_results(tmp_path, 1, lm_eval={"a\x1b[31m\nb": {"acc": 1}})
    columns, _ = evaluation_table(read_evaluations(tmp_path))
    assert "\x1b" not in "".join(columns) and "\n" not in "".join(columns)


def test_a_conversion_is_verified_by_its_record(tmp_path: Path) -> None:
    output = f"{tmp_path}/[x]/step-{{step}}"
    node: dict[str, Any] = {"output": output, "step": None}
    assert expected_outputs({"conversion": node}) == [Path(output) / "conversion.json"], (
        "nothing is there yet"
    )
    for name in ("step-2", "step-10", ".unfinished-step-12", "step-x"):
        (tmp_path / "[x]" / name).mkdir(parents=True)
    outputs = expected_outputs({"conversion": node})
    assert outputs is not None
    assert {path.parent.name for path in outputs} == {"step-2", "step-10"}
    assert expected_outputs({"conversion": {**node, "step": 4}}) == [tmp_path / "[x]/step-4/conversion.json"]
    assert expected_outputs({"conversion": {"output": "/a/b"}}) == [Path("/a/b/conversion.json")]


def test_an_evaluation_is_verified_by_its_results() -> None:
    node = {"results": "/r/evaluations", "step": [2, 4]}
    assert expected_outputs({"evaluation": node, "model": {}}) == [
        Path("/r/evaluations/step-2.json"),
        Path("/r/evaluations/step-4.json"),
    ]
    assert expected_outputs({"evaluation": {"results": None}}) is None


def test_an_empty_output_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.nemo").touch()
    (tmp_path / "hf").mkdir()
    assert [_is_empty(tmp_path / name) for name in ("model.nemo", "hf", "nowhere")] == [True] * 3
    (tmp_path / "model.nemo").write_bytes(b"x")
    (tmp_path / "hf" / "config.json").touch()
    assert [_is_empty(tmp_path / name) for name in ("model.nemo", "hf")] == [False] * 2


def test_the_history_knows_where_trainers_began() -> None:
    status = JobStatus(State.COMPLETED, None)
    attempts = [
        AttemptRow(JobAttempt(str(first), 0, started=began), "COMPLETED", None, Steps(first, first + 10))
        for first, began in ((20, 2000.0), (30, 3000.0))
    ]
    rows = [
        LaunchRow(1, status, Steps(0, 40), started=1000.0),
        LaunchRow(2, status, Steps(20, 40), attempts=attempts, started=2000.0),
        LaunchRow(3, status, Steps(None, None), started=4000.0),  # it has taken no step
    ]
    assert {(0, 1000.0), (20, 2000.0), (30, 3000.0)} == set(starts_of(rows))
