"""A draft is checked: facts are gathered, the checks asked, and what they find is told as mistakes are."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.compose import CONF_DIR
from launcher.config.overrides import parse_override
from launcher.drafting import Draft
from launcher.errors import Mistakes, UserError
from launcher.plan import Plan
from launcher.preflight.facts import Facts, LostSecret
from launcher.preflight.findings import Finding, Severity
from launcher.preflight.gpus import gpus_of
from launcher.preflight.registry import run_checks
from launcher.preflight.types import KEYS
from launcher.runs.paths import LAUNCHES
from launcher.stages.stage_cluster import stage_cluster
from launcher.verdict import trainer_verdict

VerdictOf = Callable[[Plan], str | None]

_NEMO_NODES = ("trainer", "exp_manager", "model")


def inspect_draft(made: Draft, skipped: Sequence[str], *, look: bool = True) -> list[Finding]:
    """Check a draft.

    Parameters
    ----------
    skipped
        The ids of checks that are not asked.
    look
        Look at files other than those of the configuration too; a dry run does not.
    """
    return run_checks(made.plan, gather(made, look=look), skipped)


def gather(made: Draft, *, look: bool = True, verdict_of: VerdictOf | None = None) -> Facts:
    """Find out, by reading alone, what the checks need to know.

    Parameters
    ----------
    verdict_of
        Tells what the trainer says, where it was asked already.
    """
    added, shipped = _keys(made)
    return Facts(
        added_keys=added,
        shipped_keys=shipped,
        same_job_name=_same_job_name(made.plan, Path(made.composition.config.base_results_dir))
        if look
        else None,
        open_secrets=_open_secrets(made.plan) if look else None,
        lost_secrets=_lost_secrets(made) if look else None,
        node_gpus=_node_gpus(made),
        trainer_verdict=(verdict_of or trainer_verdict)(made.plan),
    )


def refuse(made: Draft, findings: Sequence[Finding]) -> None:
    """Let the errors among the findings stop a launch.

    Raises
    ------
    Mistakes
        All of them together, each with where its values are from.
    """
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise Mistakes(as_mistakes(made, errors))


def as_mistakes(made: Draft, findings: Sequence[Finding]) -> list[UserError]:
    """Findings in the layout of mistakes, with the sources of their keys."""
    told = [
        UserError(f"{finding.message} [{finding.id}]", key=finding.key, also=finding.also, hint=finding.fix)
        for finding in findings
    ]
    try:
        with made.composition.naming_sources():
            raise Mistakes(told)
    except Mistakes:
        return told


def _keys(made: Draft) -> tuple[tuple[str, ...], frozenset[str]]:
    """The keys of NeMo's nodes that the user added to the shipped tree, and those that are known.

    Nothing is read where nothing can have been added.
    """
    training, composition = made.composition.config.training, made.composition
    signs = (parse_override(text) for text in composition.overrides)
    adds = any(item.sign.startswith("+") and item.key.startswith("training.") for item in signs)
    if training is None or not (adds or composition.config_dir):
        return (), frozenset()
    shipped = _shipped_keys() | KEYS
    nodes = {name: getattr(training, name) for name in _NEMO_NODES}
    return tuple(key for key in _keys_below(nodes) if key not in shipped), shipped


def _shipped_keys() -> frozenset[str]:
    """The keys that the shipped files have, of all families: they build on each other."""
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
    """Files that a file takes in below one of NeMo's nodes, such as ``/training/t5/_stack@model.encoder``."""
    for entry in content.get("defaults", ()):
        name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
        if package.startswith(tuple(f"{node}." for node in _NEMO_NODES)):
            yield name, package


def _keys_below(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in node.items():
        yield f"{prefix}{name}"
        if isinstance(child, Mapping):
            yield from _keys_below(child, f"{prefix}{name}.")


def _same_job_name(plan: Plan, base: Path) -> tuple[str, ...] | None:
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
    return list(folder.iterdir()) if folder.is_dir() else []


def _stem(directory: Path) -> str:
    return directory.name.partition("-")[0]


def _is_run_with(directory: Path, script: str) -> bool:
    return (directory / script).is_symlink() and (directory / LAUNCHES).is_dir()


def _open_secrets(plan: Plan) -> dict[str, str]:
    """The files of secrets that others than the owner may read, as far as this machine has them."""
    found = {}
    for variable, path in plan.job.environment_files.items():
        try:
            mode = Path(path).stat().st_mode
        except OSError:
            continue
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            found[variable] = path
    return found


def _lost_secrets(made: Draft) -> tuple[LostSecret, ...]:
    """The files of secrets that are not there, or that the user may not read."""
    config = made.composition.config
    lost = []
    for variable, path in made.plan.job.environment_files.items():
        why = _why_lost(path)
        if why is not None:
            key = f"env_files.{variable}" if variable in config.env_files else "wandb_api_key_file"
            lost.append(LostSecret(key, path, why, certain=_is_directory(Path(path).parent)))
    return tuple(lost)


def _why_lost(path: str) -> str | None:
    """Why a file cannot be read, if it cannot."""
    try:
        mode = Path(path).stat().st_mode
    except PermissionError:
        return "its directory may not be entered"
    except OSError:
        return "there is no such file"
    if stat.S_ISDIR(mode):
        return "a directory, not a file"
    return None if os.access(path, os.R_OK) else "you may not read this file"


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _node_gpus(made: Draft) -> int | None:
    """The GPUs of a node, of whichever key the cluster names them with."""
    config, stage = made.composition.config, made.plan.job.stage
    changes = config.stage_cluster.get(stage, {})  # type: ignore[call-overload]  # a name of a stage
    cluster = stage_cluster(config.cluster, stage, changes)
    return gpus_of(cluster.gpus_per_node, cluster.gres)
