"""Megatron-LM's own parser takes the arguments of each size, and reads the size's values from them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from launcher.config.compose import compose, list_options
from launcher.plan import Job
from launcher.stages.planning import plan_launch
from tests.megatron_lm.conftest import HERE, MegatronLm
from tests.stages.test_megatron_lm_start import load_start

# Megatron-LM has no CPUs, T5's stock activation is not among its own, nor a T5 with GPT's tokenizer.
_CHANGED = {
    "tiny": ["training.trainer.accelerator=gpu"],
    "t5/tiny": ["training.model.tokenizer.type=BertWordPieceCase"],
    "t5": [f"training.model.{stack}.activation=gelu" for stack in ("encoder", "decoder")],
}

SIZES = list_options("training")

Parsed = Mapping[str, Mapping[str, Any]]


def job_of(size: str) -> tuple[Job, Any]:
    """Return the job of a size, and its configuration."""
    overrides = [text for part, texts in _CHANGED.items() if part in size for text in texts]
    config = compose(
        ["engine=megatron_lm", "launcher_scripts_path=/shared", f"training={size}", *overrides]
    ).config
    return plan_launch(config, number=1, tag="x").job, config.training


@pytest.fixture(scope="session")
def parser_answers(megatron_lm: MegatronLm) -> dict[str, Parsed]:
    """Return the options that the parser read for each size."""
    start, trainings = load_start(), []
    for size in SIZES:
        job, _ = job_of(size)
        _, model_type, *options = job.payload.argv[3:]
        try:
            command = start.command(megatron_lm.source, model_type, options)
        except SystemExit as error:
            trainings.append({"refused": str(error)})
            continue
        trainings.append(
            {
                "arguments": command[3:],
                "environment": dict(job.environment),
                "world_size": job.resources.tasks,
                "model_type": model_type,
            }
        )
    result = subprocess.run(
        [megatron_lm.python, HERE / "parsing.py"],
        input=json.dumps(trainings),
        env={**os.environ, "PYTHONPATH": megatron_lm.python_path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(zip(SIZES, json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.timeout(360)  # the first asks Megatron-LM
@pytest.mark.parametrize("size", SIZES)
def test_the_parser_understands_each_size(size: str, parser_answers: dict[str, Parsed]) -> None:
    job, training = job_of(size)
    answer = parser_answers[size]
    if "refused" in answer:
        assert "has no pipeline stages for T5" in str(answer["refused"])
        assert training.model["pipeline_model_parallel_size"] > 1
        return
    assert "error" not in answer, answer["error"]
    stack = training.model.get("encoder", training.model)
    expected = {**shape(stack), **layout(training.model, job)}
    assert {name: answer["config"][name] for name in expected} == expected
    expected = {**run_of(training), **positions(training.model, stack)}
    assert {name: answer["args"][name] for name in expected} == expected


def shape(stack: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers, by the names of megatron-core's TransformerConfig."""
    heads, hidden = stack["num_attention_heads"], stack["hidden_size"]
    swiglu = stack.get("activation") == "fast-swiglu"
    return {
        "num_layers": stack["num_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": stack["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": stack.get("num_query_groups") or heads,
        "kv_channels": stack.get("kv_channels") or hidden // heads,
        "gated_linear_unit": swiglu,
        "add_bias_linear": stack.get("bias", True),
        "normalization": "RMSNorm" if stack.get("normalization") == "rmsnorm" else "LayerNorm",
        "layernorm_zero_centered_gamma": stack.get("normalization") == "layernorm1p",
        "layernorm_epsilon": stack["layernorm_epsilon"],
        "hidden_dropout": stack["hidden_dropout"],
        "attention_dropout": stack.get("attention_dropout", 0.1),
        "init_method_std": stack["init_method_std"],
        # Without a bias there is nothing to fuse, except with a gate.
        "bias_activation_fusion": stack.get("bias_activation_fusion", True)
        and (swiglu or stack.get("bias", True)),
        "bias_dropout_fusion": stack.get("bias_dropout_add_fusion", True),
        "persist_layer_norm": stack.get("persist_layer_norm", True),
        "apply_rope_fusion": stack.get("apply_rope_fusion", False),
        "apply_query_key_layer_scaling": False,  # for 16 bits of the narrow range
    }


def layout(model: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return the layout of the model, by the same names."""
    tensor, pipeline = model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]
    virtual = model.get("virtual_pipeline_model_parallel_size")
    if "encoder" in model and pipeline > 1:
        pipeline -= model["pipeline_model_parallel_split_rank"]
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": model.get("context_parallel_size", 1),
        "sequence_parallel": bool(model.get("sequence_parallel")) and tensor > 1,
        "overlap_p2p_comm": bool(virtual and model.get("overlap_p2p_comm")),
        "tp_comm_overlap": bool(model.get("ub_tp_comm_overlap")),
        "defer_embedding_wgrad_compute": bool(model.get("defer_embedding_wgrad_compute")),
        "wgrad_deferral_limit": model.get("wgrad_deferral_limit") or 0,
    }


def run_of(training: Any) -> dict[str, Any]:
    """Return batches, steps and precision, by the names of the parser's arguments."""
    trainer, model = training.trainer, training.model
    return {
        "micro_batch_size": model["micro_batch_size"],
        "global_batch_size": model["global_batch_size"],
        "train_iters": trainer["max_steps"],
        "lr": float(model["optim"]["lr"]),
        "min_lr": float(model["optim"]["sched"]["min_lr"]),
        "clip_grad": trainer["gradient_clip_val"],
        "weight_decay": model["optim"]["weight_decay"],
        "adam_beta2": model["optim"]["betas"][1],
        "bf16": trainer["precision"] == "bf16",
        "fp16": False,
        "eval_iters": trainer["limit_val_batches"],
        "exit_signal_handler": True,
        "use_distributed_optimizer": str(trainer["precision"]) != "32",  # which it could not load
        "ckpt_format": "torch_dist",
        "use_legacy_models": False,
    }


def positions(model: Mapping[str, Any], stack: Mapping[str, Any]) -> dict[str, Any]:
    """Return sequences, positions and embeddings, by the same names."""
    shared = model.get("share_embeddings_and_output_weights", True)
    return {
        "seq_length": model["data"]["seq_length"],
        "max_position_embeddings": model["max_position_embeddings"],
        "position_embedding_type": stack.get("position_embedding_type", "learned_absolute"),
        "rotary_base": stack.get("rotary_base", 10000),
        "rotary_percent": stack.get("rotary_percentage", 1.0),
        "use_rope_scaling": bool(model.get("scale_positional_embedding")),
        "untie_embeddings_and_output_weights": not shared,
        "make_vocab_size_divisible_by": model["make_vocab_size_divisible_by"],
    }
