"""Facts: what the checks need to know of files and of the cluster, found out by reading alone."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.checks.facts import Facts
from launcher.checks.gathering.earlier import earlier_training
from launcher.checks.gathering.host import HostOf, host_facts, remembering, supervisor_python_problem
from launcher.checks.gathering.images import image_facts
from launcher.checks.gathering.path_resolver import PathResolver, is_sandbox_of
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
from launcher.slurm.cluster import ClusterFacts
from launcher.stages.stage import stage_cluster

if TYPE_CHECKING:
    from launcher.slurm.questions import Reply

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
    plan, config, (added, shipped) = draft.plan, draft.composition.config, added_keys(draft)
    cluster = stage_cluster(config, plan.job.stage)
    facts = Facts(
        added_keys=added,
        shipped_keys=shipped,
        image=image_facts(PathResolver(draft), look=look),
        node_gpus=gpus_of(cluster.gpus_per_node, cluster.gres),
        trainer_verdict=verdict,
    )
    if not look:
        return facts
    return replace(
        facts,
        same_job_name=same_job_name(plan, Path(config.base_results_dir)),
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
    return "the GPUs of the sandbox are fake" if is_sandbox_of(plan.slurm_conf) else None


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
        for entry in content.get("defaults", ()):
            # A file included below one of NeMo's nodes, such as ``/training/t5/_stack@model.encoder``.
            name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
            if package.startswith(tuple(f"{node}." for node in _NEMO_NODES)):
                keys.update((package, *_keys_below(files[name], f"{package}.")))
    return frozenset(keys)


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
        likes = [other for other in _entries(base.parent) if _stem(other) == _stem(base)]
        near.update(other / run_dir.name for other in likes)
        runs = [other for other in near if other != run_dir and _is_directory(other / LAUNCHES)]
        return tuple(sorted(str(other) for other in runs if (other / script).is_symlink()))
    except OSError:
        return None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if _is_directory(folder) else []


def _stem(directory: Path) -> str:
    return directory.name.partition("-")[0]


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(file_mode(path))


# --- the cluster


def ask_cluster(plan: Plan, parts: Iterable[str]) -> tuple[Mapping[str, Reply], ClusterFacts]:
    """Ask the cluster about parts of it; return the answers, and what they say."""
    # Imported late: a dry run does not look, and need not know how to run a cluster's commands.
    from launcher.slurm.questions import ask_at_once, facts_of, questions

    known = questions(plan.job.queue.partition, user())
    replies = ask_at_once({part: known[part] for part in parts}, plan.slurm_conf)
    return replies, facts_of(replies, of_default=plan.job.queue.partition is None)


def cluster_facts(plan: Plan) -> ClusterFacts | None:
    """Ask the cluster what it has and what it allows; ``None`` where the job does not go to a Slurm."""
    if plan.scheduler != "slurm":
        return None
    parts = ["settings", "partitions", "nodes", "associations", "qos"]
    _, found = ask_cluster(plan, parts if plan.job.container is None else [*parts, "pyxis"])
    # Where Slurm hides the nodes (``PrivateData=nodes``), none shown is not none there.
    mine = ClusterRequest(plan, found).partitions
    is_hidden = [each.total_nodes > 0 and not (found.nodes or {}).get(each.name) for each in mine]
    if found.nodes is None or not mine or not all(is_hidden):
        return found
    missing = {**found.missing, "nodes": "Slurm does not show the nodes of the partition"}
    return replace(found, nodes=None, gpu_types=None, missing=missing)


def remembered(ask: ClusterOf | None = None) -> ClusterOf:
    """Return `cluster_facts` that ask once for all plans with the same questions: the points of a sweep."""

    def key(plan: Plan) -> object:
        return plan.scheduler, plan.slurm_conf, plan.job.queue.partition, plan.job.container is None

    return remembering(ask or cluster_facts, key)
