"""Cases of checks: changes to a configuration, and what a check says of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from launcher.checks.facts import (
    Change,
    EarlierTraining,
    Facts,
    ImageFacts,
    MissingPath,
    PathFacts,
    SavedShards,
)
from launcher.checks.findings import Severity
from launcher.plan import Container
from launcher.releases import contents_of
from tests.checks.clusters import CLUSTER
from tests.checks.plans import GPT, KNOWN

T = "model.tensor_model_parallel_size"
P = "model.pipeline_model_parallel_size"
V = "model.virtual_pipeline_model_parallel_size"
C = "model.context_parallel_size"
E = "model.expert_model_parallel_size"
ETP = "model.expert_tensor_parallel_size"
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
    """Changes to a configuration, and words of the check's finding; none where the check passes."""

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


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GPT["model"].items() if key != name}


def per_task(gpus: int, node_gpus: int | None) -> dict[str, Any]:
    """Return a job that requests GPUs per task, on nodes with a number of GPUs."""
    resources = {"gpus_per_node": None, "gpus_per_task": gpus}
    return {"plan": {"resources": resources}, "facts": replace(KNOWN, node_gpus=node_gpus)}


def of_type(gpu_type: str) -> dict[str, Any]:
    """Return the resources of a job that names the type of its GPUs in `--gres`."""
    return {"gpus_per_node": None, "gres": f"gpu:{gpu_type}:8", "gpu_type": gpu_type}


def node_range(least: int, most: int, **more: Any) -> dict[str, Any]:
    """Return a job on a range of nodes."""
    return {"resources": {"nodes": least, "max_nodes": most, **more}}


def chain(links: int = 3, **queue: Any) -> dict[str, Any]:
    """Return a job that is the first of a chain."""
    return {"links": links, "queue": {"requeue": False, "signal": "B:USR1@300", **queue}}


def missing_secret(certain: bool) -> Facts:
    secret = MissingPath("env_files.HF_TOKEN", "/no/x", "there is no such file", certain)
    return replace(KNOWN, paths=PathFacts(secrets=(secret,)))


def conversion(free_bytes: int, dtype: str | None = None) -> dict[str, Any]:
    """Return a job that converts a model, and the space that is left for it."""
    node = {"model": GPT["model"], "model_type": "gpt", "dtype": dtype, "output": "/shared/out"}
    facts = replace(KNOWN, paths=PathFacts(free_bytes=free_bytes))
    return {"plan": {"stage_config": {"conversion": node}}, "facts": facts}


def missing_path(part: str, key: str, certain: bool = True) -> Facts:
    missing = MissingPath(key, "/no/x", "there is no such file", certain, "another")
    return replace(KNOWN, paths=PathFacts(**{part: (missing,)}))  # type: ignore[arg-type]


def earlier_training(*changes: Change, data: tuple[str, ...] = (), **others: Any) -> Facts:
    """Return facts with an earlier launch of the run, whose checkpoints the job resumes."""
    training = EarlierTraining(2, goes_on=True, changes=changes, data=data, data_since="launch 2", **others)
    return replace(KNOWN, earlier=training)


def added(key: str, engine: str) -> dict[str, Any]:
    """Return a job of an engine, to whose configuration a key was added."""
    return {"plan": {"engine": engine}, "facts": Facts((key,), SHIPPED, (), {})}


def sharded_checkpoint(checkpoint: str, tensor: int, pipeline: int, virtual: int) -> Facts:
    """Return facts with a checkpoint to resume from, whose optimizer states are in shards."""
    shards = SavedShards(checkpoint, tensor, pipeline, virtual)
    return replace(KNOWN, earlier=EarlierTraining(2, goes_on=True, shards=shards))


def tokenized(*names: str, certain: bool = True) -> Facts:
    """Return facts with data sets that another tokenizer made."""
    others = tuple(MissingPath(PREFIX, f"/{name}", "another", certain, "of its own") for name in names)
    return replace(KNOWN, paths=PathFacts(tokens=others))


def on_disks(results: int, inputs: int) -> Facts:
    """Return facts with numbers of results and inputs on a disk of this machine's own."""
    why = "it is on a local file system of this machine (ext4, mounted at /)"
    paths = [MissingPath(key, "/x", why, False) for key in ("base_results_dir", "container")]
    return replace(KNOWN, paths=PathFacts(local=(*paths[:1] * results, *paths[1:] * inputs)))


def cluster_request(resources: dict[str, Any] | None = None, **queue: Any) -> dict[str, Any]:
    """Return a job with requests to the cluster of `clusters`."""
    return {
        "plan": {"resources": resources or {}, "queue": queue},
        "facts": replace(KNOWN, cluster=CLUSTER),
    }


def with_array(tasks: int) -> dict[str, Any]:
    return {"facts": replace(KNOWN, cluster=CLUSTER, array_tasks=tasks)}


def in_container(pyxis: bool) -> dict[str, Any]:
    return {
        "plan": {"container": Container("nvcr.io#nvidia/nemo:24.07", ())},
        "facts": replace(KNOWN, cluster=replace(CLUSTER, pyxis=pyxis)),
    }


def in_image(tag: str, engine: str = "nemo", **environment: str) -> dict[str, Any]:
    """Return a job in one of NVIDIA's images of NeMo."""
    contents = contents_of("nvcr.io", "nvidia/nemo", tag)
    container = Container(f"nvcr.io#nvidia/nemo:{tag}", ())
    return {
        "plan": {"container": container, "engine": engine, "environment": environment},
        "facts": replace(KNOWN, image=ImageFacts(contents)),
    }


PREFIX = "model.data.data_prefix"
MMAP = {"model.data.data_impl": "mmap"}

MEGATRON_LM = {"engine": "megatron_lm"}
MOE = {
    "model.num_moe_experts": 8,
    "model.moe_router_topk": 2,
    E: 8,
    T: 2,
    "model.sequence_parallel": True,
}
LATENT = {
    "model.multi_latent_attention": True,
    "model.q_lora_rank": None,
    "model.kv_lora_rank": 512,
    "model.qk_head_dim": 128,
    "model.qk_pos_emb_head_dim": 64,
    "model.v_head_dim": 128,
}
