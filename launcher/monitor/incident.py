"""The files of an incident: what a ticket about a launch needs, bounded in size and with secrets masked."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from launcher.errors import UserError, escape
from launcher.jobs.launches import Launch
from launcher.monitor.history import Diagnosis, LaunchRow, history
from launcher.monitor.logs import FAILURES, failed_task_logs, job_logs, rank_logs
from launcher.monitor.provenance_report import changes_between, provenance
from launcher.monitor.readers import newest_events
from launcher.monitor.run_status import transitions_of
from launcher.runs.manifest import parse_yaml
from launcher.runs.paths import JOB_ID_LOG
from launcher.runs.provenance import host, user
from launcher.runs.trust import is_own
from launcher.schedulers.base import JobStatus
from launcher.secrecy import Known, collect_known_values, printable, without_secrets
from launcher.slurm.questions import Reply, ask_at_once
from launcher.slurm.states import State
from launcher.ui import tables
from launcher.ui.terminal import escape_controls
from slipway.common.files import UnfitFile, open_regular, read_text
from slipway.common.node.events import Train
from slipway.common.node.evidence import read_rank_failures
from slipway.common.node.excluded import EXCLUDED_NODES, read_excluded
from slipway.common.node.marks import HANGS, MARKS
from slipway.watch.alerts import ALERTS, read_alerts
from slipway.watch.messages import draw

REPORT = "incident.md"
# Bytes of the end of a log, of any other file, and of all files.
_LOG_BYTES, _FILE_BYTES, _ALL_BYTES = 1 << 18, 1 << 16, 1 << 24
# Read in front of what is kept: a secret that begins there is found whole.
_MARGIN_BYTES = 1 << 13
_MOST_FILES, _MOST_LOGS, _MOST_NODES, _MOST_JOBS, _MOST_STEPS = 64, 6, 32, 32, 10
_SLURM_SECONDS = 20.0
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The rest of a private key that begins before the text.
_TORN_KEY = re.compile(r"\A(?:(?!-----BEGIN ).)*?(?=-----END [A-Z ]*PRIVATE KEY-----)", re.DOTALL)
_SHORTEST_SECRET = 8
# Of a value of a plot; a difference of larger ones is no number.
_LARGEST = 1e300
_LATEST = 1e11  # in Unix seconds, of a date that can be formatted


class IncidentFiles:
    """The texts of an incident by their names, and what is `missing`, each with the reason."""

    def __init__(self, run_dir: Path, known: Known) -> None:
        self.texts: dict[str, str] = {}
        self.missing: list[str] = []
        self._root, self._known, self._size = run_dir.resolve(), known, 0

    def add(self, name: str, text: str) -> None:
        """Add a text with secrets masked."""
        name, text = re.sub(r"[^A-Za-z0-9_./=+-]", "_", printable(name))[:160], self.mask(text)
        if self._size + len(text) <= _ALL_BYTES:
            self.texts[name] = text
            self._size += len(text)
        else:
            self.missing.append(f"{name}: the incident would be larger than {_ALL_BYTES >> 20} MiB")

    def copy(self, path: Path, name: str, limit: int = _FILE_BYTES) -> None:
        """Add the end of a file of the run, if there is one; a link out of the run is not followed."""
        with self.noting(name), open_regular(path) as stream:
            if not isinstance(stream, io.BytesIO):  # as which an empty file is opened
                self.require_inside(Path(f"/proc/self/fd/{stream.fileno()}"))
            size = stream.seek(0, os.SEEK_END)
            begin = stream.seek(max(size - limit - _MARGIN_BYTES, 0))
            text = stream.read(size - begin).decode("utf-8", errors="replace")
            if begin:
                # The first line may be torn, and a secret in it.
                text = self.mask(text)
                text = (text.partition("\n")[2] or text[_MARGIN_BYTES:])[-limit:]
                text = f"[only the end of a file of {size} bytes]\n{text}"
            self.add(name, text)

    def copy_all(self, directory: Path, name: str) -> None:
        """Add the files of a directory, the last by their names if they are too many."""
        with self.noting(name):
            names = sorted(path.name for path in directory.iterdir())
            if len(names) > _MOST_FILES:
                self.missing.append(f"{name}: {len(names) - _MOST_FILES} of {len(names)} files")
            for each in names[-_MOST_FILES:]:
                self.copy(directory / each, f"{name}/{each}")

    def require_inside(self, path: Path) -> None:
        """Raise OSError for a link out of the run, with which others could show a file of the caller's."""
        if not path.resolve().is_relative_to(self._root):
            raise UnfitFile(errno.ELOOP, "a link leads out of the run", str(path))

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note why something cannot be read, unless it does not exist."""
        try:
            yield
        except (OSError, UserError) as error:
            if type(error) is not FileNotFoundError:
                self.missing.append(f"{name}: {(getattr(error, 'strerror', '') or str(error)).lower()}")

    def mask(self, text: str) -> str:
        """Mask the secrets of a text: of the whole, as a key has many lines, and then of each line."""
        plain = escape_controls(_COLOURS.sub("", text.replace("\r", "\n")))
        lines = printable(_TORN_KEY.sub("", plain)).split("\n")
        return "\n".join(without_secrets(line, known=self._known) for line in lines)


# Returns a unified diff of two stored configurations.
Compare = Callable[[Path, Path], Iterable[str]]


def gather(launch: Launch, compare: Compare) -> IncidentFiles:
    """Gather the files about a launch; the report comes first."""
    paths, number = launch.paths, launch.paths.number
    files = IncidentFiles(paths.run_dir, (*_read_secrets(launch), *collect_known_values()))
    rows = history(paths.run_dir)
    row = next(row for row in rows if row.number == number)
    reading = row.attempts[-1].reading if row.attempts else row.reading
    nodes = _nodes(launch, reading)
    replies = _ask_slurm(launch, list(nodes))
    for name, reply in replies.items():
        if reply.why is None:
            files.add(f"slurm/{name}.txt", reply.text)
        else:
            files.missing.append(f"slurm/{name}.txt: {reply.why}")
    for answer in replies.get("nodes", Reply()).text.split("NodeName=")[1:]:
        states = re.findall(r"\b(?:State=\S+|Reason=[^\n]*)", answer)
        nodes[answer.split()[0]] = "; ".join(filter(None, [nodes.get(answer.split()[0]), *states]))
    _copy_logs(files, launch, row.status)
    files.copy_all(paths.results / FAILURES, "failures")
    files.copy_all(paths.directory / MARKS, "marks")
    files.copy_all(paths.directory / HANGS, HANGS)
    for path in (paths.run_dir / ALERTS, paths.run_dir / EXCLUDED_NODES, paths.metrics):
        files.copy(path, path.name)
    for name in ("packages.json", "git-info.log"):
        files.copy(paths.results / name, f"job/{name}")
    for path in (paths.root_config, paths.config, paths.script, paths.task_script):
        files.copy(path, f"configuration/{path.name}", _LOG_BYTES)
    record = {key: value for key, value in provenance(launch).items() if not key.startswith("job_")}
    files.add("provenance.json", json.dumps(record, indent=2) + "\n")
    files.add("history.json", json.dumps([row.to_json() for row in rows], indent=2) + "\n")
    changes = _changes(files, launch, [row for row in rows if row.number < number], compare)
    steps: list[str] = []
    with files.noting("the last steps"):
        steps = _last_steps(launch)
    sections = {
        f"Incident: {_text(launch.manifest.run)}, launch {number}": _table(_facts(launch, row, reading)),
        "Alerts": [f"- {_text(line)}" for line in _alerts(paths.run_dir)],
        "Last steps": steps,
        "Changes since a launch that worked": changes,
        "Nodes": _table([("node", "what is known of it"), *nodes.items()]) if nodes else [],
        "Missing": [f"- {_text(reason)}" for reason in files.missing],
        "Files": [f"- `{name}`" for name in files.texts],
    }
    lines = [line for title, part in sections.items() if part for line in (f"## {title}", "", *part, "")]
    files.texts = {REPORT: files.mask("\n".join(lines).removeprefix("#")), **files.texts}
    return files


def write(texts: Mapping[str, str], directory: Path, run_name: str, number: int) -> tuple[Path, Path]:
    """Write the texts as a folder and as an archive, each whole or not at all, beside earlier ones."""
    run_name = re.sub(r"[^A-Za-z0-9._-]", "_", printable(run_name))[:80]
    prefix = f".incident-{run_name}-{number}-{datetime.now(UTC):%Y%m%d-%H%M%S}-"
    directory.mkdir(parents=True, exist_ok=True)
    # Of a name of its own, and private until the user decides otherwise, as the logs may be.
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as scratch:
        name = Path(scratch).name.removeprefix(".")
        folder, packed = Path(scratch, name), Path(scratch, "packed")
        folder.mkdir(mode=0o700)
        with tarfile.open(packed, "w:gz") as archive:
            for path, text in texts.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8", errors="replace")
                archive.add(folder / path, f"{name}/{path}")
        packed.chmod(0o600)
        os.link(packed, directory / f"{name}.tar.gz")
        folder.rename(directory / name)
    return directory / name, directory / f"{name}.tar.gz"


def _read_secrets(launch: Launch) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the secrets that the job read from files of the caller's own, with how to find each in a log."""
    try:
        config = parse_yaml(read_text(launch.paths.root_config))
        paths = [*(config.get("env_files") or {}).values(), config.get("wandb_api_key_file")]
    except (OSError, ValueError, AttributeError):
        return
    for path in (Path(path) for path in paths if isinstance(path, str)):
        try:
            lines = read_text(path.expanduser()).split() if is_own(path.expanduser()) else []
        except (OSError, ValueError, RuntimeError):
            continue
        yield from (
            (path.name, re.compile(re.escape(each))) for each in lines if len(each) >= _SHORTEST_SECRET
        )


