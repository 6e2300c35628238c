"""The table of checks: their ids, what each looks at, and which facts it needs."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from launcher.errors import one_line
from launcher.plan import Plan
from launcher.preflight import (
    accounts,
    batches,
    cluster,
    cluster_nodes,
    data,
    elastic,
    gpus,
    limits,
    memory,
    model,
    names,
    paths,
    profiling,
    recompute,
    resilience,
    schedule,
    secrets,
    sequences,
    space,
    time,
    types,
)
from launcher.preflight.facts import Facts
from launcher.preflight.findings import Finding, Severity, full
from launcher.preflight.layout import problems_at
from launcher.preflight.shape import shape_of
from launcher.preflight.values import Values

TRAINER = "engine.megatron"
# How its messages name keys: as in the file that it reads, which has no node `training`.
_KEY = re.compile(r"(?P<key>[\w.]+)(=| is missing)")
_NODE = re.compile(r"(?<![\w./])(?=(trainer|exp_manager|model|resume)\.\w)")


class Check(NamedTuple):
    """A check: a pure function of a plan and of what is known of files and the cluster.

    Attributes
    ----------
    id
        Stable: users write it in ``--no-check=ID``.
    tells
        What it looks at, in one line of the documentation.
    find
        The findings; none if all is well.
    needs
        Fields of `Facts` without which it is skipped. ``cluster.nodes`` is a part of one: it is skipped where
        `missing` of ``cluster`` has the reason, and has nothing to look at where nobody asked.
    """

    id: str
    tells: str
    find: Callable[[Plan, Facts], Iterable[Finding]]
    needs: tuple[str, ...] = ()


def _trainer(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if facts.trainer_verdict:
        named = _KEY.match(facts.trainer_verdict)
        key = full(named["key"]) if named else None
        yield Finding(TRAINER, Severity.ERROR, key, one_line(_NODE.sub("training.", facts.trainer_verdict)))


def _nemo(find: Callable[[Values], Iterable[Finding]]) -> Callable[[Plan, Facts], Iterable[Finding]]:
    """A check of NeMo's nodes, of jobs that have them."""

    def ask(plan: Plan, facts: Facts) -> Iterable[Finding]:
        return find(Values(plan.job.config)) if plan.job.config is not None else ()

    return ask


def _engine(find: Callable[[Values, str], Iterable[Finding]]) -> Callable[[Plan, Facts], Iterable[Finding]]:
    """A check of NeMo's nodes whose answer depends on who reads them."""

    def ask(plan: Plan, facts: Facts) -> Iterable[Finding]:
        return find(Values(plan.job.config), plan.job.engine) if plan.job.config is not None else ()

    return ask


def _at_node_count(check: str) -> Callable[[Plan, Facts], Iterator[Finding]]:
    """A check of the layout at the plan's node count, with the ways out."""

    def ask(plan: Plan, facts: Facts) -> Iterator[Finding]:
        values, nodes = Values(plan.job.config or {}), plan.job.resources.nodes
        shape = shape_of(values)
        if shape is None or elastic.is_elastic(plan.job.resources):  # which looks at all of its counts
            return
        for found in problems_at(shape, nodes):
            if found.id == check:
                # Imported late: most layouts fit.
                from launcher.preflight.ways_out import ways_out

                yield replace(found, fix=ways_out(check, values, shape, plan, facts))

    return ask


