"""The table of checks: their ids, what each looks at, and which facts it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding
from launcher.checks.rules import (
    accounts,
    cluster,
    cluster_nodes,
    files,
    keys,
    layout,
    model,
    resources,
    runs,
    training,
)
from launcher.estimates.values import Values
from launcher.plan import Plan


class Check(NamedTuple):
    """A check: a pure function of a plan and of what is known of files and the cluster.

    Attributes
    ----------
    id
        Stable: users write it in ``--no-check=ID``.
    tells
        What it looks at, in one line of the documentation.
    needs
        Fields of `Facts` without which it is skipped. ``cluster.nodes`` is a part of one: it is skipped where
        `missing` of ``cluster`` has the reason, and is not applicable where nobody asked.
    """

    id: str
    tells: str
    find: Callable[[Plan, Facts], Iterable[Finding]]
    needs: tuple[str, ...] = ()


def _rules(*rules: Callable[..., Iterable[Finding]]) -> Callable[[Plan, Facts], Iterator[Finding]]:
    """Combine rules into the function of a check.

    A rule names what it reads: `plan`, `facts`, or NeMo's nodes as `values`, which some jobs do not have,
    and the `engine` that reads these.
    """
    named = [(rule, _parameters(rule)) for rule in rules]

    def find(plan: Plan, facts: Facts) -> Iterator[Finding]:
        config = plan.job.config
        known = {"plan": plan, "facts": facts, "values": Values(config or {}), "engine": plan.job.engine}
        for rule, parameters in named:
            if config is not None or "values" not in parameters:
                yield from rule(*[known[name] for name in parameters])

    return find


def _parameters(rule: Any) -> tuple[str, ...]:
    code = getattr(rule, "func", rule).__code__  # of a partial that of its function
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return tuple(name for name in names if name not in getattr(rule, "keywords", ()))


def _paths(check: str, tells: str, part: str) -> Check:
    """Return the check that the files of a part of `PathFacts` are there."""
    return Check(check, tells, files.missing_path_problems(check, attrgetter(part)), (f"paths.{part}",))


def _cluster(check: str, tells: str, find: cluster.Find, *parts: str) -> Check:
    """Return a check of parts of the cluster, whose site may change a job when it is submitted."""
    return Check(check, tells, cluster.unless_changed(find), tuple(f"cluster.{part}" for part in parts))


def _at_node_count(check: str) -> Callable[..., Iterable[Finding]]:
    return partial(layout.node_count_problems, check=check)


CHECKS: tuple[Check, ...] = (
    Check("type.whole", "sizes, counts and steps are whole numbers", _rules(keys.whole_problems)),
    Check(
        "type.number", "rates, dropouts and the like are numbers in their range", _rules(keys.number_problems)
    ),
    Check("type.flag", "switches are True or False", _rules(keys.flag_problems)),
    Check(
        "layout.world",
        "tensor × pipeline × context divides nodes × GPUs",
        _rules(_at_node_count("layout.world")),
    ),
    Check(
        "layout.tensor",
        "tensor divides heads, key/value groups, the MLP's hidden size and a vocabulary of its own size",
        _rules(layout.tensor_problems),
    ),
    Check(
        "layout.layers",
        "pipeline divides the layers, and virtual those of a stage",
        _rules(layout.layer_problems),
    ),
    Check("layout.virtual", "virtual stages have a pipeline", _rules(layout.virtual_problems)),
    Check(
        "layout.sequence_parallel",
        "sequence parallel has tensor > 1, and sequences that it can cut",
        _rules(layout.sequence_parallel_problems),
    ),
    Check("layout.context", "sequences are a multiple of 2 × context", _rules(layout.context_problems)),
    Check(
        "layout.split_rank", "a T5's decoder begins in a pipeline stage", _rules(layout.split_rank_problems)
    ),
    Check(
        "layout.experts",
        "expert and expert tensor parallel divide the experts, and nodes × GPUs",
        _rules(model.expert_layout_problems, _at_node_count("layout.experts")),
    ),
    Check(
        "layout.gpus",
        "there are as many GPUs on a node as tasks, with the types that they compute in",
        _rules(resources.gpu_problems),
    ),
    Check("memory.fits", "the model fits into the memory of a GPU", model.memory_problems),
    Check(
        "batch.global",
        "the global batch is a multiple of micro batch × data parallel",
        _rules(_at_node_count("batch.global")),
    ),
    Check(
        "batch.interleaved",
        "virtual stages have micro batches in groups of the pipeline size",
        _rules(_at_node_count("batch.interleaved")),
    ),
    Check("batch.rampup", "a growing batch can be divided all the way", _rules(training.rampup_problems)),
    Check(
        "elastic.counts",
        "every number of nodes of a range fits the layout and the batch",
        _rules(resources.count_problems),
    ),
    Check(
        "elastic.gpus",
        "GPUs are not asked for by task where the number of tasks is not known",
        _rules(resources.request_problems),
    ),
    Check("batch.accumulation", "gradients are accumulated once", _rules(training.accumulation_problems)),
    Check("model.heads", "heads divide the hidden size, groups the heads", _rules(layout.width_problems)),
    Check(
        "model.experts",
        "the router's numbers fit the experts, and layers with experts are what the engine builds",
        _rules(model.expert_problems),
    ),
    Check(
        "model.attention",
        "multi-latent attention has its sizes, and a sliding window is one that the engine has",
        _rules(model.attention_problems),
    ),
    Check(
        "model.sequence",
        "the data's sequences are as long as the model's, and there are positions for them",
        _rules(model.sequence_problems, model.decoder_problems),
    ),
    Check(
        "model.recompute", "the options of recomputing activations agree", _rules(model.recompute_problems)
    ),
    Check("data.prefix", "there is data, and weights go with prefixes", _rules(training.prefix_problems)),
    Check("profile.ranks", "profiled ranks are there", _rules(resources.rank_problems)),
    Check("schedule.warmup", "the learning rate has steps to decay in", _rules(training.warmup_problems)),
    Check("schedule.min_lr", "the learning rate falls, and does not rise", _rules(training.rate_problems)),
    Check(
        "schedule.validation", "there is a validation before the end", _rules(training.validation_problems)
    ),
    Check("time.limit", "the time limit is in one of Slurm's forms", _rules(runs.limit_problems)),
    Check("time.max_time", "training ends, and saves, before its job does", _rules(runs.max_time_problems)),
    Check(
        "time.training",
        "a chain of jobs is as long as the training, and that not longer than a year",
        runs.length_problems,
    ),
    Check(
        "time.save",
        "jobs are told to save before they end, and not as soon as they begin",
        _rules(runs.save_problems),
    ),
    Check(
        "chain.requeue", "the jobs of a chain are not requeued by Slurm too", _rules(runs.requeue_problems)
    ),
    Check(
        "chain.dependency",
        "the next job of a chain can wait for the one before it",
        _rules(runs.dependency_problems),
    ),
    Check(
        "chain.resume",
        "the jobs of a chain go on from each other's checkpoints",
        _rules(runs.resume_problems),
    ),
    Check(
        "keys.unknown",
        "keys that no shipped configuration has are not slips of ones that it has",
        _rules(keys.key_problems),
        needs=("added_keys", "shipped_keys"),
    ),
    Check(
        keys.TRAINER,
        "our trainer takes the configuration, where engine=megatron",
        _rules(keys.trainer_problems),
        needs=("trainer_verdict",),
    ),
    Check(
        "job.python",
        "the job's supervisor has a Python, 3.6.2 or newer",
        _rules(resources.python_problems),
        needs=("supervisor_python",),
    ),
    Check(
        "run.singleton",
        "no other run's jobs have the same name, to wait for each other",
        runs.singleton_problems,
        needs=("same_job_name",),
    ),
    Check(
        "run.training",
        "the run's checkpoints are of this training, and not of another one under its name",
        runs.training_problems,
        needs=("earlier.changes",),
    ),
    Check(
        "run.shards",
        "the checkpoint's optimizer states can be loaded by these tensor and pipeline parallel sizes",
        runs.shard_problems,
        needs=("earlier.goes_on",),
    ),
    Check(
        "data.identity",
        "the data are those that the run was trained on",
        runs.data_problems,
        needs=("earlier.data",),
    ),
    Check(
        "secret.file",
        "files of secrets are there, and can be read",
        files.file_problems,
        needs=("missing_secrets",),
    ),
    Check(
        "secret.permissions",
        "files of secrets are their owner's alone",
        files.permission_problems,
        needs=("open_secrets",),
    ),
    _paths("path.tokenizer", "the tokenizer's files are there, and what they should be", "tokenizer"),
    _paths("path.data", "the data sets are there, each .idx and .bin of as many tokens", "data"),
    _paths("path.sources", "what a data preparation, conversion or evaluation reads is there", "sources"),
    _paths(
        "path.checkpoint",
        "the checkpoint that the training is to go on from is there, and whole",
        "checkpoint",
    ),
    _paths("path.image", "an image that is a file is there, and a whole squashfs", "image"),
    _paths("image.fetch", "many nodes do not fetch an image of a registry at once", "fetched"),
    Check(
        "image.engine", "the image has what the engine runs", files.engine_problems, needs=("image.contents",)
    ),
    Check("image.network", "NCCL finds the plugin for EFA, where FI_PROVIDER=efa", files.network_problems),
    _paths(
        "path.script",
        "the job's program is there: the engine's in its checkout, a command's own on the nodes",
        "script",
    ),
    _paths("path.mounts", "what the container mounts is there", "mounts"),
    _paths("path.writable", "the directory of the run can be written", "results"),
    Check(
        "path.shared",
        "what the nodes of a job share is on no disk of this machine's own",
        files.shared_problems,
        needs=("paths.local",),
    ),
    Check(
        "space.checkpoints",
        "there is space for the next checkpoint, and for all that are kept",
        files.checkpoint_problems,
        needs=("paths.free_bytes",),
    ),
    Check(
        "space.output",
        "there is space for a converted model",
        files.conversion_problems,
        needs=("paths.free_bytes",),
    ),
    _cluster(
        "cluster.partition",
        "the partition is there, and takes jobs",
        cluster.partition_problems,
        "partitions",
    ),
    _cluster(
        "cluster.time_limit",
        "the time limit is not longer than what the partition gives",
        cluster.time_problems,
        "partitions",
    ),
    _cluster(
        "cluster.nodes",
        "the partition has as many nodes, and enough of them can be used now",
        cluster_nodes.node_problems,
        "partitions",
        "nodes",
    ),
    _cluster(
        "cluster.gpus",
        "the nodes have as many GPUs, of the type that is asked for",
        cluster_nodes.gpu_problems,
        "partitions",
        "nodes",
    ),
    _cluster(
        "cluster.cpus",
        "the nodes have the processors that the tasks ask for",
        cluster_nodes.cpu_problems,
        "partitions",
        "nodes",
    ),
    _cluster(
        "cluster.memory",
        "the nodes have the memory that is asked for",
        cluster_nodes.memory_problems,
        "partitions",
        "nodes",
    ),
    _cluster(
        "cluster.account",
        "the account is one of the user's, the partition takes it, and it gives what the job wants",
        accounts.account_problems,
        "settings",
        "associations",
        "partitions",
    ),
    _cluster(
        "cluster.qos",
        "the QOS is there, the account may use it, and it gives what the job wants",
        accounts.qos_problems,
        "settings",
        "qos",
        "associations",
        "partitions",
    ),
    Check(
        "cluster.array",
        "the cluster takes as many jobs as are submitted at once",
        cluster.array_problems,
        needs=("cluster.settings",),
    ),
    Check(
        "cluster.pyxis",
        "srun has Pyxis' options where there is a container",
        cluster.pyxis_problems,
        needs=("cluster.pyxis",),
    ),
    Check(
        files.MACHINE,
        "this machine has what a launch needs: an interpreter with the trainer's libraries, an allocation",
        _rules(files.machine_problems),
        needs=("host.in_allocation",),
    ),
    Check(
        files.SCHEDULER,
        "Slurm takes the script, by `sbatch --test-only`",
        _rules(files.submission_problems),
        needs=("submission.is_refused",),
    ),
)