def _copy_logs(files: IncidentFiles, launch: Launch, status: JobStatus) -> None:
    """Add the logs of the newest jobs or of failed tasks, and those that failed ranks wrote themselves."""
    logs = [launch.paths.directory / JOB_ID_LOG, launch.paths.results / "nemo_error_log.txt"]
    if launch.manifest.job_id is not None:
        logs += [*failed_task_logs(launch, status).values()][:_MOST_LOGS]
        logs += [log for extension in ("out", "err") for log in job_logs(launch, extension)[-_MOST_LOGS:]]
    ranks = dict.fromkeys(failure.rank for failure in read_rank_failures(launch.paths.results / FAILURES))
    logs += [log for rank in list(ranks)[:_MOST_FILES] for log in rank_logs(launch, rank)[:1]]
    for log in dict.fromkeys(logs):
        files.copy(log, f"logs/{log.name}", _LOG_BYTES)


def _nodes(launch: Launch, reading: Diagnosis | None) -> dict[str, str]:
    """Return the nodes of interest, the suspects first, each with what the run knows of it."""
    failures = read_rank_failures(launch.paths.results / FAILURES)
    excluded = read_excluded(launch.paths.run_dir, time.time())
    known = [
        *((node, "at fault, by the rule") for node in (reading.nodes if reading else ())),
        *((each.host or "", f"rank {each.rank} failed at {_utc(each.time)}") for each in failures),
        *((each.node, f"excluded until {_utc(each.until)}, job {each.job}: {each.why}") for each in excluded),
    ]
    nodes = dict.fromkeys(node for node, _ in known)
    nodes |= dict.fromkeys(node for each in launch.attempts[-1:] for node in (each.nodes or "").split(","))
    named = list(filter(_NODE.fullmatch, nodes))[:_MOST_NODES]
    return {name: "; ".join([words for node, words in known if node == name][:3]) for name in named}


