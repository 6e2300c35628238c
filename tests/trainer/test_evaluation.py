"""Measurements of one training's checkpoints, by our model in any layout, and of converted ones by others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.marker import Marker
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.conversion.convert import convert
from slipway.trainer.conversion.spec import read_conversion
from slipway.trainer.data import identity
from slipway.trainer.data.heldout import heldout_windows
from slipway.trainer.data.training_data import find_indices, open_heldout
from slipway.trainer.errors import DivergedError
from slipway.trainer.evaluation import __main__ as program
from slipway.trainer.evaluation import other_data
from slipway.trainer.evaluation.harness import Outcome
from slipway.trainer.evaluation.results import Results
from slipway.trainer.evaluation.spec import evaluation_layout, read_evaluation, read_heldout_settings
from slipway.trainer.world import World
from tests.trainer.conftest import REPOSITORY, config_with, environment, free_port
from tests.trainer.conversion.checkpoints import write_checkpoint
from tests.trainer.conversion.test_conversion_faults import GPT2
from tests.trainer.parity.test_parity import FAMILIES

pytestmark = pytest.mark.trainer

MODULE = "slipway.trainer.evaluation.__main__"
# No row of the embeddings pads the tokens: a converted model has none either, and so the same loss.
TRAINING = {
    "model.tensor_model_parallel_size": 2,
    "model.make_vocab_size_divisible_by": 2,
    "model.override_vocab_size": 300,
}
# On another number of ranks this would pad them; the checkpoint's own number of rows is taken.
DIVISOR = 16
# Sums are taken in another order.
NEAR = 1e-6
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
SENTENCE = "the train of alpha and beta"
TASKS: dict[str, dict[str, Any]] = {
    "letters": {
        "output_type": "multiple_choice",
        "target_delimiter": "",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{letters}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "sentence": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}
# These are parts of the page's example.
DOCUMENTED, PROMPT = "results/gpt3_tiny_conversion/huggingface/step-200", "    def __init__(self,"


@dataclass(frozen=True)
class EvaluationOutput:
    """Exit codes by rank, and the output of rank 0."""

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
        self.training["model"]["make_vocab_size_divisible_by"] = DIVISOR
        self._pool, self.directory, self._count = pool, directory, 0

    def __call__(self, node: dict[str, Any], world: int = 1, splits: str = "80,20,0") -> EvaluationOutput:
        """Run an evaluation; `node` is added to the source and the directory of results."""
        name = f"evaluation{self._count}"
        full_node = {"source": str(self.checkpoints), "results": str(self.directory / "results"), **node}
        config = self.directory / f"{name}.yaml"
        self.training["model"]["data"]["splits_string"] = splits
        config.write_text(yaml.safe_dump({**self.training, "evaluation": full_node}))
        return self.run(MODULE, ["run", "--config-path", str(self.directory), "--config-name", name], world)

    def run(self, module: str, arguments: list[str], world: int = 1) -> EvaluationOutput:
        """Run the ``main`` of a module, without a network."""
        port, stem, self._count = free_port(), self.directory / f"said{self._count}", self._count + 1
        files = [
            (stem.with_suffix(f".{rank}.out"), stem.with_suffix(f".{rank}.err")) for rank in range(world)
        ]
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.directory / "cache"),
        }
        processes = [
            self._pool.start(arguments, {**environment(rank, world, port), **offline}, out, module, err)
            for rank, (out, err) in enumerate(files)
        ]
        codes = [process.wait() for process in processes]
        return EvaluationOutput(codes, files[0][0].read_text(), files[0][1].read_text())

    def result(self, step: int, name: str = "results") -> dict[str, Any]:
        """Return the result of a step."""
        return json.loads((self.directory / name / f"step-{step}.json").read_text())


@pytest.fixture(scope="module")
def evaluate(trainings: Any, pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """Return the evaluator of a training of two tensor-parallel ranks."""
    outcome = trainings("evaluated", TRAINING, world=2)
    assert outcome.codes == [0, 0], outcome.stderr
    return Evaluator(outcome, trainings, pool, tmp_path_factory.mktemp("evaluations"))


def test_the_loss_is_the_trainings_own_and_is_measured_once(evaluate: Evaluator) -> None:
    output = evaluate({"step": [4, 6]}, world=2)
    assert output.codes == [0, 0], output.stderr
    assert {step: evaluate.result(step)["perplexity"]["loss"] for step in (4, 6)} == evaluate.losses
    result = evaluate.result(6)
    assert result["perplexity"]["tokens"] == evaluate.tokens
    assert result["perplexity"]["perplexity"] == pytest.approx(2.718281828459045 ** evaluate.losses[6])
    assert (result["version"], result["step"], result["training"]) == (1, 6, "very_small")
    assert Path(result["checkpoint"]).parent == evaluate.checkpoints.resolve()
    assert result["lm_eval"] == {}
    assert {"python", "torch", "megatron-core"} <= set(result["versions"])
    assert f"step 6 | held-out loss {evaluate.losses[6]:.4f} | perplexity " in output.stdout
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
    output = evaluate(
        {"results": str(evaluate.directory / name), "perplexity": {"layout": layout}, "every": 1}, world
    )
    assert output.codes == [0] * world, output.stderr
    losses = {step: evaluate.result(step, name)["perplexity"]["loss"] for step in (4, 6)}
    assert losses == pytest.approx(evaluate.losses, rel=NEAR)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two tasks of lm-eval, ``letters`` and ``sentence``, and their data."""
    directory = tmp_path_factory.mktemp("tasks")
    letters = [{"question": f"Letter {number}:", "letters": ["x", "q"], "right": 0} for number in range(5)]
    for name, documents in {"letters": letters, "sentence": [{"text": SENTENCE}]}.items():
        lines = (f"{json.dumps(document)}\n" for document in documents)
        (directory / f"{name}.jsonl").write_text("".join(lines))
        data = {"data_files": {"test": str(directory / f"{name}.jsonl")}}
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": data,
            "test_split": "test",
            **TASKS[name],
        }
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return directory


