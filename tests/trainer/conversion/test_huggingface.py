"""Weights of Hugging Face's models become checkpoints and come back; trainings start from them.

The models are random and large: where all is nearly zero, a wrong activation looks like a right one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import compatible, store
from slipway.trainer.checkpoint.description import description_from_json, model_keys
from slipway.trainer.config.architecture import read_architecture
from slipway.trainer.config.values import Values
from slipway.trainer.conversion.convert import convert
from slipway.trainer.conversion.importing import import_weights
from slipway.trainer.conversion.safetensors_files import SafetensorsFiles
from slipway.trainer.conversion.spec import Conversion
from slipway.trainer.data.order import Order
from slipway.trainer.data.source import MockSource
from tests.trainer.conftest import Tokenized, Trainings, environment, free_port
from tests.trainer.conversion import huggingface_models
from tests.trainer.parity.test_parity import FACTOR, FAMILIES, both
from tests.trainer.probing import run_probe
from tests.trainer.t5 import T5
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

SIZE, SEED = 301, 1234
PROBE = "tests.trainer.conversion.logits_probe"
QWEN2 = {**FAMILIES["llama"], "model.qkv_bias": True, "model.rotary_base": 1_000_000}
_T5 = {**both("hidden_size", 48), "model.seq_length": 32, "model.data.seq_length_dec": 12}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt3": {
        "model.num_layers": 3,
        "model.hidden_size": 48,
        "model.num_attention_heads": 6,
        "model.ffn_hidden_size": 80,
        "model.layernorm_epsilon": 1e-3,
        "model.share_embeddings_and_output_weights": False,
    },
    "llama2": FAMILIES["llama"],
    "llama3_1": {
        **FAMILIES["llama"],
        "model.kv_channels": 64,
        "model.rotary_base": 500000,
        "model.scale_positional_embedding": True,
    },
    "mistral": {**FAMILIES["llama"], "model.kv_channels": 16},
    "qwen2": QWEN2,
    "qwen2_tied": {**QWEN2, "model.share_embeddings_and_output_weights": True},
    # GPT-3's improved sizes are such models.
    "stablelm": {
        **FAMILIES["llama"],
        "model.normalization": "layernorm",
        "model.rotary_percentage": 0.5,
    },
    "t5": {**FAMILIES["t5"], **_T5, "model.tokens_head_bias": False},
    "t5_v1_1": {**FAMILIES["t5_v1_1"], **_T5},
}
# A run whose vocabulary is exactly the imported one.
RUN: dict[str, Any] = {
    "model.data.data_impl": "mock",
    "model.override_vocab_size": SIZE,
    "model.tokenizer.vocab_file": None,
    "model.tokenizer.merge_file": None,
    "trainer.limit_val_batches": 0,
}


@dataclass(frozen=True)
class ConvertedModels:
    """The directories of all models: ``source``, ``checkpoint`` and ``exported``; and their numbers."""

    root: Path
    loss: float
    imported: list[str]
    ours: dict[str, Any]
    logits: dict[str, Any]


@pytest.fixture(scope="module")
def converted_models(
    configuration: Any, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory
) -> ConvertedModels:
    root = tmp_path_factory.mktemp("converted")
    source, order = MockSource(32, SIZE, SEED), Order(None, SEED)
    windows = [source.window(order.window(sample)) for sample in range(8)]
    torch.save(torch.stack([torch.as_tensor(window) for window in windows]), root / "windows.pt")
    process = subprocess.Popen(
        [sys.executable, "-I", huggingface_models.__file__, str(root), str(SIZE)],
        cwd=root,
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            loss = json.loads(process.stdout.readline())["loss"]
            for name in CASES:
                directory = root / name
                import_weights(
                    Conversion(directory / "source", "slipway", directory / "checkpoint"),
                    directory / "source",
                )
                convert(Conversion(directory / "checkpoint", "huggingface", directory / "exported"))
            ours = _compute_logits(root, configuration, pool)
            output, _ = process.communicate("\n", timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    logits = torch.load(root / "logits.pt")
    return ConvertedModels(root, loss, json.loads(output)["imported"], ours, logits)


def _compute_logits(root: Path, configuration: Any, pool: WarmPool) -> dict[str, Any]:
    base = root / "base.yaml"
    changes = {"exp_manager.explicit_log_dir": str(root), "model.data.data_impl": "mock"}
    base.write_text(yaml.safe_dump(configuration(changes)))
    arguments = [str(base), json.dumps(CASES), str(root), str(SIZE)]
    run_probe(pool, PROBE, arguments, root, (environment(0, 1, free_port()),))
    logits: dict[str, Any] = torch.load(root / "ours.pt")
    return logits


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_survives_the_round_trip_bit_by_bit(
    converted_models: ConvertedModels, name: str
) -> None:
    source, exported = converted_models.root / name / "source", converted_models.root / name / "exported"
    with SafetensorsFiles(source) as before, SafetensorsFiles(exported) as after:
        assert set(before.tensors()) == set(after.tensors())
        for tensor in before.tensors():
            assert before.read(tensor).dtype == after.read(tensor).dtype
            assert torch.equal(before.read(tensor), after.read(tensor)), tensor


@pytest.mark.parametrize("name", CASES)
def test_options_survive_the_round_trip(converted_models: ConvertedModels, name: str) -> None:
    before, after = (
        json.loads((converted_models.root / name / part / "config.json").read_text())
        for part in ("source", "exported")
    )
    rope = before.pop("rope_parameters", None)
    if rope:
        before["rope_theta"] = rope.pop("rope_theta")
        before["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
        before["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    assert after["architectures"] == before["architectures"]
    for key in set(before) & set(after) - {"tie_word_embeddings", "n_inner"}:
        assert after[key] == before[key], key


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_hugging_face(converted_models: ConvertedModels, name: str) -> None:
    exact, theirs = converted_models.logits[name]["exact"], converted_models.logits[name]["theirs"]
    ours = converted_models.ours[name].double()
    assert float(exact.abs().max()) > 0.5
    assert float((ours - exact).abs().max()) <= FACTOR * float((theirs - exact).abs().max())


def test_converted_models_need_nothing_of_slipway(converted_models: ConvertedModels) -> None:
    assert converted_models.imported == []


def test_first_loss_of_a_continued_training_equals_hugging_faces(
    converted_models: ConvertedModels, trainings: Trainings
) -> None:
    start = {
        **RUN,
        "restore_from_path": str(converted_models.root / "gpt2" / "checkpoint"),
        "trainer.max_steps": 2,
    }
    launches = [
        trainings("continued", start, arguments=arguments) for arguments in (["--stop-after", "1"], [])
    ]
    for launch in launches:
        assert launch.codes in ([0], [75]), launch.stderr
    (first, loss), (second, _) = launches[1].curve("loss")
    assert loss == pytest.approx(converted_models.loss, rel=1e-6)
    assert (first, second) == (1, 2)
    # The second launch has a checkpoint of its own.
    outputs = [launch.stdout[0] + launch.stderr[0] for launch in launches]
    assert ["starting from the weights of" in text for text in outputs] == [True, False]


def test_rows_that_pad_the_vocabulary_hardly_change_the_loss(
    converted_models: ConvertedModels, trainings: Trainings
) -> None:
    changes = {
        **RUN,
        "restore_from_path": str(converted_models.root / "gpt2"),
        "model.tensor_model_parallel_size": 2,
        "trainer.max_steps": 1,
    }
    launch = trainings("padded", changes, world=2)
    assert launch.codes == [0, 0], launch.stderr
    ((_, loss),) = launch.curve("loss")
    # 301 tokens padded to 302: the bound of `initial_weights`.
    assert 0 < loss - converted_models.loss < math.log(1 + 1 / SIZE)


def test_a_t5_is_trained_further_and_exported_to_hugging_face(
    converted_models: ConvertedModels, trainings: Trainings, tokenized: Tokenized, tmp_path: Path
) -> None:
    words = len(json.loads((tokenized.tokenizer / "vocab.json").read_text()))
    changes = {
        **T5,
        **CASES["t5"],
        "model.data.data_impl": "mock",
        "model.tokenizer.num_sentinel_tokens": SIZE - words,
        "model.make_vocab_size_divisible_by": 1,
        "restore_from_path": str(converted_models.root / "t5" / "checkpoint"),
        "trainer.max_steps": 1,
        "trainer.limit_val_batches": 0,
    }
    launch = trainings("t5", changes)
    assert launch.codes == [0], launch.stderr
    (result,) = convert(Conversion(launch.log_dir / "checkpoints", "huggingface", tmp_path / "{step}"))
    with (
        SafetensorsFiles(converted_models.root / "t5" / "source") as before,
        SafetensorsFiles(result.output) as after,
    ):
        assert set(before.tensors()) == set(after.tensors())
        distances = [float((before.read(name) - after.read(name)).abs().max()) for name in before.tensors()]
    # One step of Adam: each weight by no more than the learning rate, and all by some of it.
    assert min(distances) > 0 and max(distances) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.hidden_size": 48}, r"restore_from_path=.* has model\.hidden_size=32, and the run 48"),
        ({"model.override_vocab_size": 200}, r"the checkpoint has 301 tokens, and model\.tokenizer 200"),
    ],
)
def test_weights_of_another_model_are_refused(
    converted_models: ConvertedModels, trainings: Trainings, changes: dict[str, Any], message: str
) -> None:
    start = {**RUN, **changes, "restore_from_path": str(converted_models.root / "gpt2" / "checkpoint")}
    launch = trainings(f"refused-{len(message)}", start)
    assert launch.codes == [2]
    assert "Traceback" not in launch.stderr[0]
    assert re.search(message, launch.stderr[0])


def test_damaged_weights_are_refused(
    converted_models: ConvertedModels, trainings: Trainings, tmp_path: Path
) -> None:
    shutil.copytree(converted_models.root / "gpt2" / "checkpoint", tmp_path / "damaged")
    shard = tmp_path / "damaged" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    launch = trainings("damaged", {**RUN, "restore_from_path": str(tmp_path / "damaged")})
    assert launch.codes == [2]
    assert (
        "restore_from_path=" in launch.stderr[0]
        and "is damaged (__0_0.distcp has checksum" in launch.stderr[0]
    )


@pytest.mark.parametrize(
    ("case", "changes", "key"),
    [
        ("gpt2", {"bias": False}, r"model\.bias=True, and the run False"),
        ("gpt2", {"max_positions": 16}, r"model\.max_position_embeddings=32, and the run 16"),
        ("gpt3", {"tied_embeddings": True}, r"model\.share_embeddings_and_output_weights=False"),
        ("t5", {"num_layers": 2}, r"model\.decoder\.num_layers=3, and the run 2"),
        ("t5", {"head_bias": True}, r"model\.tokens_head_bias=False, and the run True"),
        ("t5", {"tied_embeddings": False}, r"model\.share_decoder_tokens_head_embeddings=True"),
    ],
)
def test_differences_are_named_by_their_keys(
    converted_models: ConvertedModels, case: str, changes: dict[str, Any], key: str
) -> None:
    checkpoint = store.open_named(converted_models.root / case / "checkpoint")
    description = description_from_json(checkpoint.marker.model, "x")
    with pytest.raises(UserError, match=key):
        compatible.check_shapes(
            "it",
            checkpoint.marker.architecture,
            replace(description, decoder=replace(description.decoder, **changes)),
        )


def test_keys_that_change_the_computation_are_reported(converted_models: ConvertedModels) -> None:
    checkpoint = store.open_named(converted_models.root / "llama3_1" / "checkpoint")
    description = description_from_json(checkpoint.marker.model, "x")
    shape = description.decoder
    other = replace(shape, rotary_base=10000, norm_epsilon=1e-5, rope=replace(shape.rope, fusion=True))
    differences = list(compatible.function_differences(description, replace(description, decoder=other)))
    assert differences == [("model.rotary_base", 500000, 10000), ("model.layernorm_epsilon", 1e-3, 1e-5)]
    assert list(compatible.function_differences(description, description)) == []


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("t5")])
def test_the_keys_of_an_imported_model_make_the_same_model(
    converted_models: ConvertedModels, case: str
) -> None:
    checkpoint = store.open_named(converted_models.root / case / "checkpoint")
    description = description_from_json(checkpoint.marker.model, "x")
    keys = {f"model.{key}": value for key, value in model_keys(description.decoder).items()}
    shape = read_architecture(Values({**keys, "model.encoder_seq_length": 16}))
    rebuilt = replace(description, decoder=shape)
    compatible.check_shapes("it", checkpoint.marker.architecture, rebuilt)
    assert list(compatible.function_differences(description, rebuilt)) == []


def test_a_gpt_does_not_start_from_a_t5(converted_models: ConvertedModels) -> None:
    checkpoint = store.open_named(converted_models.root / "t5" / "checkpoint")
    description = description_from_json(checkpoint.marker.model, "x")
    with pytest.raises(UserError, match="is a T5, and the run a GPT"):
        compatible.check_shapes("it", checkpoint.marker.architecture, replace(description, encoder=None))


def _copy_of(converted_models: ConvertedModels, tmp_path: Path, **options: Any) -> Path:
    source = converted_models.root / "gpt2" / "source"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **options}))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_function": "gelu"}, "activation_function=gelu: our models lack it; expected one of"),
        ({"model_type": "gpt_2"}, "model_type=gpt_2: .*; did you mean 'gpt2'"),
        ({"n_layer": 3}, r"it lacks transformer\.h\.2\..* and 11 more"),
        ({"n_layer": 1}, r"config\.json knows no transformer\.h\.1\..* and 11 more"),
        ({"vocab_size": 300}, r"wte\.weight: expected \[300, 32\] as config\.json has it, not \[301, 32\]"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True: our models have"),
    ],
)
def test_models_that_contradict_their_options_are_refused(
    converted_models: ConvertedModels, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "source").mkdir()
    source = _copy_of(converted_models, tmp_path / "source", **options)
    with pytest.raises(UserError, match=message):
        import_weights(Conversion(source, "slipway", tmp_path / "out"), source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def _rewrite(
    converted_models: ConvertedModels, case: str, directory: Path, change: Callable[[str, Any], Any]
) -> Path:
    """Write the weights of a model with other names and types."""
    directory.mkdir()
    source = converted_models.root / case / "source"
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    with SafetensorsFiles(source) as files:
        save_file(
            dict(change(name, files.read(name)) for name in files.tensors()), directory / "model.safetensors"
        )
    return directory


@pytest.mark.parametrize("case", ["gpt2", "t5"])
def test_weights_in_16_bits_stay_as_they_are(
    converted_models: ConvertedModels, tmp_path: Path, case: str
) -> None:
    source = _rewrite(converted_models, case, tmp_path / "source", lambda name, x: (name, x.bfloat16()))
    for conversion in (
        Conversion(source, "slipway", tmp_path / "checkpoint"),
        Conversion(tmp_path / "checkpoint", "huggingface", tmp_path / "exported"),
    ):
        convert(conversion)
    with SafetensorsFiles(source) as before, SafetensorsFiles(tmp_path / "exported") as after:
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors())


def test_the_names_of_the_first_gpt2_files_are_known(
    converted_models: ConvertedModels, tmp_path: Path
) -> None:
    source = _rewrite(
        converted_models, "gpt2", tmp_path / "source", lambda name, x: (name.removeprefix("transformer."), x)
    )
    with SafetensorsFiles(source) as files:
        tensors = {name: files.read(name) for name in files.tensors()}
    # Masks and a copy of the tied embedding, which later versions leave out.
    extra = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file({**tensors, **extra}, source / "model.safetensors")
    convert(Conversion(source, "slipway", tmp_path / "checkpoint"))
    convert(Conversion(tmp_path / "checkpoint", "huggingface", tmp_path / "exported"))
    with SafetensorsFiles(tmp_path / "exported") as after:
        assert {name.removeprefix("transformer.") for name in after.tensors()} == set(tensors)
        assert torch.equal(after.read("transformer.wte.weight"), tensors["wte.weight"])


def test_repeated_import_reuses_its_checkpoint(converted_models: ConvertedModels) -> None:
    directory = converted_models.root / "llama2"
    before = (directory / "checkpoint" / "complete.json").stat().st_mtime_ns
    import_weights(
        Conversion(directory / "source", "slipway", directory / "checkpoint"), directory / "source"
    )
    assert (directory / "checkpoint" / "complete.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="the result of another conversion is there"):
        import_weights(
            Conversion(directory / "source", "slipway", directory / "checkpoint", dtype="bfloat16"),
            directory / "source",
        )
