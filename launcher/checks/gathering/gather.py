"""Facts: what the checks need to know of files and of the cluster, found out by reading alone."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.checks.facts import Facts
from launcher.checks.gathering.earlier import earlier_training
from launcher.checks.gathering.host import HostOf, host_facts, remembering, supervisor_python_problem
from launcher.checks.gathering.images import image_facts
from launcher.checks.gathering.path_resolver import PathResolver
from launcher.checks.gathering.paths import missing_secrets, open_secrets, path_facts
from launcher.checks.rules.cluster import ClusterRequest
from launcher.checks.rules.keys import KEYS
from launcher.checks.rules.resources import gpus_of
from launcher.config.compose import CONF_DIR
from launcher.config.overrides import parse_override
from launcher.drafting import Draft
from launcher.errors import file_mode
from launcher.plan import Plan
from launcher.runs.paths import LAUNCHES
from launcher.runs.provenance import user
from launcher.sandbox import is_sandbox
from launcher.slurm.cluster import ClusterFacts
from launcher.stages.common import stage_cluster

ClusterOf = Callable[[Plan], ClusterFacts | None]

_NEMO_NODES = ("trainer", "exp_manager", "model")


def gather(
    draft: Draft,
    *,
    look: bool = True,
    verdict: str | None = None,
    cluster_of: ClusterOf | None = None,
    host_of: HostOf = host_facts,
) -> Facts:
    """Find out, by reading alone, what the checks need to know.

    Without `look` that is nothing of files, of this machine and of the cluster. `verdict` is the trainer's
    answer (`trainer_verdicts`), None if it was not asked. `cluster_of` and `host_of` may remember what
    several drafts share.
    """
    plan, (added, shipped) = draft.plan, added_keys(draft)
    facts = Facts(
        added_keys=added,
        shipped_keys=shipped,
        image=image_facts(PathResolver(draft), look=look),
        node_gpus=_node_gpus(draft),
        trainer_verdict=verdict,
    )
    if not look:
        return facts
    return replace(
        facts,
        same_job_name=same_job_name(plan, Path(draft.composition.config.base_results_dir)),
        open_secrets=open_secrets(plan),
        missing_secrets=missing_secrets(draft),
        paths=path_facts(draft),
        earlier=earlier_training(draft),
        cluster=(cluster_of or cluster_facts)(plan),
        lacks_gpus=_lacks_gpus(plan),
        host=host_of(plan),
        supervisor_python=supervisor_python_problem(),
    )


def _lacks_gpus(plan: Plan) -> str | None:
    """Return why our trainer finds no GPU, where this machine can tell."""
    if plan.job.engine != "megatron":
        return None
    if plan.scheduler == "local":
        return None if any(Path("/dev").glob("nvidia*")) else "this machine has no GPU (no /dev/nvidia*)"
    is_in_sandbox = plan.slurm_conf is not None and is_sandbox(Path(plan.slurm_conf).parent.parent)
    return "the GPUs of the sandbox are fake" if is_in_sandbox else None


def _node_gpus(draft: Draft) -> int | None:
    """Return the GPUs of a node, from whichever key names them."""
    config, stage = draft.composition.config, draft.plan.job.stage
    changes = config.stage_cluster.get(stage, {})  # type: ignore[call-overload]  # a name of a stage
    cluster = stage_cluster(config.cluster, stage, changes)
    return gpus_of(cluster.gpus_per_node, cluster.gres)


def added_keys(draft: Draft) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the keys of NeMo's nodes that the user added to the shipped tree, and those that are known.

    Nothing is read where nothing can have been added.
    """
    training, composition = draft.composition.config.training, draft.composition
    overrides = map(parse_override, composition.overrides)
    adds = any(item.sign.startswith("+") and item.key.startswith("training.") for item in overrides)
    if training is None or not (adds or composition.config_dir):
        return (), frozenset()
    shipped = _shipped_keys() | KEYS
    nodes = {name: getattr(training, name) for name in _NEMO_NODES}
    return tuple(key for key in _keys_below(nodes) if key not in shipped), shipped