def test_tasks_are_measured_on_models_that_are_converted_on_the_way(evaluate: Evaluator, tasks: Path) -> None:
    common = {
        "results": str(evaluate.directory / "both"),
        "converted": str(evaluate.directory / "model-{step}"),
        "perplexity": {"layout": {"tensor": 1}},
    }
    files = [str(tasks / f"{name}.yaml") for name in TASKS]
    output = evaluate({**common, "step": [4, 6], "lm_eval": {"tasks": files, "batch_size": 4}})
    assert output.codes == [0], output.stderr
    assert "Traceback" not in output.stderr
    results = {step: evaluate.result(step, "both") for step in (4, 6)}
    assert {step: result["perplexity"]["loss"] for step, result in results.items()} == pytest.approx(
        evaluate.losses, rel=NEAR
    )
    for step, result in results.items():
        assert set(result["lm_eval"]) == set(TASKS)
        assert set(result["lm_eval"]["letters"]) == {"acc", "acc_stderr"}
        assert {"lm_eval", "transformers", "torch"} <= set(result["versions"])
        assert f"step {step} | letters | acc {result['lm_eval']['letters']['acc']:.4f} ± " in output.stdout
    bits = [result["lm_eval"]["sentence"]["bits_per_byte"] for result in results.values()]
    assert bits[1] < bits[0]
    # A task by name, from a directory, replaces the same task under other conditions.
    lm_eval = {"tasks": ["letters"], "include_path": str(tasks), "limit": 2}
    output = evaluate({**common, "step": 4, "perplexity": {"enabled": False}, "lm_eval": lm_eval})
    assert output.codes == [0], output.stderr
    again = evaluate.result(4, "both")
    assert again["provenance"]["lm_eval"]["letters"]["documents"] == {"letters": 2}
    # The other file's metrics are its own, and stay.
    assert set(again["provenance"]["lm_eval"]) == {"letters", files[1]}
    assert again["lm_eval"]["sentence"] == results[4]["lm_eval"]["sentence"]
    assert again["provenance"]["lm_eval"][files[1]]["documents"] == {"sentence": 1}
    assert again["perplexity"] == results[4]["perplexity"]
    output = evaluate({**common, "step": 6, "lm_eval": {"tasks": files, "batch_size": 4}})
    assert output.codes == [0]
    assert output.stdout.count("there already") == 3


