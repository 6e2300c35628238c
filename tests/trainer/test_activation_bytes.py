"""The memory estimate of a layer and of a parameter, next to the bytes that megatron-core keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.estimates.activations import Layer, kept_by_embedding, kept_by_output
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.estimates.training import training_of
from slipway.trainer.config.load import flatten
from tests.trainer.conftest import config_with
from tests.trainer.t5 import T5, both
from tests.warm import WarmPool

pytestmark = pytest.mark.trainer

RANKS, VOCABULARY = 2, 256
TOKENS, BATCH, TARGETS = 128, 4, 64
# Statistics of norms and rotary angles, which are not worth counting in a real model.
CLOSE = 0.03

COMMON: dict[str, Any] = {
    "exp_manager.explicit_log_dir": "/unused",
    "trainer.devices": RANKS,
    "trainer.precision": "bf16",
    "model.megatron_amp_O2": True,
    "model.micro_batch_size": BATCH,
    "model.attention_backend": "sdpa",
    "model.bias_activation_fusion": True,
    "model.data.data_impl": "mock",
}
GPT: dict[str, Any] = {
    **COMMON,
    "model.encoder_seq_length": TOKENS,
    "model.max_position_embeddings": TOKENS,
    "model.data.seq_length": TOKENS,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 256,
    "model.num_attention_heads": 4,
}
LLAMA: dict[str, Any] = {
    "model.activation": "fast-swiglu",
    "model.normalization": "rmsnorm",
    "model.position_embedding_type": "rope",
    "model.num_query_groups": 2,
    "model.bias": False,
    "model.share_embeddings_and_output_weights": False,
    "model.ffn_hidden_size": 160,
}
MIXED_T5: dict[str, Any] = {
    **COMMON,
    **T5,
    **both(hidden_size=64, ffn_hidden_size=128, kv_channels=16, num_layers=1, hidden_dropout=0.1),
    "model.seq_length": TOKENS,
    "model.max_position_embeddings": TOKENS,
    "model.data.seq_length_dec": TARGETS,
    "model.tensor_model_parallel_size": 2,
}
TENSOR = {"model.tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "model.sequence_parallel": True}
HIDDEN = {"model.hidden_dropout": 0.1}
LOCAL = {**HIDDEN, "model.attention_dropout": 0.1, "model.attention_backend": "local"}
RECOMPUTE = "model.activations_checkpoint_granularity"

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "dropout": HIDDEN,
    "tensor": {**HIDDEN, **TENSOR},
    "sequence": {**HIDDEN, **SEQUENCE},
    "scores": {**LOCAL, **SEQUENCE},
    "selective": {**LOCAL, RECOMPUTE: "selective"},
    "full": {**HIDDEN, **SEQUENCE, RECOMPUTE: "full", "model.activations_checkpoint_method": "uniform"},
    "llama": LLAMA,
    "unfused": {**LLAMA, **SEQUENCE, "model.bias_activation_fusion": False},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "distributed": {"model.optim.name": "mcore_distributed_optim"},
    "alone": {"model.optim.name": "mcore_distributed_optim", **TENSOR},
    "not distributed": {"model.optim.name": "adamw"},
    "fp32": {"model.optim.name": "adamw", "trainer.precision": 32, "model.megatron_amp_O2": False},
}
# The logits are more than what the backward pass of a layer needs.
DISTILLED: dict[str, Any] = {
    "model.override_vocab_size": 4096,
    "model.teacher": "/teacher",
    **{
        f"model.distillation.teacher_model.{name}": size
        for name, size in (("num_layers", 8), ("hidden_size", 64), ("num_attention_heads", 4))
    },
    "model.distillation.teacher_model.ffn_hidden_size": 256,
}


def configurations() -> dict[str, dict[str, Any]]:
    """Return configurations by name and depth: of each variant one of a layer and one of two."""
    configs = {
        f"{name} {depth}": config_with({**GPT, **changes, "model.num_layers": depth})
        for name, changes in VARIANTS.items()
        for depth in (1, 2)
    }
    configs["distilled"] = config_with({**GPT, **DISTILLED, "model.num_layers": 4})
    for encoder, decoder in ((1, 1), (2, 1), (1, 2)):
        depths = {"model.encoder.num_layers": encoder, "model.decoder.num_layers": decoder}
        configs[f"t5 {encoder} {decoder}"] = config_with({**MIXED_T5, **depths})
    return configs


def with_optimizers() -> dict[str, dict[str, Any]]:
    return {
        name: config_with({**GPT, "model.num_layers": 1, **changes}) for name, changes in OPTIMIZERS.items()
    }


def test_student_and_teacher_take_the_estimated_bytes(measurements: dict[str, Any]) -> None:
    config = configurations()["distilled"]
    states = {
        part: measurements["states"]["distilled"][part] for part in ("weights", "gradients", "optimizer")
    }
    measured_bytes = sum(states.values()) + measurements["activations"]["distilled"]
    taught, alone = estimate(config), estimate({**config, "model": {**config["model"], "teacher": None}})
    assert taught.total == pytest.approx(measured_bytes, rel=0.02)
    assert alone.total < 0.9 * measured_bytes


@pytest.fixture(scope="module")
def measurements(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bytes")
    requests = {
        "ranks": RANKS,
        "vocabulary": VOCABULARY,
        "activations": {name: flatten(config) for name, config in configurations().items()},
        "states": {
            **{name: flatten(config) for name, config in with_optimizers().items()},
            "distilled": flatten(configurations()["distilled"]),
        },
    }
    questions, answers, output = (directory / name for name in ("questions", "answers", "said"))
    questions.write_text(json.dumps(requests))
    process = pool.start([str(questions), str(answers)], {}, output, "tests.trainer.probe_activations")
    assert process.wait() == 0, output.read_text()
    result: dict[str, Any] = json.loads(answers.read_text())
    return result


def estimate(config: dict[str, Any]) -> StageMemory:
    stages = estimate_memory(config, 1, "megatron")
    assert stages is not None
    (stage,) = stages
    return stage


def difference(numbers: dict[str, float], more: str, less: str) -> float:
    return numbers[more] - numbers[less]


@pytest.mark.parametrize(
    ("more", "less"),
    [
        *((f"{name} 2", f"{name} 1") for name in VARIANTS),
        ("t5 2 1", "t5 1 1"),  # a layer of the encoder
        ("t5 1 2", "t5 1 1"),  # of the decoder
    ],
)
def test_layer_keeps_the_estimated_bytes(measurements: dict[str, Any], more: str, less: str) -> None:
    configs = configurations()
    activations = {name: estimate(configs[name]).activations for name in (more, less)}
    measured_bytes = difference(measurements["activations"], more, less)
    assert difference(activations, more, less) == pytest.approx(measured_bytes, rel=CLOSE)


@pytest.mark.parametrize("name", ["gpt", "dropout", "tensor", "sequence", "llama"])
def test_ends_of_a_model_keep_the_estimated_bytes(measurements: dict[str, Any], name: str) -> None:
    activations = measurements["activations"]
    measured_bytes = 2 * activations[f"{name} 1"] - activations[f"{name} 2"]
    training = training_of(configurations()[f"{name} 1"], 1, "megatron")
    assert training is not None
    layer, tensor = Layer(training, training.stacks[0]), training.parallel.tensor
    ends = kept_by_embedding(layer).plus(kept_by_output(layer))
    logits = 4 * VOCABULARY / tensor
    expected = TOKENS * BATCH * (ends.on_rank(tensor, training.sequence_parallel) + logits)
    # The tokens, their positions and the labels come on top of it, in 64 bits.
    assert expected == pytest.approx(measured_bytes, rel=CLOSE, abs=TOKENS * BATCH * 32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameter_takes_the_estimated_bytes(measurements: dict[str, Any], name: str) -> None:
    states, stage = measurements["states"][name], estimate(with_optimizers()[name])
    for part in ("weights", "gradients", "optimizer"):
        per_parameter = getattr(stage, part) / stage.parameters
        assert per_parameter == pytest.approx(states[part] / states["parameters"], rel=0.01), part
