"""Held-out perplexity of checkpoints: the training's own validation loss, whatever the layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import environment, free_port

pytestmark = pytest.mark.trainer

MODULE = "trainer.evaluation.__main__"
# Padding of the vocabulary that depends on the tensor-parallel size: 300 tokens become 320, on one rank 304.
TRAINING = {"model.tensor_model_parallel_size": 2, "model.make_vocab_size_divisible_by": 16}
# Sums are taken in another order.
NEAR = 1e-6


@dataclass(frozen=True)
class Said:
    """Exit codes by rank, and what rank 0 wrote."""

    codes: list[int]
    stdout: str
    stderr: str


class Evaluator:
    """Runs evaluations of one training."""

    def __init__(self, outcome: Any, trainings: Any, pool: Any, directory: Path) -> None:
        self.checkpoints = outcome.log_dir / "checkpoints"
        self.losses = {line["step"]: line["val_loss"] for line in outcome.lines("validation")}
        self.tokens = outcome.lines("data")[0]["tokens"]
        self.training = yaml.safe_load((trainings.root / f"{outcome.log_dir.name}.yaml").read_text())
        self._pool, self.directory, self._count = pool, directory, 0

    def __call__(self, node: dict[str, Any], world: int = 1, splits: str = "80,20,0") -> Said:
        """Run an evaluation; `node` is added to the source and the directory of results."""
        self._count += 1
        name = f"evaluation{self._count}"
        whole = {"source": str(self.checkpoints), "results": str(self.directory / "results"), **node}
        config = self.directory / f"{name}.yaml"
        self.training["model"]["data"]["splits_string"] = splits
        config.write_text(yaml.safe_dump({**self.training, "evaluation": whole}))
        port, files = free_port(), []
        started = []
        for rank in range(world):
            files.append((self.directory / f"{name}.{rank}.out", self.directory / f"{name}.{rank}.err"))
            started.append(
                self._pool.start(
                    ["run", "--config-path", str(self.directory), "--config-name", name],
                    environment(rank, world, port),
                    files[-1][0],
                    MODULE,
                    files[-1][1],
                )
            )
        codes = [process.wait() for process in started]
        return Said(codes, files[0][0].read_text(), files[0][1].read_text())

    def result(self, step: int, name: str = "results") -> dict[str, Any]:
        """Return the result of a step."""
        return json.loads((self.directory / name / f"step-{step}.json").read_text())


@pytest.fixture(scope="module")
def evaluate(trainings: Any, pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """Return what evaluates a training of two tensor-parallel ranks."""
    outcome = trainings("evaluated", TRAINING, world=2)
    assert outcome.codes == [0, 0], outcome.stderr
    return Evaluator(outcome, trainings, pool, tmp_path_factory.mktemp("evaluations"))


def test_the_loss_is_the_trainings_own_and_is_measured_once(evaluate: Evaluator) -> None:
    said = evaluate({"step": [4, 6]}, world=2)
    assert said.codes == [0, 0], said.stderr
    assert {step: evaluate.result(step)["perplexity"]["loss"] for step in (4, 6)} == evaluate.losses
    result = evaluate.result(6)
    assert result["perplexity"]["tokens"] == evaluate.tokens
    assert result["perplexity"]["perplexity"] == pytest.approx(2.718281828459045 ** evaluate.losses[6])
    assert (result["version"], result["step"], result["training"]) == (1, 6, "very_small")
    assert Path(result["checkpoint"]).parent == evaluate.checkpoints.resolve()
    assert result["lm_eval"] == {}
    assert {"python", "torch", "megatron-core"} <= set(result["versions"])
    assert f"step 6 | held-out loss {evaluate.losses[6]:.4f} | perplexity " in said.stdout
    before = (evaluate.directory / "results" / "step-6.json").read_bytes()
    again = evaluate({}, world=2)
    assert again.codes == [0, 0], again.stderr
    assert again.stdout.endswith("| there already\n")
    assert (evaluate.directory / "results" / "step-6.json").read_bytes() == before
    nothing = evaluate({"every": 2}, world=2)
    assert nothing.stdout.startswith("nothing to do: each checkpoint in ")


@pytest.mark.parametrize(
    ("layout", "world"),
    [({"tensor": 1}, 1), ({"tensor": 1}, 3), ({"tensor": 1, "pipeline": 2}, 2)],
    ids=["one", "data3", "pipeline2"],
)
def test_the_loss_does_not_depend_on_the_layout(
    evaluate: Evaluator, layout: dict[str, int], world: int
) -> None:
    name = f"results-{world}"
    said = evaluate(
        {"results": str(evaluate.directory / name), "perplexity": {"layout": layout}, "every": 1}, world
    )
    assert said.codes == [0] * world, said.stderr
    losses = {step: evaluate.result(step, name)["perplexity"]["loss"] for step in (4, 6)}
    assert losses == pytest.approx(evaluate.losses, rel=NEAR)


def test_other_data_replace_a_result_and_the_earlier_file_is_kept(evaluate: Evaluator) -> None:
    alone = {"layout": {"tensor": 1}}
    one = {"results": str(evaluate.directory / "replaced"), "step": 4}
    assert evaluate({**one, "perplexity": alone}).codes == [0]
    first = evaluate.result(4, "replaced")
    said = evaluate({**one, "perplexity": {**alone, "batches": 1}})
    assert said.codes == [0], said.stderr
    assert "is replaced: other values; the earlier file is " in said.stdout
    second = evaluate.result(4, "replaced")
    assert second["perplexity"]["tokens"] == 8 * 32 < first["perplexity"]["tokens"]
    kept = json.loads((evaluate.directory / "replaced" / "earlier" / "step-4-1.json").read_text())
    assert kept == first
    # The whole of the data set, and not only the documents that are held out.
    prefix = evaluate.training["model"]["data"]["data_prefix"]
    assert evaluate({**one, "perplexity": {**alone, "data_prefix": prefix}}).codes == [0]
    assert evaluate.result(4, "replaced")["perplexity"]["tokens"] > 2 * first["perplexity"]["tokens"]
    # The last documents, which are those held out above.
    assert evaluate({**one, "perplexity": {**alone, "split": "test"}}, splits="70,10,20").codes == [0]
    test = evaluate.result(4, "replaced")
    assert test["provenance"]["perplexity"]["conditions"]["split"] == "test"
    assert test["perplexity"]["loss"] == pytest.approx(first["perplexity"]["loss"], rel=NEAR)


def test_mistakes_name_the_key_and_leave_nothing(evaluate: Evaluator, tmp_path: Path) -> None:
    def mistake(node: dict[str, Any]) -> str:
        said = evaluate({"results": str(tmp_path / "none"), **node})
        assert said.codes == [2]
        assert said.stderr.startswith("error: ")
        assert len(said.stderr.splitlines()) == 1
        return said.stderr

    assert "evaluation.perplexity.batch=1: unknown key; did you mean" in mistake({"perplexity": {"batch": 1}})
    assert "evaluation.step=5: the complete checkpoints in" in mistake(
        {"step": 5, "perplexity": {"layout": {"tensor": 1}}}
    )
    assert "evaluation.perplexity.layout lays the model out in another way" in mistake({})
    assert "/absent: there is no such directory" in mistake(
        {"source": "/absent", "perplexity": {"layout": {"tensor": 1}}}
    )
    damaged = tmp_path / "damaged"
    shutil.copytree((evaluate.checkpoints / "latest").resolve(), damaged)
    shard = next(damaged.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"the checkpoint {damaged} is damaged ({shard.name} has checksum" in mistake(
        {"source": str(damaged), "perplexity": {"layout": {"tensor": 1}}}
    )
    assert not (tmp_path / "none").exists()
