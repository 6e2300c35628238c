"""Run directories that a hostile user or a broken disk could leave: strategies, and a writer of them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from launcher import drafting
from launcher.cli import show, sweep
from launcher.cli.app import main
from launcher.config.compose import Composition, compose
from launcher.config.stored import stored_text
from launcher.monitor import follow, watching
from launcher.monitor import logs as log_reading

NOBODY = 65534
HUGE = 20 << 30

# The limits of one verb.
_SECONDS = 20
_MEMORY = 3 << 30

# Numbers of bash, of Slurm and of JSON; texts that a shell, a terminal or a path would understand.
ODD_TEXTS = [
    "", " ", "abc", "0", "-1", "08", "0x10", "1e3", "17", "17_2", "77_1", "17_99999999", "5_[1-", "5_[1-3]",
    "--user=root", "../x", "..", ".", "9" * 20, "9" * 5000, "é", "٣", "²", "\x1b]0;owned\x07", "\x1b[2J",
    "\x9b31m", "a\rb", "a\nb", "a\0b", "\u202egnp", "\ud800", "\udcff", "x" * 300, "x" * 100_000,
    "$\\frac{1$", "$x$",
    "a[$(touch canary)]", "$(touch canary)", "`touch canary`", "; touch canary", "%s%n", "{}", "[", "'", '"',
    "2026-01-01T00:00:00", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59", "nan", "inf", "null",
    "/dev/zero", "slurm", "local", "allocation", "megatron", "nemo", "megatron_lm", "data_preparation",
]  # fmt: skip
ODD_NUMBERS = [
    -1, 0, 1, 2, 77, 255, 256, 2**31, 2**32, 2**63, 10**20, 10**400, 0.5, -0.0, 1e-320, 1e308, 1e400, -1e400,
    float("nan"), True, False,
]  # fmt: skip
ODD_VALUES = [*ODD_TEXTS, *ODD_NUMBERS, None, [], {}, [1], ["a"], {"a": 1}, [{}], [[]], {"\x1b[2J": "\x1b"}]

odd_texts = st.sampled_from(ODD_TEXTS)
_sampled = st.sampled_from(ODD_VALUES)
odd_values = _sampled | _sampled | _sampled | st.text(max_size=20)

DEEP = "[" * 100_000
JUNK = st.sampled_from(
    [
        "", "{", "null", "[]", "1", '"x"', DEEP, '{"a":' * 50_000, "\ufeff{}", '{"a": ' + "9" * 5000 + "}",
        "a: &a [*a, *a]\n", "a: &a {b: c}\nd:\n  <<: [*a, *a, *a]\n", "- - - - x", "? [a]\n: b\n",
        "!!binary x",
        "!!python/object/apply:os.system [touch canary]", "trainer: 1\nexp_manager: [x]\nrun: x\n",
        "x: 2026-99-99",
        "exp_manager: {checkpoint_callback_params: {dirpath: /dev}}",
        "exp_manager: {create_checkpoint_callback: 1}",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """The content of a path: `kind` is text, bytes, json, lines (of JSON), or what `put` makes of it."""

    kind: str
    content: Any = None


_LINKS = [
    "/dev/zero", "/dev/full", "/dev/random", "/proc/kmsg", "/proc/kcore", "/proc/self/mem", "/proc/self/fd/0",
    "/sys/kernel/security", "/", "loop", "nowhere", "..",
]  # fmt: skip
special = st.one_of(
    st.sampled_from(
        [Thing("fifo"), Thing("socket"), Thing("directory"), Thing("sparse"), Thing("unreadable")]
    ),
    st.builds(Thing, st.just("link"), st.sampled_from(_LINKS)),
)
junk = st.builds(Thing, st.just("text"), JUNK) | st.builds(Thing, st.just("bytes"), st.binary(max_size=200))


def _object(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), odd_values, max_size=8)


_EVENT_KEYS = [
    "time", "step", "max_steps", "tensor", "pipeline", "virtual", "context", "data", "parameters", "loss",
    "tokens_per_step", "lr", "grad_norm", "tokens_per_second", "tokens", "val_loss", "reason", "split",
    "unigram_entropy", "has_sentinels",
]  # fmt: skip
_events = st.builds(
    lambda kind, plain, odd: {"kind": kind, **plain, **odd},
    st.sampled_from(["start", "train", "validation", "end", "data", "odd"]),
    st.fixed_dictionaries(
        {
            "time": st.integers(1000, 1100),
            "step": st.integers(0, 50),
            "loss": st.floats(0, 10),
            "val_loss": st.floats(0, 10),
            "unigram_entropy": st.just(6.1),
            "split": st.just("validation"),
            "max_steps": st.just(50),
        }
    ),
    _object(_EVENT_KEYS),
)
metrics = st.builds(Thing, st.just("lines"), st.lists(_events, max_size=12)) | junk | special

_MARK_KEYS = [
    "job_id", "started", "ended", "link", "failures", "exit_code", "checkpoint", "rank", "step", "nodes",
    "avoids",
    "state", "signal", "host", "rule", "verdict", "excluded", "why", "user", "by", "time", "error",
]  # fmt: skip
marks = st.builds(Thing, st.just("json"), _object(_MARK_KEYS)) | junk | special
# Ids that other marks, or the manifest, have too.
_REPEATED = st.sampled_from(["17", "77", "17_2", "18"])
claims = st.builds(Thing, st.just("text"), odd_texts | _REPEATED) | junk | special
# Files and directories that their owner lets nobody, or somebody, read.
modes = st.builds(Thing, st.just("mode"), st.sampled_from([0o000, 0o111, 0o333, 0o444, 0o700]))
MARKS = [
    "17.0.started.json", "17.0.ended.json", "17.1.ended.json", "77.0.ended.json", "17_2.0.ended.json",
    "17.².ended.json", "17.99999999999999999999.ended.json", "5_[1-.0.ended.json", "\x1b[2J.0.started.json",
    "17.cancelled.json", "chain-ended", "18.0.started.json", "18.0.ended.json",
]  # fmt: skip
CLAIMS = ["job", "job.2", "job.3", "image.sha256", "job.17", "job.2.17", "job.4.18"]

_BARS = st.builds(
    lambda step, clock, value: f"|{step}/{step} [{clock}<0, loss={value}, global_step={value}]\r",
    st.sampled_from(["1", "9" * 5000, "٣"]),
    st.sampled_from(["00:01", "9" * 5000 + ":00", "1:00:00"]),
    odd_texts,
)
_NUMBERS = st.sampled_from(["1", "3", "nan", "-inf", "1e999", "-5.0", "9" * 400, "x", "٣"])
_ITERATIONS = st.builds(
    lambda time, step, value: (
        f"[before the start of training step] datetime: {time}\n"
        f" [{time}] iteration {step}/{step} | consumed samples: {value} | elapsed time per iteration (ms): "
        f"{value} | global batch size: {value} | lm loss: {value} | grad norm: {value} | "
        f"number of skipped iterations: {value} | number of nan iterations: {value} |\n"
        f" validation loss at iteration {step} | lm loss value: {value} | \n"
        f"loading checkpoint from x at iteration {step}\n"
        f"successfully saved checkpoint from iteration {step} to x\n"
        f"[exiting program after receiving SIGX.] datetime: {time}"
    ),
    st.sampled_from(["1970-01-01 00:00:16", "9999-99-99 99:99:99.9", "0000-00-00 00:00:00"]),
    st.sampled_from(["1", "7", "9" * 15, "9" * 5000]),
    _NUMBERS,
)
_LOG_LINES = st.one_of(
    _BARS,
    _ITERATIONS,
    odd_texts,
    st.sampled_from(["end at step " + "9" * 5000 + ": x", "end at step 3: x"]),
    st.sampled_from(["Traceback (most recent call last):\n  x\nE: \x1b[2J", "\n" * 1000, "srun: error: x"]),
    st.sampled_from(["the training loss at step 1 is nan", "#SBATCH --array=0-99999999999\n"]),
    st.sampled_from(
        ["  --output-prefix=/a\\ b \\", "  '--tokenizer-dir=x", "  --output-prefix='a", "#SBATCH --array=["]
    ),
)
logs = st.builds(lambda lines: Thing("text", "\n".join(lines)), st.lists(_LOG_LINES, max_size=6)) | special

_RECORD_KEYS = ["sweep", "tag", "created", "slurm_conf", "points", "labels", "job_id", "error", "throttle"]
records = (
    st.builds(
        lambda odd, point: Thing(
            "json",
            {
                "sweep": "s", "tag": "t", "script": "s", "created": "2026-01-01T00:00:00Z", "user": "u",
                "host": "h", "slurm_conf": None, "command": [], "overrides": [], "throttle": None,
                "labels": {}, "points": [point], **odd,
            },
        ),
        _object(_RECORD_KEYS),
        st.fixed_dictionaries({"name": odd_values, "launch": odd_values, "values": odd_values})
        | st.fixed_dictionaries(
            {"name": st.sampled_from(["p", "launches"]), "launch": odd_values, "values": _object(["a", "b"])}
        ),
    )
    | junk
    | special
)  # fmt: skip

_RESULT = st.one_of(odd_values, _object(["acc", "acc_norm", "acc_stderr", "word_perplexity", "\x1b[2J"]))
evaluations = (
    st.builds(
        lambda loss, tasks: Thing("json", {"perplexity": {"loss": loss}, "lm_eval": tasks}),
        odd_values,
        st.dictionaries(odd_texts | st.just("arc"), _RESULT, max_size=3) | odd_values,
    )
    | st.builds(Thing, st.just("json"), _object(["perplexity", "lm_eval"]))
    | junk
    | special
)
stages = (
    st.builds(
        lambda side, odd: Thing(
            "json",
            {side: {"run": "healthy", "directory": "/", "tag": "t", **odd}}
            if side == "before"
            else {side: [{"run": "healthy", "directory": "../healthy/launches/1", "tag": "t", **odd}]},
        ),
        st.sampled_from(["before", "after", "repeated"]),
        _object(["run", "directory", "tag", "dependency", "needs_success"]),
    )
    | junk
    | special
)

_ROOT_KEYS = ["training", "cluster", "stages", "container", "env_vars", "base_results_dir", "launcher_dir"]
_CHECKPOINT = st.builds(Thing, st.just("json"), _object(["step", "serial", "files"])) | junk | special

_SCALARS = st.builds(
    lambda time, step, tag, value: Thing(
        "bytes", b"\x09" + time + b"\x10" + step + b"\x2a\x20\x0a\x1e\x0a\x07" + tag + b"\x15" + value
    ),
    st.binary(min_size=8, max_size=8),
    st.sampled_from([b"\x05", b"\xff" * 7 + b"\x7f", b"\xff" * 8 + b"\x7f"]),
    st.sampled_from([b"lm loss", b"val_loss", b"reduced_train_loss"]),
    st.binary(min_size=4, max_size=4),
)

# The files of a launch that verbs read, each with the strategy of its content.
FILES: dict[str, st.SearchStrategy[Thing]] = {
    "results/metrics.jsonl": metrics,
    "results/events.out.tfevents.1.host": _SCALARS | special,
    **{f"marks/{name}": marks for name in MARKS},
    **{f"marks/{name}": claims for name in CLAIMS},
    "log-job_17.out": logs,
    "log-job_17.err": logs,
    "log-job_17_2.out": logs,
    "log-job_17_²_3.out": logs,
    "theirs_hydra.yaml": junk
    | special
    | st.builds(Thing, st.just("json"), _object(["trainer", "exp_manager", "run"])),
    "job_submission.sh": logs,
    "task.sh": logs,
    "results/nemo_error_log.txt": logs,
    "results/nemo_log_globalrank-0_x.txt": logs,
    "results/nemo_log_globalrank-٣_x.txt": logs,
    "results/run_0/nemo_log_globalrank-0_x.txt": logs,
    "results/failures/globalrank-0.json": marks,
    "results/packages.json": marks,
    "results/git-info.log": logs,
    "../../excluded_nodes.tsv": logs,
    "../../arrays/1/sweep.json": records,
    "../../checkpoints/1/complete.json": _CHECKPOINT,
    "../../checkpoints/latest_checkpointed_iteration.txt": logs,
    "../../checkpoints": special,
    "../../evaluations/step-2.json": evaluations,
    "../../evaluations/step-10.json": evaluations,
    "../../evaluations": special | modes,
    "stages.json": stages,
    "supervisor.json": stages,
    "launcher.log": claims,
    "../20261126120000/launcher.json": junk | special,
    "../../loss.png": special,
    "root_config.yaml": junk | special | st.builds(Thing, st.just("root config"), _object(_ROOT_KEYS)),
    "../../p/launches/1/launcher.json": junk | special,
    "../../p/launches": special,
    "../2/launcher.json": junk | special,
    "../99999999999999999999/launcher.json": junk | special,
    "../3": special,
    "results": special | modes,
    "marks": special | modes,
    "../../p": modes,
    "../4": modes,
}


@dataclass(frozen=True)
class HostileRun:
    """A run: the changes to a sound manifest, or a thing that replaces the manifest."""

    changes: dict[str, Any]
    replacement: Thing | None
    files: dict[str, Thing] = field(default_factory=dict)
    owned_by_nobody: bool = False

    def write(self, run_dir: Path, manifest: dict[str, Any]) -> None:
        """Write the run to an empty directory; leave out files that conflict with others."""
        launch = run_dir / "launches" / "1"
        launch.mkdir(parents=True)
        put(launch / "launcher.json", self.replacement or Thing("json", {**manifest, **self.changes}))
        for name, thing in self.files.items():
            path = Path(os.path.normpath(launch / name))
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # raised for a loop of links
                # Nothing is written through a link, such as `results` to `/`.
                if path.parent.resolve().is_relative_to(run_dir.resolve()) and not os.path.lexists(path):
                    put(path, thing)
        if self.owned_by_nobody and os.geteuid() == 0:
            for directory, _, names in os.walk(run_dir):
                for path in (directory, *(f"{directory}/{name}" for name in names)):
                    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def put(path: Path, thing: Thing) -> None:
    """Create a thing at a path that does not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if thing.kind == "text":
        path.write_bytes(thing.content.encode("utf-8", "surrogatepass"))
    elif thing.kind == "bytes":
        path.write_bytes(thing.content)
    elif thing.kind == "json":
        path.write_text(json.dumps(thing.content))
    elif thing.kind == "root config":
        path.write_text(json.dumps(yaml.safe_load(root_config(path.parents[3])) | thing.content))
    elif thing.kind == "lines":
        path.write_text("".join(f"{json.dumps(line)}\n" for line in thing.content))
    elif thing.kind == "fifo":
        os.mkfifo(path)
    elif thing.kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name[:90])
    elif thing.kind == "directory":
        path.mkdir()
    elif thing.kind == "sparse":
        with path.open("wb") as stream:
            stream.truncate(HUGE)
    elif thing.kind == "mode":
        path.mkdir()
        (path / "step-2.json").write_text("{}")
        path.chmod(thing.content)
    elif thing.kind == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    else:
        path.symlink_to(path.name if thing.content == "loop" else thing.content)


