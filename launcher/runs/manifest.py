"""The records of a launch: its manifest, ``launcher.json``, and the configuration that it stored."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape, shortened
from launcher.runs.paths import (
    JOB_ID_LOG,
    LARGEST_LAUNCH,
    LAUNCHES,
    MANIFEST,
    SCRIPT_SUFFIX,
    launch_numbers,
)
from launcher.runs.trust import user_name
from slipway.common.files import RECORD_LIMIT, UnfitFile, is_job_id, read_json, read_text, write_atomic
from slipway.common.node.marks import job_of
from slipway.common.node.settings import NAME as SETTINGS
from slipway.common.node.settings import from_json

logger = logging.getLogger("launcher.runs")

SCHEMA_VERSION = 1

_NAME = re.compile(r"[^/\0]+")
_SUBMITTED = re.compile(r"^Submitted batch job (\S+)$", re.MULTILINE)
# Launches with damaged manifests that were logged.
_logged: set[Path] = set()
# The longest name of a file, without the prefix and suffix of a log.
_LONGEST_NAME = 240
_LONGEST_TEXT = 4096
_MESSAGES = ("error", "unanswered")
# The ranges of numbers with which the launcher counts.
_RANGES = {
    "launch": (1, LARGEST_LAUNCH),
    "nodes": (1, 10**6),
    "max_nodes": (1, 10**6),
    "tasks_per_node": (1, 10**5),
    "links": (1, 10**6),
    "array_task": (0, 4_000_000),
    "launcher_pid": (1, 2**22),
}
_LARGEST_NUMBER = 10**9
_FIRST_YEAR, _LAST_YEAR = 1971, 5000  # in every time zone these are valid dates
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one launch: the truth about it, in the run's directory.

    `job_id` is ``None`` until the scheduler answers; `error` holds the scheduler's words when it refused, and
    `unanswered` why it is not known if it accepted the job. `launcher_pid` is the process on `host` that
    submits. `packages` are the versions of what composed and rendered; `git_diff` names the file of this
    launch with the uncommitted changes, and `config_git` describes the checkout of the user's own tree
    (`directory`, `commit`, `dirty`, `diff`). `image_digest` is that in the image's name, or of the record
    of its file; else the job computes the digest. For a point of a sweep, `sweep` is the sweep's
    name and `array_task` its number in the job array whose script has `array_tag`; its `job_id` is that of
    the task, ``17_2``. `links` is the largest number of jobs of its chain, which submit each other if
    `from_job` is set, and otherwise were submitted with it; `after` is the dependency of a stage, such as
    ``afterok:17``, and `waits_for` the run that it waits for; with `every` it is submitted after each so many
    checkpoints of that run too, as further jobs of the launch; `excluded` are the nodes to avoid at the
    launch (`slipway.common.node.excluded`). `nodes` is the least number of nodes if `max_nodes` is set.
    `data` is the identity of the files that the training reads, as far as the launching machine sees them
    (`launcher.checks.gathering.data`). `differs` has the keys by which it is another training than that of an
    earlier launch of the run: ``{"launch": 1, "changes": [{"key": ..., "old": ..., "new": ...}]}``. `granted`
    maps what Slurm changed in the request: ``{"nodes": {"asked": ..., "granted": ...}}``.
    """

    run: str
    launch: int
    tag: str
    stage: str
    engine: str
    scheduler: str
    job_name: str
    nodes: int
    tasks_per_node: int
    time_limit: str | None
    command: list[str]
    overrides: list[str]
    choices: dict[str, str]
    created: str
    version: str
    user: str
    host: str
    git_commit: str | None = None
    git_dirty: bool | None = None
    slurm_conf: str | None = None
    job_id: str | None = None
    error: str | None = None
    unanswered: str | None = None
    launcher_pid: int | None = None
    packages: dict[str, str] = field(default_factory=dict)
    git_diff: str | None = None
    config_git: dict[str, Any] | None = None
    image: str | None = None
    image_digest: str | None = None
    sweep: str | None = None
    array_tag: str | None = None
    array_task: int | None = None
    links: int = 1
    from_job: bool = True
    after: str | None = None
    waits_for: str | None = None
    every: int | None = None
    excluded: list[dict[str, Any]] = field(default_factory=list)
    max_nodes: int | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    differs: dict[str, Any] | None = None
    granted: dict[str, dict[str, str]] = field(default_factory=dict)
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def is_repeated(self) -> bool:
        """Return True for a stage that is submitted again and again while the training before it goes on."""
        return self.every is not None and self.waits_for is not None

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that a script of its job may have: its own, and for a point the array's."""
        return (self.tag,) if self.array_tag is None else (self.tag, self.array_tag)

    @property
    def granted_text(self) -> str | None:
        """Return the changes that Slurm made to the request; None if none are known."""
        pairs = ((name, each.get("granted"), each.get("asked")) for name, each in self.granted.items())
        return ", ".join(f"{name} {got} ({asked} asked for)" for name, got, asked in pairs) or None

    def set_job(self, job_id: str) -> Manifest:
        """Return the manifest with its job; for a point of a sweep with its task of that array."""
        return replace(self, job_id=self.find_id(job_id), unanswered=None)

    def find_id(self, job_id: str) -> str:
        """Return the id of this launch in the job, or array, that it became."""
        return job_id if self.array_task is None else f"{job_id}_{self.array_task}"

    def set_error(self, error: str) -> Manifest:
        return replace(self, error=error, unanswered=None)

    def set_unanswered(self, why: str) -> Manifest:
        """Return the manifest of a launch that may or may not have become a job."""
        return replace(self, unanswered=why)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def write_manifest(launch_dir: Path, manifest: Manifest) -> None:
    write_atomic(launch_dir / MANIFEST, manifest.to_json())


