"""Tasks of lm-eval on converted models: from local files alone, several checkpoints in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import environment, free_port
from tests.trainer.probing import probed

pytestmark = pytest.mark.trainer

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
LETTERS = {4: "x", 6: "q"}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a task, ``letters``: the right answer is always an x."""
    directory = tmp_path_factory.mktemp("tasks")
    documents = [{"question": f"Letter {number}:", "letters": ["x", "q"], "right": 0} for number in range(5)]
    (directory / "letters.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "letters.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "target_delimiter": "",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{letters}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (directory / "letters.yaml").write_text(yaml.safe_dump(task))
    return directory


def evaluated(
    pool: Any, directory: Path, training: dict[str, Any], node: dict[str, Any]
) -> tuple[int, str, str]:
    """Run an evaluation; return its exit code, stdout and stderr."""
    (directory / "evaluation.yaml").write_text(yaml.safe_dump({**training, "evaluation": node}))
    output, errors = directory / "out", directory / "err"
    for path in (output, errors):
        path.unlink(missing_ok=True)
    cache = {"HF_HOME": str(directory / "cache"), **OFFLINE}
    process = pool.start(
        ["run", "--config-path", str(directory), "--config-name", "evaluation"],
        {**environment(0, 1, free_port()), **cache},
        output,
        "trainer.evaluation.__main__",
        errors,
    )
    return process.wait(), output.read_text(), errors.read_text()


def test_tasks_are_measured_beside_the_loss_in_one_process(
    trainings: Any, tokenized: Any, pool: Any, tasks: Path, tmp_path: Path
) -> None:
    outcome = trainings("with_tasks")
    assert outcome.codes == [0], outcome.stderr
    probed(
        pool, "tests.trainer.probe_opinions", [str(tokenized.tokenizer), str(tmp_path), "x", "q"], tmp_path
    )
    for step, letter in LETTERS.items():
        (tmp_path / letter).rename(tmp_path / f"model-{step}")
    training = yaml.safe_load((trainings.root / "with_tasks.yaml").read_text())
    node = {
        "source": str(outcome.log_dir / "checkpoints"),
        "step": [4, 6],
        "results": str(tmp_path / "results"),
        "converted": str(tmp_path / "model-{step}"),
        "lm_eval": {"tasks": [str(tasks / "letters.yaml")]},
    }
    code, said, errors = evaluated(pool, tmp_path, training, node)
    assert code == 0, errors
    results = {step: json.loads((tmp_path / f"results/step-{step}.json").read_text()) for step in LETTERS}
    assert {step: result["lm_eval"]["letters"] for step, result in results.items()} == {
        4: {"acc": 1.0, "acc_stderr": 0.0},
        6: {"acc": 0.0, "acc_stderr": 0.0},
    }
    losses = {line["step"]: line["val_loss"] for line in outcome.lines("validation")}
    assert {step: result["perplexity"]["loss"] for step, result in results.items()} == losses
    assert {"lm_eval", "transformers", "torch"} <= set(results[4]["versions"])
    assert "step 4 | letters | acc 1.0000 ± 0.0000" in said
    assert "Traceback" not in errors
    # By name, from a directory; what is there is not measured again.
    named = {"tasks": ["letters"], "include_path": str(tasks), "limit": 2}
    code, said, errors = evaluated(
        pool, tmp_path, training, {**node, "perplexity": {"enabled": False}, "lm_eval": named, "step": 4}
    )
    assert code == 0, errors
    result = json.loads((tmp_path / "results/step-4.json").read_text())
    assert result["provenance"]["lm_eval"]["letters"]["documents"] == {"letters": 2}
    assert list(result["provenance"]["lm_eval"]) == ["letters"]
    assert result["perplexity"] == results[4]["perplexity"]
    code, said, _ = evaluated(pool, tmp_path, training, {**node, "step": 6})
    assert code == 0
    assert said.count("there already") == 2
    mistakes = {
        "evaluation.lm_eval.tasks=/absent.yaml: there is no such file": {"tasks": ["/absent.yaml"]},
        "letters.yaml: lm-eval cannot load it: ": {"tasks": [str(tasks / "letters.yaml")]},
    }
    (tasks / "letters.jsonl").unlink()
    for message, lm_eval in mistakes.items():
        code, _, errors = evaluated(pool, tmp_path, training, {**node, "step": 4, "lm_eval": lm_eval})
        assert code == 2
        assert message in errors.splitlines()[-1]
        assert "Traceback" not in errors
