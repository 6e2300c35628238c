"""A site's own checks: files of rules in the directory `checks` of its tree, which contain no code."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from pydantic import Field

from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import SITE
from launcher.config.hydra_setup import read_mapping
from launcher.config.schema import ClusterConfig, RunConfig, parse
from launcher.config.stage_schema import StrictModel
from launcher.config.values import MOST_KEYS, Pattern
from launcher.drafting import Draft
from launcher.errors import Mistakes, UserError, did_you_mean, escape, literal
from launcher.runs.paths import display_path
from launcher.secrecy import hidden
from launcher.slurm.notations import limit_seconds
from launcher.stages.stage import stage_cluster

# The keys of rules: those of the configuration, as `slipway show` prints them, and the job's.
_OF_JOB = ("stage", "engine", "nodes", "tasks", "time_limit", "image")
_KEYS = (
    *RunConfig.model_fields,
    *(f"cluster.{name}" for name in ClusterConfig.model_fields),
    *(f"job.{name}" for name in _OF_JOB),
)
_IMAGES = ("job.image", "container", "cluster.container")
_OF_SLURM = re.compile(r"cluster\.(?!scheduler$)")
_Scalar = str | int | float | bool


class _Rule(StrictModel):
    key: str
    where: dict[str, _Scalar | list[_Scalar] | None] = Field(default_factory=dict)
    required: bool = False
    allowed: list[_Scalar] | None = None
    matches: Pattern | None = None
    maximum: _Scalar | None = None
    severity: Literal["error", "warning"] = "error"
    message: str | None = None
    remedy: str | None = None


class SiteRule(NamedTuple):
    """A rule with the id of its check, its tree, and its file and line."""

    id: str
    tree: Path
    place: str
    rule: _Rule


def site_findings(draft: Draft, skipped: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """Return the ids and the findings of the site's checks that apply to a draft."""
    all_rules, on_slurm = read_rules(draft.composition.config_dirs), draft.plan.scheduler != "local"
    values = _values(draft) if all_rules else {}
    rules = [
        each
        for each in all_rules
        if each.id not in skipped
        # Local work has no account, and requests nothing of Slurm.
        and (on_slurm or not _OF_SLURM.match(each.rule.key) or "cluster.scheduler" in each.rule.where)
        and all(set(_texts(_value(values, key))) & set(_texts(text)) for key, text in each.rule.where.items())
    ]
    findings = [finding for each in rules for finding in _findings(each, draft, values)]
    return [each.id for each in rules], findings


@cache
def read_rules(trees: Sequence[Path]) -> tuple[SiteRule, ...]:
    """Return the rules of all trees; of two trees' with a name the first. Raise UserError for mistakes."""
    rules: dict[str, SiteRule] = {}
    mistakes: list[UserError] = []
    for tree, path in ((top, path) for top in trees for path in sorted(top.glob("checks/*.yaml"))):
        text, content = read_mapping(path)
        keys, root = cast("dict[Any, Any]", OmegaConf.to_container(content)), yaml.compose(text)
        lines = [key.start_mark.line + 1 for key, _ in getattr(root, "value", [])]
        for (name, node), line in zip(keys.items(), lines, strict=True):
            place = f"{escape(display_path(path))}:{line}"
            try:
                rule = SiteRule(f"{SITE}{name}", tree, place, _read(str(name), node))
                first = rules.setdefault(str(name), rule)
                if first is not rule and first.tree == tree:
                    raise UserError(f"{name}: two rules of one name", hint=f"the first: {first.place}")
            except UserError as error:
                mistakes += error.mistakes
                for mistake in error.mistakes:
                    mistake.source = f"from {place}"
    if mistakes:
        raise Mistakes(mistakes)
    return tuple(rules.values())