def read_manifest(launch_dir: Path) -> Manifest:
    """Read a launch's manifest, without the keys of later versions; raise UserError for an invalid one."""
    path = launch_dir / MANIFEST
    try:
        content = read_json(path, RECORD_LIMIT)
        known = {item.name for item in fields(Manifest)}
        manifest = Manifest(**{key: value for key, value in content.items() if key in known})
        _check(manifest)
        return manifest
    except UnfitFile as error:
        raise UserError(f"{path} is not a launch's manifest: {error.strerror}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: that launch was never written completely") from error
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a launch's manifest: {escape(str(error))}") from error


def find_manifest(launch_dir: Path) -> Manifest:
    """Read a launch's manifest; if it is damaged, rebuild it from the other files."""
    try:
        return read_manifest(launch_dir)
    except UserError as error:
        manifest = _manifest_from_traces(launch_dir)
        if manifest is None:
            raise
        if launch_dir not in _logged:
            _logged.add(launch_dir)
            logger.warning("%s; according to its other files, it is job %s", error.message, manifest.job_id)
        return manifest


def _manifest_from_traces(launch_dir: Path) -> Manifest | None:
    """Return a manifest from the settings of a launch's job; ``None`` without them, or without a job."""
    job_id = job_of(launch_dir)
    with contextlib.suppress(OSError, ValueError):
        submitted = _SUBMITTED.search(read_text(launch_dir / JOB_ID_LOG))
        job_id = submitted[1] if submitted else job_id
    try:
        settings, status = from_json(read_json(launch_dir / SETTINGS)), launch_dir.stat()
        names = ("run", "tag", "engine", "scheduler", "nodes", "tasks_per_node", "max_nodes")
        values = {name: getattr(settings, name) for name in names}
        values |= {"links": settings.chain.links, "from_job": settings.chain.from_job, "job_id": job_id}
        values |= {"command": [], "overrides": [], "choices": {}, "time_limit": None}
        values |= {"version": "unknown", "host": "", "user": user_name(status.st_uid)}
        manifest = Manifest(
            **values,
            launch=int(launch_dir.name),
            stage="training" if settings.checkpoints else "unknown",
            job_name=Path(settings.script).name.removesuffix(SCRIPT_SUFFIX),
            created=datetime.fromtimestamp(status.st_mtime, UTC).isoformat(),
        )
        _check(manifest)
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    return manifest if job_id is not None else None