def _shipped_keys() -> frozenset[str]:
    """Return the keys of the shipped files of all families: they build on each other."""
    # Imported late: most launches add no key.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    keys: set[str] = set()
    files = {
        f"/{path.relative_to(CONF_DIR).with_suffix('')}": yaml.load(path.read_text(encoding="utf-8"), loader)
        for path in (CONF_DIR / "training").rglob("*.yaml")
    }
    for content in files.values():
        if not isinstance(content, dict):
            continue
        keys.update(_keys_below({name: content[name] for name in _NEMO_NODES if name in content}))
        for name, package in _packaged(content):
            keys.update((package, *_keys_below(files[name], f"{package}.")))
    return frozenset(keys)


def _packaged(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield files included below one of NeMo's nodes, such as ``/training/t5/_stack@model.encoder``."""
    for entry in content.get("defaults", ()):
        name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
        if package.startswith(tuple(f"{node}." for node in _NEMO_NODES)):
            yield name, package


def _keys_below(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in node.items():
        yield f"{prefix}{name}"
        if isinstance(child, Mapping):
            yield from _keys_below(child, f"{prefix}{name}.")


def same_job_name(plan: Plan, base: Path) -> tuple[str, ...] | None:
    """Run directories with a script of this job's name; a script at the top is that of the newest launch.

    Looked for beside this run, below `base_results_dir`, and in its like: `results-2` beside `results`.
    """
    run_dir, script = plan.paths.run_dir, plan.paths.script_name
    try:
        near = {other for folder in {base, run_dir.parent} for other in _entries(folder)}
        near.update(other / run_dir.name for other in _entries(base.parent) if _stem(other) == _stem(base))
        found = [other for other in near if other != run_dir and _is_run_with(other, script)]
    except OSError:
        return None
    return tuple(sorted(map(str, found)))


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if stat.S_ISDIR(file_mode(folder)) else []


def _stem(directory: Path) -> str:
    return directory.name.partition("-")[0]


def _is_run_with(directory: Path, script: str) -> bool:
    return stat.S_ISDIR(file_mode(directory / LAUNCHES)) and (directory / script).is_symlink()


# --- the cluster


def cluster_facts(plan: Plan) -> ClusterFacts | None:
    """Ask the cluster what it has and what it allows; ``None`` where the job does not go to a Slurm."""
    if plan.scheduler != "slurm":
        return None
    # Imported late: a dry run does not look, and need not know how to run a cluster's commands.
    from launcher.slurm.questions import ask_at_once, facts_of, questions

    commands = questions(plan.job.queue.partition, user())
    if plan.job.container is None:
        del commands["pyxis"]
    found = facts_of(ask_at_once(commands, plan.slurm_conf), of_default=plan.job.queue.partition is None)
    return _without_hidden_nodes(plan, found)


def _without_hidden_nodes(plan: Plan, found: ClusterFacts) -> ClusterFacts:
    """Drop the nodes where Slurm hides them (``PrivateData=nodes``): none shown is not none there."""
    mine = ClusterRequest(plan, found).partitions
    hidden = [one for one in mine if one.total_nodes and not (found.nodes or {}).get(one.name)]
    if found.nodes is None or not mine or len(hidden) < len(mine):
        return found
    missing = {**found.missing, "nodes": "Slurm does not show the nodes of the partition"}
    return replace(found, nodes=None, gpu_types=None, missing=missing)


def remembered(ask: ClusterOf | None = None) -> ClusterOf:
    """Return `cluster_facts` that ask once for all plans with the same questions: the points of a sweep."""

    def key(plan: Plan) -> object:
        return plan.scheduler, plan.slurm_conf, plan.job.queue.partition, plan.job.container is None

    return remembering(ask or cluster_facts, key)