def _read(name: str, node: Any) -> _Rule:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise UserError(f"{literal(name)}: not the name of a check", hint="such as account or debug_nodes")
    rule = parse(_Rule, node, name)
    if not rule.required and rule.allowed is None and rule.matches is None and rule.maximum is None:
        raise UserError(f"{name}: no condition", hint="one of required, allowed, matches, maximum")
    if _number(rule.maximum or 0) == math.inf:
        raise UserError(f"{name}.maximum={literal(rule.maximum)}: neither a number nor a time limit")
    for key in (rule.key, *rule.where):
        parts = key.split(".")
        if ".".join(parts[: 2 if parts[0] in ("job", "cluster") else 1]) not in _KEYS:
            hint = did_you_mean(key, _KEYS, MOST_KEYS)
            raise UserError(f"{name}: {escape(key)}: no such key to check", hint=hint)
    return rule


def _values(draft: Draft) -> dict[str, Any]:
    """Return the composed values of a stage, with its own cluster, and those of its job."""
    config, job = draft.composition.config, draft.plan.job
    nodes = job.resources.max_nodes or job.resources.nodes
    tasks, image = nodes * job.resources.tasks_per_node, job.container.image if job.container else None
    of_job = (job.stage, job.engine, nodes, tasks, job.resources.time_limit, image)
    cluster = stage_cluster(config, job.stage).model_dump()
    return {**config.model_dump(), "cluster": cluster, "job": dict(zip(_OF_JOB, of_job, strict=True))}


def _value(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _findings(site_rule: SiteRule, draft: Draft, values: Mapping[str, Any]) -> Iterator[Finding]:
    rule, job = site_rule.rule, draft.plan.job
    value = _value(values, rule.key)
    problems = [_problem(rule, spelling) for spelling in _spellings(rule.key, value)]
    if None in problems:
        return
    where = ", ".join(f"{key}={literal(_value(values, key))}" for key in rule.where)
    what = rule.message or f"{problems[0]}{f' where {where}' if where else ''}"
    message = escape(f"{rule.key}={literal(hidden(rule.key, value))}: {what}")
    fix = [*map(escape, (rule.remedy or "").splitlines()), f"the site's rule: {site_rule.place}"]
    nodes = "resilience.nodes" if job.resources.is_elastic else "training.trainer.num_nodes"
    sources = {"job.nodes": nodes, "job.time_limit": f"{job.stage}.run.time_limit", "job.image": "container"}
    key = sources.get(rule.key, rule.key)
    yield Finding(Severity(rule.severity), key, message, "\n".join(fix), id=site_rule.id)


def _spellings(key: str, value: Any) -> list[Any]:
    """Return the spellings of a value: an image's path, and the target of its links."""
    if key not in _IMAGES or not str(value).startswith("/"):
        return [value]
    path = Path(f"/{value.lstrip('/')}")
    return [os.path.realpath(path), *([] if ".." in path.parts else [str(path)])]


def _problem(rule: _Rule, value: Any) -> str | None:
    """Return the mistake of a value; null is one only if a value is required."""
    if value in (None, "", [], {}):
        return "this site requires a value" if rule.required else None
    if rule.allowed is not None and set(_texts(value)) - set(_texts(rule.allowed)):
        return f"this site allows {', '.join(_texts(rule.allowed))}"
    items = value if isinstance(value, list) else [value]
    if rule.matches is not None and not all(re.fullmatch(rule.matches, str(item)) for item in items):
        return f"this site allows only values that match {rule.matches}"
    if rule.maximum is not None and not all(_number(item) <= _number(rule.maximum) for item in items):
        return f"this site allows at most {rule.maximum}"
    return None


def _texts(value: Any) -> list[str]:
    """Return the items of a list, or of a text with commas, as Slurm's lists of partitions have them."""
    items = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
    return ["null" if item is None else str(item) for item in items]


def _number(value: Any) -> float:
    """Return a number, or the seconds of a time limit; infinity for no limit, and for anything else."""
    return value if isinstance(value, int | float) else limit_seconds(str(value)) or math.inf