def test_group_goes_with_its_metrics_when_a_member_is_measured_again(tmp_path: Path) -> None:
    checkpoint, results = write_checkpoint(tmp_path / "checkpoints", GPT2), Results(tmp_path / "results", "t")

    def add(request: str, metrics: dict[str, float], limit: int | None = None) -> dict[str, Any]:
        conditions, documents = {"limit": limit}, {name: 2 for name in metrics if name != request}
        item = {"conditions": conditions, "metrics": list(metrics), "documents": documents or {request: 2}}
        values = {name: {"acc": value} for name, value in metrics.items()}
        path = results.add_lm_eval(checkpoint, values, {request: item}, {})
        return dict(json.loads(path.read_text()))

    add("other", {"other": 0.5})
    group = add("group", {"group": 0.3, "inner": 0.3, "a": 0.2, "b": 0.4})
    member = add("a", {"a": 0.2}, limit=2)
    assert member["lm_eval"] == {"other": {"acc": 0.5}, "a": {"acc": 0.2}}
    assert set(member["provenance"]["lm_eval"]) == {"other", "a"}
    earlier = sorted((results.directory / "earlier").iterdir())
    assert [json.loads(path.read_text()) for path in earlier] == [group]
    # Other conditions make another result, even of the same value.
    add("a", {"a": 0.2}, limit=4)
    assert len(list((results.directory / "earlier").iterdir())) == 2
    add("a", {"a": 0.2}, limit=4)
    assert len(list((results.directory / "earlier").iterdir())) == 2


def test_same_loss_under_other_conditions_keeps_the_earlier_file(tmp_path: Path) -> None:
    checkpoint, results = write_checkpoint(tmp_path / "checkpoints", GPT2), Results(tmp_path / "results", "t")
    for count, windows in enumerate((8, 16, 16)):
        results.add_perplexity(checkpoint, {"loss": 2.5}, {"conditions": {"windows": windows}}, {})
        assert len(list(results.directory.glob("earlier/*"))) == min(count, 1)


def test_conditions_tell_data_of_the_same_path_and_other_seeds_apart(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"data.{suffix}").write_text("x")
    keys = {
        **FAMILIES["gpt2"],
        "exp_manager.explicit_log_dir": "/x",
        "model.data.data_prefix": [str(tmp_path / "data")],
        "model.override_vocab_size": 304,
    }
    perplexity = read_evaluation({"source": "/s", "results": "/r"}).perplexity
    assert perplexity is not None

    def conditions(seed: int) -> dict[str, Any]:
        settings = read_settings(flatten(config_with({**keys, "model.seed": seed})))
        return json.loads(json.dumps(program._conditions(settings, perplexity, 8)))

    first = conditions(1)
    assert conditions(1) == first
    assert conditions(2) != first
    (tmp_path / "data.bin").write_text("y")
    assert conditions(1) != first