def _ask_slurm(launch: Launch, nodes: Sequence[str]) -> Mapping[str, Reply]:
    """Return Slurm's records of the newest jobs and of nodes, or why there are none."""
    jobs = list(launch.links.values())[-_MOST_JOBS:]
    if launch.manifest.scheduler != "slurm" or not jobs:
        return {}
    sacct = ["sacct", "--duplicates", "--parsable2", "--format=ALL", f"--jobs={','.join(jobs)}"]
    queries = {
        "ping": ["scontrol", "ping"],
        "job": ["scontrol", "--all", "show", "job", jobs[-1]],
        "sacct": sacct,
    }
    queries |= {"nodes": ["scontrol", "--all", "show", "node", ",".join(nodes)]} if nodes else {}
    return ask_at_once(queries, launch.slurm_conf, _SLURM_SECONDS)


# --- the report


def _facts(launch: Launch, row: LaunchRow, reading: Diagnosis | None) -> Iterator[tuple[str, str]]:
    manifest, status, times = launch.manifest, row.status, transitions_of(launch, row.status).to_json()
    jobs = ", ".join(list(launch.links.values())[-_MOST_JOBS:]) or tables.UNKNOWN
    yield "what", ": ".join(filter(None, [status.state.value, status.full_reason]))
    if reading:
        yield "why", f"{reading.why} (rule `{reading.rule}`, verdict {reading.verdict})"
        yield "failed first", tables.text(reading.first)
        yield "what to try", tables.text(reading.advice)
    yield "when", ", ".join(f"{name} {at}" for name, at in list(times.items())[:3] if at)
    yield "where", f"job {jobs}, {tables.tasks(launch.nodes, manifest.tasks_per_node)}, on {status.nodes}"
    yield "steps", str(row.steps)
    yield "what ran", f"{manifest.stage} with {manifest.engine}, Slipway {manifest.version}"
    yield "image", tables.text(manifest.image)
    yield "launched by", f"{manifest.user} on {manifest.host}, with {manifest.scheduler}"
    yield "run", str(launch.paths.run_dir)
    yield "written by", f"{user()} on {host()}, {_utc(time.time())}"