def _context(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The context size, with others that would do at the plan's node count."""
    values = Values(plan.job.config or {})
    shape = shape_of(values)
    for found in model.context_problems(values, plan.job.engine):
        if shape is None or found.fix:
            yield found
        else:
            from launcher.preflight.ways_out import ways_out  # late, as above

            yield replace(found, fix=ways_out(found.id, values, shape, plan, facts))


def _rampup(plan: Plan, facts: Facts) -> Iterable[Finding]:
    values = Values(plan.job.config or {})
    shape = shape_of(values)
    if shape is None or elastic.is_elastic(plan.job.resources):
        return ()
    return batches.rampup_problems(values, shape, plan.job.resources.nodes)


def _gpus(plan: Plan, facts: Facts) -> Iterable[Finding]:
    if plan.job.config is None:
        return ()
    return gpus.gpu_problems(Values(plan.job.config), plan.job.resources, facts)


def _time_limit(plan: Plan, facts: Facts) -> Iterable[Finding]:
    return limits.limit_problems(_limit_key(plan), plan.job.resources.time_limit)


def _max_time(plan: Plan, facts: Facts) -> Iterable[Finding]:
    values = Values(plan.job.config or {})
    return limits.max_time_problems(values, _limit_key(plan), plan.job.resources.time_limit)


def _limit_key(plan: Plan) -> str:
    return f"{plan.job.stage}.run.time_limit"


def _keys(plan: Plan, facts: Facts) -> Iterable[Finding]:
    return names.key_problems(Values(plan.job.config or {}), facts)


CHECKS: tuple[Check, ...] = (
    Check("type.whole", "sizes, counts and steps are whole numbers", _nemo(types.whole_problems)),
    Check(
        "type.number", "rates, dropouts and the like are numbers in their range", _nemo(types.number_problems)
    ),
    Check("type.flag", "switches are True or False", _nemo(types.flag_problems)),
    Check(
        "layout.world",
        "tensor × pipeline × context divides nodes × GPUs",
        _at_node_count("layout.world"),
    ),
    Check(
        "layout.tensor",
        "tensor divides heads, key/value groups, the MLP's hidden size and a vocabulary of its own size",
        _nemo(model.tensor_problems),
    ),
    Check(
        "layout.layers",
        "pipeline divides the layers, and virtual those of a stage",
        _nemo(model.layer_problems),
    ),
    Check("layout.virtual", "virtual stages have a pipeline", _engine(model.virtual_problems)),
    Check(
        "layout.sequence_parallel",
        "sequence parallel has tensor > 1, and sequences that it can cut",
        _engine(model.sequence_parallel_problems),
    ),
    Check("layout.context", "sequences are a multiple of 2 × context", _context),
    Check(
        "layout.split_rank", "a T5's decoder begins in a pipeline stage", _engine(model.split_rank_problems)
    ),
    Check(
        "layout.experts",
        "expert parallel divides the experts, and nodes × GPUs",
        lambda plan, facts: (
            *_nemo(model.expert_problems)(plan, facts),
            *_at_node_count("layout.experts")(plan, facts),
        ),
    ),
    Check(
        "layout.gpus", "there are as many GPUs on a node as tasks, with the types that they compute in", _gpus
    ),
    Check("memory.fits", "the model fits into the memory of a GPU", memory.memory_problems),
    Check(
        "batch.global",
        "the global batch is a multiple of micro batch × data parallel",
        _at_node_count("batch.global"),
    ),
    Check(
        "batch.interleaved",
        "virtual stages have micro batches in groups of the pipeline size",
        _at_node_count("batch.interleaved"),
    ),
    Check("batch.rampup", "a growing batch can be divided all the way", _rampup),
    Check(
        "elastic.counts",
        "every number of nodes of a range fits the layout and the batch",
        lambda plan, facts: elastic.count_problems(plan),
    ),
    Check(
        "elastic.gpus",
        "GPUs are not asked for by task where the number of tasks is not known",
        lambda plan, facts: elastic.request_problems(plan),
    ),
    Check("batch.accumulation", "gradients are accumulated once", _nemo(batches.accumulation_problems)),
    Check("model.heads", "heads divide the hidden size, groups the heads", _nemo(model.width_problems)),
    Check(
        "model.sequence",
        "the data's sequences are as long as the model's, and there are positions for them",
        lambda plan, facts: (
            *_nemo(sequences.sequence_problems)(plan, facts),
            *_engine(sequences.decoder_problems)(plan, facts),
        ),
    ),
    Check(
        "model.recompute", "the options of recomputing activations agree", _nemo(recompute.recompute_problems)
    ),
    Check("data.prefix", "there is data, and weights go with prefixes", _nemo(data.prefix_problems)),
    Check("profile.ranks", "profiled ranks are there", lambda plan, facts: profiling.rank_problems(plan)),
    Check("schedule.warmup", "the learning rate has steps to decay in", _nemo(schedule.warmup_problems)),
    Check("schedule.min_lr", "the learning rate falls, and does not rise", _engine(schedule.rate_problems)),
    Check("schedule.validation", "there is a validation before the end", _nemo(schedule.validation_problems)),
    Check("time.limit", "the time limit is in one of Slurm's forms", _time_limit),
    Check("time.max_time", "training ends, and saves, before its job does", _max_time),
    Check(
        "time.training",
        "a chain of jobs is as long as the training, and that not longer than a year",
        time.training_problems,
    ),
    Check(
        "time.save",
        "jobs are told to save before they end, and not as soon as they begin",
        lambda plan, facts: resilience.save_problems(plan),
    ),
    Check(
        "chain.requeue",
        "the jobs of a chain are not requeued by Slurm too",
        lambda plan, facts: resilience.requeue_problems(plan),
    ),
    Check(
        "chain.dependency",
        "the next job of a chain can wait for the one before it",
        lambda plan, facts: resilience.dependency_problems(plan),
    ),
    Check(
        "chain.resume",
        "the jobs of a chain go on from each other's checkpoints",
        lambda plan, facts: resilience.resume_problems(plan),
    ),
    Check(
        "keys.unknown",
        "keys that no shipped configuration has are not slips of ones that it has",
        _keys,
        needs=("added_keys", "shipped_keys"),
    ),
    Check(
        TRAINER,
        "our trainer takes the configuration, where engine=megatron",
        _trainer,
        needs=("trainer_verdict",),
    ),
    Check(
        "run.singleton",
        "no other run's jobs have the same name, to wait for each other",
        names.singleton_problems,
        needs=("same_job_name",),
    ),
    Check(
        "secret.file",
        "files of secrets are there, and can be read",
        secrets.file_problems,
        needs=("lost_secrets",),
    ),
    Check(
        "secret.permissions",
        "files of secrets are their owner's alone",
        secrets.permission_problems,
        needs=("open_secrets",),
    ),
    Check(
        "path.tokenizer",
        "the tokenizer's files are there, and what they should be",
        paths.lack_problems("path.tokenizer", lambda found: found.tokenizer),
        needs=("paths.tokenizer",),
    ),
    Check(
        "path.data",
        "the data sets are there, each .idx and .bin of as many tokens",
        paths.lack_problems("path.data", lambda found: found.data),
        needs=("paths.data",),
    ),
    Check(
        "path.image",
        "an image that is a file is there, and a whole squashfs",
        paths.lack_problems("path.image", lambda found: found.image),
        needs=("paths.image",),
    ),
    Check(
        "image.fetch",
        "many nodes do not fetch an image of a registry at once",
        paths.lack_problems("image.fetch", lambda found: found.fetched),
        needs=("paths.fetched",),
    ),
    Check(
        "path.mounts",
        "what the container mounts is there",
        paths.lack_problems("path.mounts", lambda found: found.mounts),
        needs=("paths.mounts",),
    ),
    Check(
        "path.writable",
        "the directory of the run can be written",
        paths.lack_problems("path.writable", lambda found: found.results),
        needs=("paths.results",),
    ),
    Check(
        "path.shared",
        "what the nodes of a job share is on no disk of this machine's own",
        paths.shared_problems,
        needs=("paths.local",),
    ),
    Check(
        "space.checkpoints",
        "there is space for the next checkpoint, and for all that are kept",
        space.checkpoint_problems,
        needs=("paths.free_bytes",),
    ),
    Check(
        "cluster.partition",
        "the partition is there, and takes jobs",
        cluster.unless_changed(cluster.partition_problems),
        needs=("cluster.partitions",),
    ),
    Check(
        "cluster.time_limit",
        "the time limit is not longer than what the partition gives",
        cluster.unless_changed(cluster.time_problems),
        needs=("cluster.partitions",),
    ),
    Check(
        "cluster.nodes",
        "the partition has as many nodes, and enough of them can be used now",
        cluster.unless_changed(cluster_nodes.node_problems),
        needs=("cluster.partitions", "cluster.nodes"),
    ),
    Check(
        "cluster.gpus",
        "the nodes have as many GPUs, of the type that is asked for",
        cluster.unless_changed(cluster_nodes.gpu_problems),
        needs=("cluster.partitions", "cluster.nodes"),
    ),
    Check(
        "cluster.cpus",
        "the nodes have the processors that the tasks ask for",
        cluster.unless_changed(cluster_nodes.cpu_problems),
        needs=("cluster.partitions", "cluster.nodes"),
    ),
    Check(
        "cluster.memory",
        "the nodes have the memory that is asked for",
        cluster.unless_changed(cluster_nodes.memory_problems),
        needs=("cluster.partitions", "cluster.nodes"),
    ),
    Check(
        "cluster.account",
        "the account is one of the user's, the partition takes it, and it gives what the job wants",
        cluster.unless_changed(accounts.account_problems),
        needs=("cluster.settings", "cluster.associations", "cluster.partitions"),
    ),
    Check(
        "cluster.qos",
        "the QOS is there, the account may use it, and it gives what the job wants",
        cluster.unless_changed(accounts.qos_problems),
        needs=("cluster.settings", "cluster.qos", "cluster.associations", "cluster.partitions"),
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
)