def _check(manifest: Manifest) -> None:
    """Raise for values that would fail later, where they would hide the other runs of a shared tree."""
    for item in fields(Manifest):
        name, _, optional = str(item.type).partition(" | ")
        value, kind = getattr(manifest, item.name), _TYPES[name.partition("[")[0]]
        if optional and value is None:
            continue
        is_valid = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if isinstance(value, int):
            least, most = _RANGES.get(item.name, (0, _LARGEST_NUMBER))
            is_valid = is_valid and least <= value <= most
        elif isinstance(value, str) and item.name not in _MESSAGES:  # the scheduler's may be long
            is_valid = is_valid and len(value) <= _LONGEST_TEXT
        if not is_valid:
            raise ValueError(f"{item.name} is {shortened(repr(value))}")
    words = [*manifest.command, *manifest.overrides, *manifest.choices.values()]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("its command, overrides and choices are not all texts")
    if not all(isinstance(change, dict) for change in manifest.granted.values()):
        raise ValueError("its granted resources are not all objects")
    if not all(isinstance(node, dict) for node in manifest.excluded):
        raise ValueError("its excluded nodes are no objects")
    names = (manifest.run, manifest.job_name)  # half of a character, which JSON can hold, is a ValueError
    if b"\0" in os.fsencode(manifest.tag):
        raise ValueError(f"tag is {shortened(repr(manifest.tag))}")
    if not all(_NAME.fullmatch(name) and len(os.fsencode(name)) <= _LONGEST_NAME for name in names):
        raise ValueError("its names are not file names")
    if manifest.job_id is not None and not is_job_id(manifest.job_id):
        raise ValueError(f"job_id is {shortened(repr(manifest.job_id))}, which is no id of a job")
    created = datetime.fromisoformat(manifest.created)
    if created.tzinfo is None or not _FIRST_YEAR <= created.year <= _LAST_YEAR:
        raise ValueError(f"created is {manifest.created!r}, which is no time with a time zone")


def find_newest_submitted(run_dir: Path) -> int | None:
    """Return the number of a run's newest launch that is known to be a job."""
    for number in reversed(launch_numbers(run_dir)):
        with contextlib.suppress(UserError):  # a broken launch hides no other
            if find_manifest(run_dir / LAUNCHES / str(number)).job_id is not None:
                return number
    return None


# A YAML parser takes two seconds for this much.
_YAML_LIMIT = 1 << 20
_YAML_DEPTH = 64
# The escape of a path that is not UTF-8: libyaml does not read it, and the parser in Python is slow.
_ODD_ESCAPE = re.compile(r"\\uD[89A-F]", re.IGNORECASE)
_SLOW_YAML_LIMIT = 1 << 17
# A manifest may grow by this when its job is known.
_ROOM = 1 << 16


def require_readable(path: Path, content: str | bytes) -> None:
    """Raise UserError for a record of a launch that is larger than what its readers take."""
    size = len(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
    limit = RECORD_LIMIT - _ROOM
    if path.suffix == ".yaml":
        is_slow = isinstance(content, str) and _ODD_ESCAPE.search(content) is not None
        limit = _SLOW_YAML_LIMIT if is_slow else _YAML_LIMIT
    if size > limit:
        raise UserError(
            f"{path.name} of this launch would have {size:,} bytes, and is read up to {limit:,}: its job "
            "could not be found or examined",
            hint="shorter or fewer values: data sets of a blend below a short link, points in several sweeps",
        )


def read_stored_text(path: Path) -> str:
    """Read the text of a configuration that the launcher wrote, in which a path may not be UTF-8."""
    return read_text(path, _YAML_LIMIT, "surrogateescape")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration that the launcher wrote; raise ValueError if it holds no keys, as `parse_yaml`."""
    content = parse_yaml(read_text(path, _YAML_LIMIT))
    if not isinstance(content, dict):
        raise ValueError("it holds no keys")
    return content


def parse_yaml(text: str) -> Any:
    """Parse YAML that the launcher wrote; raise ValueError also for aliases, which expand without limit."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) <= _SLOW_YAML_LIMIT and _ODD_ESCAPE.search(text):
        loader = yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _YAML_DEPTH:
                raise ValueError("it has aliases, or is nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