def _alerts(run_dir: Path) -> Iterator[str]:
    for alert in read_alerts(run_dir)[-_MOST_FILES:]:
        words = "open" if alert.is_open else f"over since {_utc(alert.newest.time)}"
        yield f"{_utc(alert.first.time)}: {alert.first.why} ({words})"


def _last_steps(launch: Launch) -> list[str]:
    """Return small plots of the newest steps, and the last ones as lines."""
    events = newest_events(launch) if launch.manifest.job_id is not None else []
    steps = [event for event in events if isinstance(event, Train)]
    if not steps:
        return []
    lines = []
    for name, values in (("loss", [x.loss for x in steps]), ("gradient norm", [x.grad_norm for x in steps])):
        numbers = [math.nan if x is None or abs(x) > _LARGEST else x for x in values]
        lines.append(f"{name:<13}  {draw(numbers)}  {tables.loss(values[0])} → {tables.loss(values[-1])}")
    for step in steps[-_MOST_STEPS:]:
        norm, speed = tables.loss(step.grad_norm), tables.count(step.tokens_per_second)
        words = f"loss {tables.loss(step.loss)}  gradient norm {norm}  {speed} tokens/s"
        lines.append(f"{_utc(step.time)}  step {step.step}  {words}")
    return ["```text", *lines, "```"]


def _changes(
    files: IncidentFiles, launch: Launch, earlier: Sequence[LaunchRow], compare: Compare
) -> list[str]:
    """Return what changed since the newest launch that ended well, else that trained; add a diff."""
    well = [row for row in earlier if row.status.state in (State.COMPLETED, State.INTERRUPTED)]
    worked = (well or [row for row in earlier if (row.steps.last or 0) > (row.steps.first or 0)])[-1:]
    before = worked[0].status.launch if worked else None
    if before is None:
        return []
    old, new = before.manifest, launch.manifest
    lines = [f"launch {old.launch}: {worked[0].status.state.value}, steps {worked[0].steps}"]
    lines += changes_between(old.overrides, new.overrides).lines()
    names = ("version", "git_commit", "git_dirty", "image", "image_digest", "engine", "nodes", "host")
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in names}
    pairs |= {name: (old.packages.get(name), version) for name, version in new.packages.items()}
    lines += [f"{name}: {was} → {now}" for name, (was, now) in pairs.items() if was != now]
    configs = (before.paths.root_config, launch.paths.root_config)
    with files.noting("changes.diff"):
        for path in configs:
            files.require_inside(path)
        files.add("changes.diff", "\n".join(compare(*configs)) + "\n")
    return [f"- {_text(line)}" for line in lines]


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of Markdown, the first row as its head."""
    head, *others = ([*map(_text, row)] for row in rows)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others)]


def _text(value: str) -> str:
    """Return a text of others as one line of Markdown, in which it can be no link, image or HTML."""
    return re.sub(r"([|\[\]<])", r"\\\1", escape(value))


def _utc(when: float) -> str:
    return f"{datetime.fromtimestamp(min(when, _LATEST), UTC):%Y-%m-%d %H:%M:%SZ}"
