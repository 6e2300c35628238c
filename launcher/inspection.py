"""A draft is checked: facts are gathered, the checks asked, and what they find is told as mistakes are."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.compose import CONF_DIR
from launcher.config.overrides import parse_override
from launcher.drafting import Draft
from launcher.errors import Mistakes, UserError
from launcher.plan import Plan
from launcher.preflight.facts import Facts
from launcher.preflight.findings import Finding, Severity
from launcher.preflight.registry import run_checks
from launcher.runs.paths import LAUNCHES

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


def gather(made: Draft, *, look: bool = True) -> Facts:
    """Find out, by reading alone, what the checks need to know."""
    added, shipped = _keys(made)
    return Facts(
        added_keys=added,
        shipped_keys=shipped,
        same_job_name=_same_job_name(made.plan, Path(made.composition.config.base_results_dir))
        if look
        else None,
        open_secrets=_open_secrets(made.plan) if look else None,
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
    """The keys of NeMo's nodes that the user added to the shipped tree, and those of the shipped tree.

    Nothing is read where nothing can have been added.
    """
    training, composition = made.composition.config.training, made.composition
    signs = (parse_override(text) for text in composition.overrides)
    adds = any(item.sign.startswith("+") and item.key.startswith("training.") for item in signs)
    if training is None or not (adds or composition.config_dir):
        return (), frozenset()
    shipped = _shipped_keys()
    nodes = {name: getattr(training, name) for name in _NEMO_NODES}
    return tuple(key for key in _keys_below(nodes) if key not in shipped), shipped


def _shipped_keys() -> frozenset[str]:
    """The keys that the shipped files have, of all families: they build on each other."""
    # Imported late: most launches add no key.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    keys: set[str] = set()
    for path in (CONF_DIR / "training").rglob("*.yaml"):
        content = yaml.load(path.read_text(encoding="utf-8"), loader)
        if isinstance(content, dict):
            keys.update(_keys_below({name: content[name] for name in _NEMO_NODES if name in content}))
    return frozenset(keys)


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
