"""Each check, with configurations that it lets pass and that it does not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from launcher.plan import Chain, Profile
from launcher.preflight.facts import Facts, LostSecret
from launcher.preflight.findings import Finding, Severity
from launcher.preflight.registry import CHECKS, run_checks
from tests.preflight.plans import GPT, KNOWN, T5, changed, plan_of

T = "model.tensor_model_parallel_size"
P = "model.pipeline_model_parallel_size"
V = "model.virtual_pipeline_model_parallel_size"
C = "model.context_parallel_size"
E = "model.expert_model_parallel_size"
SPLIT = "model.pipeline_model_parallel_split_rank"
B = "model.global_batch_size"
RECOMPUTE = "model.activations_checkpoint"
WARMUP, CONSTANT = "model.optim.sched.warmup_steps", "model.optim.sched.constant_steps"
LIMIT = "exp_manager.max_time_per_run"
SHIPPED = frozenset(
    {"model.micro_batch_size", "model.rotary_percentage", "model.optim.lr", "trainer.max_steps"}
)


@dataclass(frozen=True)
class Case:
    """Changes to a configuration, and what the check says of it: words of its finding, or nothing."""

    id: str
    changes: dict[str, Any]
    words: tuple[str, ...] = ()
    base: dict[str, Any] = field(default_factory=lambda: GPT)
    severity: Severity = Severity.ERROR
    plan: dict[str, Any] = field(default_factory=dict)
    facts: Facts = KNOWN


def bad(id: str, changes: dict[str, Any], *words: str, **more: Any) -> Case:
    return Case(id, changes, words, **more)


def warns(id: str, changes: dict[str, Any], *words: str, **more: Any) -> Case:
    return Case(id, changes, words, severity=Severity.WARNING, **more)


def good(id: str, changes: dict[str, Any], **more: Any) -> Case:
    return Case(id, changes, (), **more)


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GPT["model"].items() if key != name}


def per_task(each: int, node: int | None) -> dict[str, Any]:
    """A job that asks for GPUs by the task, on nodes of so many."""
    asked = {"gpus_per_node": None, "gpus_per_task": each}
    return {"plan": {"resources": asked}, "facts": replace(KNOWN, node_gpus=node)}


def _range(least: int, most: int, **more: Any) -> dict[str, Any]:
    """A job on as many nodes as there are."""
    return {"resources": {"nodes": least, "max_nodes": most, **more}}


def chained(links: int = 3, **queue: Any) -> dict[str, Any]:
    """A job that is the first of a chain."""
    return {"links": links, "queue": {"requeue": False, "signal": "B:USR1@300", **queue}}


def lost(certain: bool) -> Facts:
    secret = LostSecret("env_files.HF_TOKEN", "/no/x", "there is no such file", certain)
    return replace(KNOWN, lost_secrets=(secret,))


PREFIX = "model.data.data_prefix"
MMAP = {"model.data.data_impl": "mmap"}

CASES = [
    # types
    bad(
        "type.whole",
        {"model.micro_batch_size": "foo"},
        "micro_batch_size='foo'",
        "whole number of at least 1",
    ),
    bad("type.whole", {"model.micro_batch_size": 2.5}, "micro_batch_size=2.5"),
    bad("type.whole", {"model.num_layers": 0}, "num_layers=0: expected a whole number of at least 1"),
    bad("type.whole", {"model.num_layers": True}, "num_layers=true"),
    bad("type.whole", {"model.num_layers": None}, "num_layers=null: a whole number is needed"),
    bad("type.whole", {T: -2}, "tensor_model_parallel_size=-2"),
    bad("type.whole", {"model.encoder.num_layers": "x"}, "model.encoder.num_layers='x'", base=T5),
    bad("type.whole", {"trainer.max_steps": None}, "training.trainer.max_steps=null"),
    good("type.whole", {WARMUP: 0, "model.data.num_workers": 0, V: None}),
    bad("type.whole", {"model": _without("num_layers")}, "num_layers=null", "the key is not there"),
    bad(
        "type.whole", {"model.encoder_seq_length": None}, "encoder_seq_length=null: a whole number is needed"
    ),
    bad("type.whole", {"model.seq_length": None}, "model.seq_length=null", base=T5),
    bad("type.whole", {"model.num_layers_in_first_pipeline_stage": 0}, "first_pipeline_stage=0"),
    bad("type.number", {"model.optim": None}, "model.optim=null: an optimizer is needed"),
    bad("type.number", {"model.optim.lr": None}, "lr=null: a learning rate is needed"),
    bad(
        "type.number", {"model.optim.lr": float("inf")}, "lr=inf: expected a number above 0, and not infinite"
    ),
    bad("type.number", {"model.optim.lr": 10**400}, "expected a number above 0"),
    bad("type.number", {"model.optim.lr": "fast"}, "lr='fast': expected a number above 0"),
    bad("type.number", {"model.optim.lr": 0}, "above 0"),
    bad("type.number", {"model.hidden_dropout": 1.0}, "at least 0 and below 1"),
    bad("type.number", {"model.optim.lr": float("nan")}, "lr=nan"),
    good("type.number", {"model.hidden_dropout": 0, "model.optim.lr": 1}),
    bad(
        "type.flag", {"model.sequence_parallel": "maybe"}, "sequence_parallel='maybe': expected True or False"
    ),
    good("type.flag", {"model.sequence_parallel": None}),
    # the world
    bad(
        "layout.world",
        {T: 3},
        "tensor 3 × pipeline 1 × context 1 = 3 does not divide 2 nodes × 8 GPUs = 16",
        "valid tensor sizes: 1, 2, 4, 8, 16",
        "node counts that would do: 3, 6, 12, 24",
        "tensor × pipeline that would do on 2 nodes: 8 × 2, 4 × 4, 2 × 8",
    ),
    bad(
        "layout.world",
        {T: 64},
        "= 64 does not divide 2 nodes × 8 GPUs = 16",
        "node counts that would do: 8, 16",
    ),
    bad("layout.world", {P: 3}, "pipeline_model_parallel_size=3", "pipeline 3 × context 1 = 3"),
    bad("layout.world", {C: 32}, "context_parallel_size=32"),
    bad("layout.world", {T: 8, P: 2, C: 2}, "context_parallel_size=2", "= 32 does not divide"),
    good("layout.world", {T: 8, P: 2}),
    # what tensor parallelism divides
    bad("layout.tensor", {T: 8, "model.num_attention_heads": 12}, "12 attention heads", "sizes: 1, 2, 4"),
    bad("layout.tensor", {T: 8, "model.num_query_groups": 4}, "4 key/value groups"),
    bad("layout.tensor", {T: 8, "model.ffn_hidden_size": 5444}, "5444 hidden units of the MLP"),
    bad("layout.tensor", {T: 8, "model.override_vocab_size": 50257}, "50257 tokens"),
    bad("layout.tensor", {T: 8}, "12 attention heads", "model.encoder.num_attention_heads", base=T5),
    good("layout.tensor", {T: 8, "model.num_query_groups": 8}),
    # what the pipeline divides
    bad("layout.layers", {P: 16}, "pipeline 16 does not divide 24 layers", "1, 2, 3, 4, 6, 8, 12, 24"),
    bad("layout.layers", {P: 4, V: 5}, "does not divide 6 layers of a pipeline stage", "null, 2, 3, 6"),
    bad("layout.layers", {P: 2, "model.num_layers_in_first_pipeline_stage": 25}, "24 layers - 25"),
    bad(
        "layout.layers",
        {P: 4, "model.account_for_loss_in_pipeline_split": True},
        "24 layers + 1 for the loss",
    ),
    bad("layout.layers", {P: 4, SPLIT: 2, "model.decoder.num_layers": 5}, "of the decoder 2", base=T5),
    good("layout.layers", {P: 4, V: 3}),
    good("layout.layers", {P: 4, SPLIT: 1}, base=T5),
    good(
        "layout.layers",
        {
            "model.num_layers": 30,
            P: 4,
            V: 2,
            "model.account_for_loss_in_pipeline_split": True,
            "model.account_for_embedding_in_pipeline_split": True,
        },
    ),
    good("layout.layers", {"model.num_layers": 26, P: 4, "model.num_layers_in_last_pipeline_stage": 2}),
    bad("layout.layers", {V: 5}, "does not divide 24 layers", "valid: null"),
    bad("layout.virtual", {P: 4, SPLIT: 2, V: 2}, "no virtual stages for an encoder-decoder", base=T5),
    bad("layout.virtual", {V: 2}, "no virtual stages for an encoder-decoder", base=T5),
    bad("layout.virtual", {V: 2}, "pipeline is 1", "=null, or a pipeline size of 2 or more"),
    warns("layout.virtual", {P: 2, V: 2}, "Megatron-LM refuses that", "overlap_p2p_comm=True"),
    bad("layout.virtual", {P: 2, V: 2}, "Megatron-LM refuses that", plan={"engine": "megatron_lm"}),
    bad("layout.virtual", {P: 4, V: 2, "model.megatron_amp_O2": False}, "megatron_amp_O2=false"),
    good("layout.virtual", {P: 4, V: 2}),
    good("layout.virtual", {P: 2, V: 2, "model.overlap_p2p_comm": True}),
    good("layout.virtual", {V: 1}),
    warns(
        "layout.sequence_parallel", {"model.sequence_parallel": True}, "tensor > 1", "NeMo switches it off"
    ),
    bad(
        "layout.sequence_parallel",
        {"model.sequence_parallel": True},
        "tensor > 1",
        plan={"engine": "megatron"},
    ),
    bad(
        "layout.sequence_parallel",
        {"model.sequence_parallel": True, T: 8, "model.encoder_seq_length": 2044},
        "tensor 8 × context 1 = 8",
    ),
    good("layout.sequence_parallel", {"model.sequence_parallel": True, T: 2}),
    bad("layout.world", {C: 3}, "context_parallel_size=3", "context sizes that would do: 1, 2, 4, 8, 16"),
    bad(
        "layout.context",
        {C: 3, "trainer.num_nodes": 3, B: 288, "model.encoder_seq_length": 2048},
        "2 × context 3 = 6",
        "context sizes that would do: 1, 2, 4, 8",
    ),
    bad(
        "layout.context",
        {C: 4, "model.encoder_seq_length": 2052},
        "2 × context 4 = 8",
        "context sizes that would do: 1, 2",
    ),
    good("layout.context", {C: 4}),
    bad("layout.split_rank", {P: 2}, "begins in one of the stages 1 to 1", base=T5),
    bad("layout.split_rank", {P: 4, SPLIT: 4}, "stages 1 to 3", "such as 2", base=T5),
    bad("layout.split_rank", {P: 4, SPLIT: None}, "split_rank=null", base=T5),
    good("layout.split_rank", {P: 2, SPLIT: 1}, base=T5),
    good("layout.split_rank", {}, base=T5),
    bad(
        "layout.split_rank",
        {P: 2, SPLIT: 1},
        "pipeline_model_parallel_size=2",
        "megatron-core 0.16 has no pipeline for an encoder-decoder",
        base=T5,
        plan={"engine": "megatron"},
    ),
    good("layout.split_rank", {}, base=T5, plan={"engine": "megatron"}),
    bad("layout.context", {C: 2}, "sequences are not cut", base=T5, plan={"engine": "megatron"}),
    bad("layout.split_rank", {SPLIT: 1}, "one pipeline stage", base=T5, plan={"engine": "megatron"}),
    bad("type.whole", {"model.data.seq_length": 10**400}, "whole number of at least 1", base=T5),
    bad("layout.experts", {E: 2}, "the model has no experts"),
    bad("layout.experts", {E: 3, "model.num_moe_experts": 8}, "8 experts", "valid expert sizes: 1, 2, 4, 8"),
    bad("layout.experts", {E: 8, "model.num_moe_experts": 8, T: 4}, "= 32 does not divide"),
    good("layout.experts", {E: 8, "model.num_moe_experts": 8, T: 2}),
    # GPUs
    bad("layout.gpus", {}, "8 tasks to a node", "4 GPUs for them", plan={"resources": {"gpus_per_node": 4}}),
    bad(
        "layout.gpus",
        {},
        "gres='gpu:h100:4'",
        "4 GPUs for them",
        plan={"resources": {"gpus_per_node": None, "gres": "gpu:h100:4"}},
    ),
    warns(
        "layout.gpus", {"trainer.devices": 4}, "4 GPUs of each node", plan={"resources": {"gpus_per_node": 8}}
    ),
    good("layout.gpus", {"trainer.accelerator": "cpu"}, plan={"resources": {"gpus_per_node": 2}}),
    good("layout.gpus", {}, plan={"resources": {"gpus_per_node": None, "gpus_per_task": 1}}),
    bad("layout.gpus", {}, "8 tasks to a node", "need 16 GPUs, and it has 8", "=1", **per_task(2, 8)),
    bad("layout.gpus", {}, "need 8 GPUs, and it has 4", "training.trainer.devices=4", **per_task(1, 4)),
    bad("layout.gpus", {}, "cluster.gpus_per_task=0: tasks without a GPU", **per_task(0, None)),
    warns("layout.gpus", {}, "a task uses one GPU: 8 GPUs of each node", **per_task(2, None)),
    warns("layout.gpus", {"trainer.devices": 4}, "4 GPUs of each node would be idle", **per_task(1, 8)),
    good("layout.gpus", {}, **per_task(1, 8)),
    # data
    bad("data.prefix", {**MMAP, PREFIX: []}, "data_prefix=[]: no data is named", "data_impl=mock"),
    bad("data.prefix", {**MMAP, PREFIX: None}, "data_prefix=null: expected a list"),
    bad("data.prefix", {**MMAP, PREFIX: [0.5, "a", "b"]}, "do not come in pairs"),
    bad("data.prefix", {**MMAP, PREFIX: ["a", 0.5]}, "do not come in pairs"),
    bad("data.prefix", {**MMAP, PREFIX: [["a"]]}, "expected prefixes, and numbers"),
    bad("data.prefix", {**MMAP, PREFIX: {"train": [], "test": None}}, "data_prefix.train=[]: no data"),
    bad("data.prefix", {**MMAP, PREFIX: {"validation": ["a"]}}, "data_prefix.train=null: expected a list"),
    bad(
        "data.prefix", {**MMAP, PREFIX: {"train": ["a"], "valid": ["b"]}}, "data_prefix.valid=", "validation"
    ),
    bad("data.prefix", {**MMAP, PREFIX: [0, "a", 1, "b"]}, "a weight is not above 0"),
    bad("data.prefix", {**MMAP, PREFIX: ["nan", "a", 1, "b"]}, "a weight is not above 0"),
    *(
        good("data.prefix", {**MMAP, PREFIX: prefix})
        for prefix in (["a"], "a", [0.5, "a", "0.5", "b"], ["a", "b"], {"train": ["a"], "test": None})
    ),
    good("data.prefix", {"model.data.data_impl": "mock", PREFIX: []}),
    bad("profile.ranks", {}, "ranks=[0, 16]: there is no rank 16 among 16 tasks", plan={"ranks": (0, 16)}),
    good("profile.ranks", {}, plan={"ranks": (0, 15)}),
    # batches
    bad(
        "batch.global",
        {B: 100},
        "global_batch_size=100: not a multiple of micro batch 4 × data parallel 16 = 64",
        "global batches near it: 64, 128, 192",
        "node counts that would do:",
    ),
    bad("batch.global", {B: 1}, "global batches near it: 64, 128"),
    bad("batch.global", {B: 96}, "valid micro batch sizes: 1, 2, 3, 6"),
    good("batch.global", {B: 192}),
    bad(
        "batch.interleaved",
        {P: 4, V: 2, B: 96},
        "is 6 micro batches, and virtual pipeline 2 wants them in groups of 4",
        "global batches near it: 64, 128",
    ),
    bad("batch.interleaved", {P: 8, V: 3, B: 32}, "is 4 micro batches"),
    good("batch.interleaved", {P: 4, V: 2, B: 128}),
    good("batch.interleaved", {P: 4, B: 96}),
    bad("batch.rampup", {"model.rampup_batch_size": [64, 64]}, "three whole numbers"),
    bad("batch.rampup", {"model.rampup_batch_size": [64, 64, 0]}, "three whole numbers"),
    bad("batch.rampup", {"model.rampup_batch_size": "64,64,1000"}, "three whole numbers"),
    bad("batch.rampup", {"model.rampup_batch_size": [64, 128, 1000]}, "from 64 to global batch 256 is 192"),
    bad(
        "batch.rampup", {"model.rampup_batch_size": [256, 64, 1000]}, "256, is already the global batch, 256"
    ),
    bad(
        "batch.rampup",
        {"model.rampup_batch_size": [512, 64, 1000]},
        "512, is more than the global batch, 256",
    ),
    bad(
        "batch.rampup",
        {"model.rampup_batch_size": [32, 64, 1000], B: 96},
        "null, or fewer nodes or a smaller",
    ),
    bad(
        "batch.rampup",
        {"model.rampup_batch_size": [32, 32, 1000], B: 64},
        "null, or fewer nodes or a smaller",
    ),
    bad(
        "batch.rampup",
        {"model.rampup_batch_size": [32, 32, 1000]},
        "32 is not a multiple of micro batch 4",
        "of 64, such as 64",
    ),
    good("batch.rampup", {"model.rampup_batch_size": [64, 64, 1000]}),
    bad("batch.accumulation", {"trainer.accumulate_grad_batches": 4}, "accumulated already"),
    good("batch.accumulation", {"trainer.accumulate_grad_batches": None}),
    bad("elastic.counts", {}, "with 3 nodes", "fit: 1, 2, 4", plan=_range(1, 4)),
    good("elastic.counts", {B: 384}, plan=_range(1, 4)),
    good("elastic.counts", {"trainer.num_nodes": 3}),
    bad("elastic.gpus", {}, "a known number of tasks", plan=_range(1, 2, gpus_per_task=1)),
    good("elastic.gpus", {}, plan=_range(1, 2, gpus_per_task=None)),
    good("elastic.gpus", {}, plan={"resources": {"gpus_per_task": 1}}),
    # chains of jobs; further cases are in test_resilience_checks.py
    bad("chain.requeue", {}, "cluster.requeue=true", "the chain of 3 jobs", plan=chained(requeue=True)),
    bad("chain.requeue", {}, "whatever the site's default is", plan=chained(requeue=None)),
    good("chain.requeue", {}, plan=chained()),
    bad("chain.dependency", {}, "alternatives", plan=chained(dependency="afterok:1?afterok:2")),
    good("chain.dependency", {}, plan=chained(dependency="afterok:1,singleton")),
    bad("chain.resume", {"exp_manager.resume_if_exists": False}, "begin anew", plan=chained()),
    good("chain.resume", {"exp_manager.resume_if_exists": False}, plan=chained(links=1)),
    bad("time.save", {}, "as soon as it begins", plan=chained(links=1, signal="B:USR1@86400")),
    good("time.save", {}, plan=chained(links=1, signal="B:USR1@86399")),
    # the model
    bad("model.heads", {"model.num_attention_heads": 24}, "does not divide hidden size 4096", "kv_channels"),
    bad("model.heads", {"model.num_query_groups": 5}, "does not divide 32 attention heads"),
    good("model.heads", {"model.num_attention_heads": 24, "model.kv_channels": 128}),
    bad("model.sequence", {"model.data.seq_length": 1024}, "built for sequences of 2048 tokens", "2048"),
    bad("model.sequence", {"model.max_position_embeddings": 1024}, "learned positions for fewer tokens"),
    bad("model.sequence", {"model.data.seq_length": 1024}, "model.seq_length", base=T5),
    bad("model.sequence", {"model.data.seq_length_dec": 76}, "512 × masked_lm_prob 0.15 = 77", base=T5),
    bad("model.sequence", {"model.data.dataset_type": "ul2"}, "shorter than data.seq_length 512", base=T5),
    good("model.sequence", {"model.position_embedding_type": "rope", "model.max_position_embeddings": 1}),
    good("model.sequence", {"model.data.seq_length_dec": 77}, base=T5),
    bad("model.recompute", {f"{RECOMPUTE}_granularity": "half"}, "full, selective or null"),
    bad(
        "model.recompute",
        {f"{RECOMPUTE}_granularity": "full", f"{RECOMPUTE}_num_layers": 1},
        "method=null",
        "needs block or uniform",
    ),
    bad(
        "model.recompute",
        {f"{RECOMPUTE}_granularity": "full", f"{RECOMPUTE}_method": "block"},
        "num_layers=null",
    ),
    bad(
        "model.recompute",
        {f"{RECOMPUTE}_granularity": "selective", f"{RECOMPUTE}_num_layers": 1},
        "null is needed here",
    ),
    bad("model.recompute", {f"{RECOMPUTE}_granularity": "selective", f"{RECOMPUTE}_method": "x"}, "uniform"),
    good("model.recompute", {f"{RECOMPUTE}_method": "block", f"{RECOMPUTE}_num_layers": 0}),
    good("model.recompute", {f"{RECOMPUTE}_granularity": "selective"}),
    # the schedule
    warns("schedule.warmup", {WARMUP: 900, CONSTANT: 200}, "warm-up 900 + constant 200 steps are more than"),
    warns(
        "schedule.warmup",
        {WARMUP: 2000, CONSTANT: 500},
        "no more steps than the warm-up",
        "max_steps of more than warm-up 2000 + constant 500 = 2500",
    ),
    good("schedule.warmup", {WARMUP: 2000, CONSTANT: 500, "trainer.max_steps": 2501}),
    bad("schedule.warmup", {WARMUP: 10}, "takes this or warmup_ratio", base=T5),
    good("schedule.warmup", {WARMUP: 900, CONSTANT: 100}),
    bad("schedule.min_lr", {"model.optim.sched.min_lr": 1e-3}, "not below the learning rate 0.0001"),
    bad("schedule.min_lr", {"model.optim.sched.min_lr": 1e-4, CONSTANT: 5}, "not below"),
    good("schedule.min_lr", {"model.optim.sched.min_lr": 1e-4}),
    warns("schedule.validation", {"trainer.val_check_interval": 2000}, "no validation, and so no checkpoint"),
    good("schedule.validation", {"trainer.val_check_interval": 1000}),
    good("schedule.validation", {"trainer.val_check_interval": 0.25}),
    good("schedule.validation", {"trainer.val_check_interval": 2000, "trainer.limit_val_batches": 0.0}),
    # time
    bad(
        "time.limit",
        {},
        "training.run.time_limit='banana'",
        "MINUTES",
        plan={"resources": {"time_limit": "banana"}},
    ),
    *(
        good("time.limit", {}, plan={"resources": {"time_limit": text}})
        for text in ("30", "30:00", "1:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED", None)
    ),
    warns(
        "time.max_time",
        {"trainer.max_time": "01:00:00:00"},
        "time limit, 1-00:00:00",
        "'00:23:30:00' or less",
    ),
    bad("time.max_time", {"trainer.max_time": 1800}, "max_time=1800: expected days:hours:minutes:seconds"),
    bad("time.max_time", {LIMIT: "23:30:00"}, "max_time_per_run='23:30:00'"),
    bad("time.max_time", {"trainer.max_time": None, LIMIT: 30}, "training.trainer.max_time=30"),
    good("time.max_time", {"trainer.max_time": "09:00:00:00", LIMIT: "00:23:00:00"}),
    good("time.max_time", {"trainer.max_time": "09:00:00:00"}, plan={"resources": {"time_limit": None}}),
    good("time.max_time", {"trainer.max_time": None}),
    # names
    warns(
        "keys.unknown",
        {"model.micro_batchsize": 4},
        "training.model.micro_batchsize=4: no shipped configuration has this key",
        "did you mean training.model.micro_batch_size?",
        facts=Facts(("model.micro_batchsize",), SHIPPED, (), {}),
    ),
    good("keys.unknown", {"model.max_step": 4}, facts=Facts(("model.max_step",), SHIPPED, (), {})),
    good("keys.unknown", {"model.rotary_base": 4}, facts=Facts(("model.rotary_base",), SHIPPED, (), {})),
    bad(
        "engine.megatron",
        {},
        "training.model.activation='gleu': expected one of gelu; did you mean 'gelu'?",
        facts=replace(
            KNOWN, trainer_verdict="model.activation='gleu': expected one of gelu; did you mean 'gelu'?"
        ),
    ),
    good("engine.megatron", {}),
    warns(
        "run.singleton",
        {},
        "jobs of /a, /b, /c, ... are called nemo-megatron-run too",
        "training.run.dependency=null",
        facts=Facts((), frozenset(), ("/a", "/b", "/c", "/d"), {}),
    ),
    good(
        "run.singleton",
        {},
        plan={"dependency": None},
        facts=Facts((), frozenset(), ("/a",), {}),
    ),
    warns(
        "secret.permissions",
        {},
        "/home/u/key, which WANDB_API_KEY is read from",
        "chmod 600 /home/u/key",
        facts=Facts((), frozenset(), (), {"WANDB_API_KEY": "/home/u/key"}),
    ),
    good("secret.permissions", {}),
    bad("secret.file", {}, "env_files.HF_TOKEN='/no/x': there is no such file", facts=lost(True)),
    warns("secret.file", {}, "there is no such file on this machine; every node", facts=lost(False)),
    good("secret.file", {}),
]


def findings_of(case: Case) -> list[Finding]:
    more = dict(case.plan)
    ranks, links, queue = more.pop("ranks", None), more.pop("links", 1), more.pop("queue", {})
    plan = plan_of(changed(case.base, case.changes), **more)
    asked = replace(plan.job.queue, **queue)
    plan = replace(plan, job=replace(plan.job, chain=Chain(links=links), queue=asked))
    if ranks is not None:
        plan = replace(plan, job=replace(plan.job, profile=Profile(ranks, ("cuda",), "/profiles")))
    return [finding for finding in run_checks(plan, case.facts) if finding.id == case.id]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}-{ascii(str(case.changes))[:40]}")
def test_a_check_finds_what_it_is_for(case: Case) -> None:
    found = findings_of(case)
    if not case.words:
        assert found == []
        return
    told = "\n".join(f"{finding.message}\n{finding.fix}" for finding in found)
    for word in case.words:
        assert word in told
    assert found[0].severity is case.severity


def test_every_check_has_cases_of_both_kinds() -> None:
    ids = {check.id for check in CHECKS}
    assert {case.id for case in CASES if case.words} == ids
    assert {case.id for case in CASES if not case.words} == ids
