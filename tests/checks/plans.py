"""Plans to check, made of literals: a small GPT on two nodes of eight GPUs, and changes to it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding
from launcher.checks.gate import check_drafts
from launcher.drafting import Draft, Request, draft
from launcher.plan import Job, Payload, Plan, Queue, Resources
from launcher.runs.paths import LaunchPaths

# All of these facts are known, and none is a problem.
KNOWN = Facts(
    (),
    frozenset(),
    same_job_name=(),
    open_secrets={},
    supervisor_python="",
    trainer_verdict="",
    unexpanded=(),
)

GPT: dict[str, Any] = {
    "trainer": {
        "num_nodes": 2,
        "devices": 8,
        "accelerator": "gpu",
        "precision": "bf16",
        "max_steps": 1000,
        "max_time": "00:23:30:00",
        "val_check_interval": 100,
        "accumulate_grad_batches": 1,
    },
    "exp_manager": {"resume_if_exists": True, "checkpoint_callback_params": {"every_n_train_steps": None}},
    "model": {
        "micro_batch_size": 4,
        "global_batch_size": 256,
        "rampup_batch_size": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "megatron_amp_O2": True,
        "encoder_seq_length": 2048,
        "override_vocab_size": 51_200,
        "max_position_embeddings": 2048,
        "num_layers": 24,
        "hidden_size": 4096,
        "ffn_hidden_size": 16384,
        "num_attention_heads": 32,
        "num_query_groups": None,
        "kv_channels": None,
        "activations_checkpoint_granularity": None,
        "activations_checkpoint_method": None,
        "activations_checkpoint_num_layers": None,
        "transformer_engine": True,
        "optim": {
            "name": "mcore_distributed_optim",
            "lr": 1e-4,
            "sched": {
                "name": "CosineAnnealing",
                "warmup_steps": 100,
                "constant_steps": 0,
                "min_lr": 1e-5,
            },
        },
        "data": {"seq_length": 2048},
    },
}

_STACK = {
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 12,
    "kv_channels": 64,
}

T5: dict[str, Any] = {
    "trainer": GPT["trainer"],
    "exp_manager": GPT["exp_manager"],
    "model": {
        "micro_batch_size": 16,
        "global_batch_size": 256,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "pipeline_model_parallel_split_rank": 0,
        "seq_length": 512,
        "tokenizer": {"type": "BertWordPieceLowerCase"},
        "max_position_embeddings": 512,
        "encoder": {**_STACK},
        "decoder": {**_STACK},
        "optim": {"lr": 1e-4, "sched": {"name": "WarmupAnnealing", "warmup_ratio": 0.01, "min_lr": 1e-5}},
        "data": {"dataset_type": "t5", "seq_length": 512, "seq_length_dec": 128, "masked_lm_prob": 0.15},
    },
}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with dotted keys set."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        *parents, name = key.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return result


def plan_of(
    config: dict[str, Any] | None,
    *,
    engine: str = "nemo",
    resources: dict[str, Any] | None = None,
    dependency: str | None = "singleton",
    scheduler: str = "slurm",
) -> Plan:
    """Return the plan of a job with a configuration, as the training stage makes it."""
    trainer = (config or {}).get("trainer", {})
    requested = {
        "nodes": trainer.get("num_nodes", 1),
        "tasks_per_node": trainer.get("devices", 1),
        "gpus_per_node": trainer.get("devices"),
        "time_limit": "1-00:00:00",
        **(resources or {}),
    }
    return Plan(
        paths=LaunchPaths(Path("/results/run"), "run", "nemo-megatron-run", 1),
        tag="tag",
        scheduler=scheduler,
        slurm_conf=None,
        job=Job(
            stage="training" if config is not None else "data_preparation",
            engine=engine,
            resources=Resources(**requested),
            queue=Queue(dependency=dependency),
            payload=Payload(argv=("python3",), working_dir="/"),
            config=config,
        ),
    )


@cache
def _base_draft() -> Draft:
    return draft(Request(overrides=["cluster=bcm"], command=[]))


def draft_of(plan: Plan) -> Draft:
    """Return a draft of a plan that nobody composed."""
    return replace(_base_draft(), plan=plan)


def findings_of(draft: Draft, skipped: Sequence[str] = (), *, look: bool = True) -> list[Finding]:
    """Return the findings about a draft, as a launch reports them."""
    (report,) = check_drafts([draft], skipped, look=look)
    return list(report.findings)