def test_every_skips_a_checkpoint_that_cannot_be_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the library's part stands in: it has its own tests.
    models: list[Path] = []

    class Recorder:
        def __init__(self, harness: Any) -> None: ...

        def measure(self, model: Path, tasks: list[str]) -> Outcome:
            models.append(model)
            item = {"conditions": {}, "metrics": tasks, "documents": {}}
            return Outcome({name: {"acc": 1.0} for name in tasks}, dict.fromkeys(tasks, item))

    monkeypatch.setattr(program.harness, "Tasks", Recorder)
    caplog.set_level("WARNING", "trainer")
    caplog.clear()
    monkeypatch.setattr(program.logs.LOGGER, "propagate", True)
    checkpoints = [write_checkpoint(tmp_path / "checkpoints", GPT2, step=step) for step in (2, 4)]
    shard = next(checkpoints[0].path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    node = {
        "source": str(tmp_path / "checkpoints"),
        "results": str(tmp_path / "results"),
        "converted": str(tmp_path / "model-{step}"),
        "perplexity": {"enabled": False},
        "lm_eval": {"tasks": ["letters"]},
    }

    def run(**keys: Any) -> None:
        evaluation = read_evaluation({**node, **keys})
        program._run(program._Run(evaluation, {"model": {}}, {}, World(0, 1, 0, 1, "", 0)))

    with pytest.raises(UserError, match="is damaged"):
        run(step=[2, 4])
    run(every=1)
    assert models == [tmp_path / "model-4"]
    assert "step 2 is left out: " in caplog.text


def test_loss_that_is_not_finite_ends_no_other_checkpoints_measurement(tmp_path: Path) -> None:
    checkpoints = [write_checkpoint(tmp_path, GPT2, step=step) for step in (2, 4)]

    class Diverging:
        def measure(self, checkpoint: Checkpoint) -> SimpleNamespace:
            if checkpoint.marker.step == 2:
                raise DivergedError("the held-out loss is nan")
            return SimpleNamespace(checkpoint=checkpoint)

    def measured_steps(skips_damaged: bool) -> list[int]:
        evaluation: Any = Diverging()
        measurements = program._measure_all(evaluation, checkpoints, skips_damaged, lambda _: False)
        return [item.checkpoint.marker.step for item in measurements]

    assert measured_steps(skips_damaged=True) == [4]
    with pytest.raises(DivergedError):
        measured_steps(skips_damaged=False)


def test_mistakes_about_tasks_name_the_key(evaluate: Evaluator, tasks: Path, tmp_path: Path) -> None:
    def mistake(lm_eval: dict[str, Any], **node: Any) -> str:
        output = evaluate({"converted": "/absent", "results": str(tmp_path), "lm_eval": lm_eval, **node})
        assert output.codes == [2]
        assert "Traceback" not in output.stderr
        return output.stderr.splitlines()[-1]

    key = "error: evaluation.lm_eval.tasks"
    assert mistake({"tasks": ["/absent.yaml"]}) == f"{key}=/absent.yaml: there is no such file"
    assert "evaluation.converted is missing: expected" in mistake({"tasks": ["letters"]}, converted=None)
    broken = tmp_path / "broken.yaml"
    broken.write_text((tasks / "letters.yaml").read_text().replace("letters.jsonl", "absent.jsonl"))
    assert mistake({"tasks": [str(broken)]}).startswith(f"{key}={broken}: lm-eval cannot load it: ")
    assert not list(tmp_path.glob("step-*"))


def test_the_converted_model_has_our_loss_in_transformers_and_writes_text(
    evaluate: Evaluator, tokenized: Any
) -> None:
    model = evaluate.directory / "model-6"
    (block,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/evaluation.md").read_text(), re.DOTALL)
    # There are 32 positions for the prompt and what follows.
    code = block.replace("max_new_tokens=40", "max_new_tokens=8").replace(DOCUMENTED, str(model))
    settings = read_settings(flatten(evaluate.training))
    source = open_heldout(settings.data, find_indices(settings.data, heldout=True), settings.seq_length)
    batches = heldout_windows(source, settings.val_batches, settings.global_batch, 1, settings.seed)
    windows = [source.window(number).tolist() for batch in batches for number in batch if number is not None]
    request = evaluate.directory / "request.json"
    request.write_text(json.dumps({"windows": windows, "text": SENTENCE, "code": code}))
    command = [sys.executable, "-m", "tests.trainer.probe_converted", str(model), str(request)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout.splitlines()[-1])
    assert numbers["modules"] == []
    assert numbers["tokens"] == evaluate.tokens
    assert numbers["loss"] == pytest.approx(evaluate.losses[6], abs=1e-5)
    print(f"held-out loss: ours {evaluate.losses[6]:.7f}, transformers' {numbers['loss']:.7f}")
    assert numbers["printed"].startswith(PROMPT)
    assert len(numbers["printed"]) > len(PROMPT)
    bits_per_byte = evaluate.result(6, "both")["lm_eval"]["sentence"]["bits_per_byte"]
    assert bits_per_byte == pytest.approx(numbers["bits_per_byte"], rel=1e-5)


def test_the_check_of_a_conversion_finds_wrong_keys_and_weights(evaluate: Evaluator) -> None:
    output = evaluate.directory / "checked"
    export = ["export", str(evaluate.checkpoints), "--to", str(output), "--check"]
    good = evaluate.run("slipway.trainer.conversion.__main__", export)
    assert good.codes == [0], good.stderr
    report = json.loads((output / "report.json").read_text())
    assert report["passed"]
    assert report["ratio"] <= 4
    assert report["rounded"] == 0
    assert report["losses"]["ours"] == pytest.approx(report["losses"]["exact"], abs=1e-6)
    assert min(gradient["cosine"] for gradient in report["gradients"].values()) > 0.999999
    table = (output / "report.txt").read_text()
    assert table in good.stdout
    # The sizes stay the same, so that only a comparison can detect it.
    config = output / "config.json"
    config.write_text(config.read_text().replace('"gelu_new"', '"gelu"    '))
    weights = output / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x40
    weights.write_bytes(content)
    (output / "report.json").unlink()
    wrong = evaluate.run("slipway.trainer.conversion.__main__", export)
    assert wrong.codes == [1], wrong.stderr
    report = json.loads((output / "report.json").read_text())
    assert not report["passed"]
    assert report["ratio"] > 4
    assert report["rounded"] == 1
    assert "FAILED: not the checkpoint's: 1 tensors, by at most" in wrong.stdout
    node = {"source": str(evaluate.checkpoints), "to": "safetensors", "check": {"enabled": True}}
    with pytest.raises(UserError, match=r"conversion\.check\.enabled=True: .* expected False with"):
        convert(read_conversion({**node, "output": str(output)}))
    # A report is there: its verdict holds.
    assert evaluate.run("slipway.trainer.conversion.__main__", export).codes == [1]


def test_other_data_replace_a_result_and_the_earlier_file_is_kept(evaluate: Evaluator) -> None:
    alone = {"layout": {"tensor": 1}}
    node = {"results": str(evaluate.directory / "replaced"), "step": 4}
    assert evaluate({**node, "perplexity": alone}).codes == [0]
    first = evaluate.result(4, "replaced")
    output = evaluate({**node, "perplexity": {**alone, "batches": 1}})
    assert output.codes == [0], output.stderr
    assert "is replaced: other values; the earlier file is " in output.stdout
    second = evaluate.result(4, "replaced")
    assert second["perplexity"]["tokens"] == 8 * 32 < first["perplexity"]["tokens"]
    earlier = json.loads((evaluate.directory / "replaced" / "earlier" / "step-4-1.json").read_text())
    assert earlier == first
    # The whole of the data set, and not only the documents that are held out.
    prefix = evaluate.training["model"]["data"]["data_prefix"]
    assert evaluate({**node, "perplexity": {**alone, "data_prefix": prefix}}).codes == [0]
    assert evaluate.result(4, "replaced")["perplexity"]["tokens"] > 2 * first["perplexity"]["tokens"]
    # The last documents, which are those held out above, are in no split of the training's.
    test_split = {**alone, "split": "test"}
    refused = evaluate({**node, "perplexity": test_split}, splits="70,10,20")
    assert refused.codes == [2]
    assert "model.data.splits_string: [80.0, 20.0, 0.0] → [70.0, 10.0, 20.0]: expected" in refused.stderr
    test_split["other_data"] = True
    assert evaluate({**node, "perplexity": test_split}, splits="70,10,20").codes == [0]
    test = evaluate.result(4, "replaced")
    assert test["provenance"]["perplexity"]["conditions"]["split"] == "test"
    assert test["perplexity"]["loss"] == pytest.approx(first["perplexity"]["loss"], rel=NEAR)


@pytest.mark.parametrize(
    ("changes", "node", "expected"),
    [
        ({}, {}, None),
        ({"model.seed": 2}, {}, "model.seed: 1234 → 2"),
        ({"model.encoder_seq_length": 16}, {}, "model.encoder_seq_length: 32 → 16"),
        ({"model.data.eod_mask_loss": True}, {}, "model.data.eod_mask_loss: False → True"),
        ({"model.data.data_prefix": ["OTHER"]}, {}, "other.bin: the training had no such data"),
        ({"model.data.data_prefix": ["OTHER"]}, {"data_prefix": ["OTHER"]}, None),
        ({"model.data.data_prefix": ["COPY"]}, {}, None),
        ({"model.tokenizer.vocab_file": "OTHER.json"}, {}, "vocab_file): same size"),
        ({"model.tokenizer.vocab_file": "OTHER.json"}, {"data_prefix": ["OTHER"]}, "vocab_file): same size"),
        ({"BIN": "exchanged"}, {}, "data.bin (model.data.data_prefix): 1 → 9 bytes"),
        ({"BIN": "exchanged"}, {"data_prefix": ["OTHER"]}, None),
    ],
)
def test_data_that_are_not_the_trainings_are_found(
    tmp_path: Path, changes: dict[str, Any], node: dict[str, Any], expected: str | None
) -> None:
    for name, content in {"data": "x", "copy": "x", "other": "y"}.items():
        for suffix in ("bin", "idx", "json"):
            (tmp_path / f"{name}.{suffix}").write_text(content)

    def located(value: Any) -> Any:
        if isinstance(value, list):
            return [located(item) for item in value]
        is_name = isinstance(value, str) and value.partition(".")[0] in ("OTHER", "COPY")
        return str(tmp_path / value.lower()) if is_name else value

    keys = {
        **FAMILIES["llama"],
        "exp_manager.explicit_log_dir": "/x",
        "model.data.data_prefix": [str(tmp_path / "data")],
        "model.tokenizer.vocab_file": str(tmp_path / "data.json"),
        "model.override_vocab_size": 304,
    }
    before = flatten(config_with(keys))
    settings = read_settings(before)
    blend = settings.data.heldout
    assert blend is not None
    files = identity.to_json(identity.identify_data(settings.data, blend.prefixes))
    marker = Marker(2, 8, 1, 1, 1, {}, data=files, configuration=before)
    content = changes.pop("BIN", None)
    if content is not None:
        (tmp_path / "data.bin").write_text(content)
    requested = {key: located(value) for key, value in node.items()}
    perplexity = read_evaluation({"source": "/s", "results": "/r", "perplexity": requested}).perplexity
    now = flatten(config_with({**keys, **{key: located(value) for key, value in changes.items()}}))
    found = list(other_data.differences(marker, read_heldout_settings(now, perplexity), perplexity))
    assert bool(found) == (expected is not None), found
    assert expected is None or expected in found[0]


def test_split_named_test_is_read_where_each_split_has_its_data() -> None:
    node = {"source": "/s", "results": "/r", "perplexity": {"split": "test", "layout": {"pipeline": 1}}}
    perplexity = read_evaluation(node).perplexity
    assert perplexity is not None
    prefix = "model.data.data_prefix"
    flat = {f"{prefix}.train": ["/a"], f"{prefix}.validation": ["/b"], f"{prefix}.test": ["/c"]}
    keys = perplexity.training_keys({**flat, "model.virtual_pipeline_model_parallel_size": 2})
    assert keys[f"{prefix}.validation"] == ["/c"]
    # Parts of pipeline stages that are not there any more.
    assert keys["model.virtual_pipeline_model_parallel_size"] is None
    with pytest.raises(UserError, match=r"model\.data\.data_prefix\.test is missing: expected"):
        perplexity.training_keys({f"{prefix}.train": ["/a"]})


def test_other_data_and_layouts_are_free_of_the_teacher_and_of_later_weights() -> None:
    keys = {
        "exp_manager.explicit_log_dir": "/x",
        "model.data.data_prefix": [1, "/a", 0, "/b"],
        "model.tokenizer.vocab_file": "/vocab.json",
        "model.tokenizer.merge_file": "/merges.txt",
        "model.teacher": "/absent",
        "model.distillation.teacher_model.num_layers": 3,
        "resume.data_weights": [[8, [1, 1]]],
    }
    requested = {"data_prefix": ["/c"], "layout": {"pipeline": 2}}
    perplexity = read_evaluation({"source": "/s", "results": "/r", "perplexity": requested}).perplexity
    settings = read_heldout_settings(flatten(config_with(keys)), perplexity)
    assert evaluation_layout(settings, 2).pipeline == 2


def test_mistakes_name_the_key_and_leave_nothing(evaluate: Evaluator, tmp_path: Path) -> None:
    def mistake(node: dict[str, Any]) -> str:
        output = evaluate({"results": str(tmp_path / "none"), **node})
        assert output.codes == [2]
        assert output.stderr.startswith("error: ")
        assert len(output.stderr.splitlines()) == 1
        return output.stderr

    unknown = mistake({"perplexity": {"batch": 1}})
    assert "evaluation.perplexity.batch: there is no such key; did you mean 'batches'?" in unknown
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