_CHANGED = [
    "run", "launch", "tag", "stage", "engine", "scheduler", "job_name", "nodes", "tasks_per_node",
    "time_limit",
    "command", "overrides", "choices", "created", "version", "user", "host", "git_commit", "git_dirty",
    "error",
    "slurm_conf", "job_id", "unanswered", "launcher_pid", "packages", "git_diff", "config_git", "image",
    "image_digest", "sweep", "array_tag", "array_task", "links", "from_job", "after", "excluded", "max_nodes",
    "schema_version", "unheard_of",
]  # fmt: skip


def hostile_runs(evil: str, healthy_tag: str) -> st.SearchStrategy[HostileRun]:
    """Return a strategy of runs; some name a Slurm configuration, some a healthy run's tag."""
    likely = st.one_of(
        st.fixed_dictionaries({"job_id": odd_texts}),
        st.fixed_dictionaries({"slurm_conf": st.just(evil)}),
        st.fixed_dictionaries({"tag": st.just(healthy_tag), "job_id": st.sampled_from(["77", "17", "78"])}),
        st.fixed_dictionaries({"engine": st.sampled_from(["nemo", "megatron_lm", "x"])}),
        st.fixed_dictionaries({"stage": st.sampled_from(["data_preparation", "x"])}),
        st.fixed_dictionaries({"links": st.integers(2, 5)}),
        st.fixed_dictionaries({"links": st.integers(2, 5), "from_job": st.booleans()}),
        st.fixed_dictionaries({"every": st.just(1), "waits_for": st.just("x")}),
        st.fixed_dictionaries({"excluded": st.lists(_object(["node", "job", "until", "why"]), max_size=2)}),
        st.fixed_dictionaries({"data": st.lists(_object(["kind", "size", "path"]), max_size=2)}),
        st.builds(
            lambda launch, row: {"differs": {"launch": launch, "changes": [row]}},
            odd_values,
            st.fixed_dictionaries({"key": odd_texts, "old": odd_values, "new": odd_values}) | odd_values,
        ),
        st.fixed_dictionaries({"scheduler": st.sampled_from(["local", "allocation", "x"])}),
        st.fixed_dictionaries({"job_id": st.none(), "error": st.none() | odd_texts}),
        st.just({}),
    )
    changes = st.builds(
        lambda a, b: {**a, **b}, likely, st.dictionaries(st.sampled_from(_CHANGED), odd_values, max_size=2)
    )
    files = st.lists(st.sampled_from(sorted(FILES)), max_size=15, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FILES[name] for name in names})
    )
    return st.builds(
        HostileRun,
        changes | likely | likely | likely,
        st.sampled_from([True] * 9 + [False]).flatmap(
            lambda is_sound: st.none() if is_sound else junk | special
        ),
        files,
        st.booleans(),
    )


class TookTooLong(BaseException):
    """Raised when a verb exceeds its time."""


def run(base: Path, *words: str) -> tuple[int, str, str]:
    """Run a verb in this process, with limits of time and memory; return its code, stdout and stderr."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(words)

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    previous_handler = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    timer = signal.setitimer(signal.ITIMER_REAL, _SECONDS)  # pytest's own, for the whole test
    resource.setrlimit(resource.RLIMIT_AS, (_memory_in_use() + _MEMORY, limits[1]))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words, _base_option(words[0], base)])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


# Verbs that compose a configuration, which says where runs are.
_COMPOSING = ("check", "diff", "launch", "render", "show")


def _base_option(verb: str, base: Path) -> str:
    return f"base_results_dir={base}" if verb in _COMPOSING else f"--base-results-dir={base}"


class _Clock:
    """A stand-in for the module `time`: no sleep takes time, and each third one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._sleeps = 0

    def sleep(self, seconds: float) -> None:
        self._sleeps += 1
        if self._sleeps % 3 == 0:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Make verbs that watch end at once, and compose the same overrides only once."""
    composed: dict[tuple[str, ...], Composition] = {}

    def compose_once(overrides: list[str], config_dirs: tuple[Path, ...] = ()) -> Composition:
        key = tuple(overrides)
        if key not in composed:
            composed[key] = compose(overrides, config_dirs)
        return composed[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (follow, log_reading, watching, sweep):
            patch.setattr(module, "time", _Clock())
        for module in (drafting, show):
            patch.setattr(module, "compose", compose_once)
        yield


def _memory_in_use() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def verbs_about(run_name: str) -> list[tuple[str, ...]]:
    """Return the verbs that read a run."""
    return [
        ("status", run_name),
        ("status", run_name, "--json"),
        ("history", run_name),
        ("history", run_name, "--json"),
        ("history", run_name, "--launch", "1"),
        ("history", run_name, "--launch", "1", "--json"),
        ("logs", run_name),
        ("logs", run_name, "-n", "3"),
        ("logs", run_name, "--err"),
        ("logs", run_name, "--rank", "0"),
        ("plot", run_name, "--json"),
        ("verify", run_name),
        ("verify", run_name, "--json"),
    ]


_TINY = (
    "training=gpt3/tiny", "cluster=bcm", "engine=megatron", "container=null", "cluster.python=/bin/true",
    "training.run.dependency=null", "training.model.data.data_impl=mock", "training.run.name={run}",
)  # fmt: skip
# The other verbs that read a run, many of them slower: each example of the property runs one.
FURTHER_VERBS: list[tuple[str, ...]] = [
    ("plot", "{run}"),
    ("plot", "{run}", "--no-terminal", "--output", "{base}/{run}/mine.png"),
    ("incident", "{run}", "-o", "{base}/{run}/tickets"),
    ("nodes", "{run}"),
    ("nodes", "{run}", "--json"),
    ("follow", "{run}"),
    ("logs", "{run}", "-f"),
    ("status", "{run}", "--watch"),
    ("status", "{run}", "--watch", "--json"),
    ("sweep", "--results", "{run}"),
    ("sweep", "--results", "{run}", "--json"),
    ("sweep", "--results", "{run}", "--wait"),
    ("diff", *_TINY),
    ("diff", *_TINY, "--launch", "1"),
    ("show", *_TINY),
    ("check", *_TINY, "--no-check=scheduler"),
    ("check", *_TINY, "--no-check=scheduler", "engine=megatron_lm"),
    ("render", *_TINY),
    ("render", "--launch-dir", "{base}/{run}/launches/1"),
    ("launch", *_TINY, "--dry-run", "--launch-number=1", "--tag=theirs-1"),
]


@functools.cache
def root_config(base: Path) -> str:
    """Return the stored configuration of a launch."""
    words = [word.format(run="theirs") for word in _TINY]
    draft = drafting.draft(drafting.Request([*words, f"base_results_dir={base}"], command=[]))
    return stored_text(draft.stored_config, {})


def further_verb(number: int, run_name: str, base: Path) -> tuple[str, ...]:
    """Return one of `FURTHER_VERBS`, with its run and directory filled in."""
    return tuple(word.format(run=run_name, base=base) for word in FURTHER_VERBS[number % len(FURTHER_VERBS)])
