"""Reading a tree in which somebody else's run lies: nothing is executed, nothing hangs, nobody is blinded."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hostile_runs import HostileRun, hostile_runs
from hypothesis import HealthCheck, Phase, given, settings
from job_marks import leave
from monitor_samples import Runs, append, log, whole_training

from launcher.cli.app import main
from launcher.runs import trust
from launcher.schedulers import slurm
from launcher.schedulers.patience import Patience

# By hand: SLIPWAY_HOSTILE_EXAMPLES=2000 pytest tests/monitor/test_hostile_runs.py
_EXAMPLES = int(os.environ.get("SLIPWAY_HOSTILE_EXAMPLES", "100"))
_SECONDS = 20
_MEMORY = 3 << 30
_CODES = {0, 1, 2, 3, 4, 75}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
_HEALTHY, _TAG = "healthy", "20261121-120000-abcdef"

# As cruel as Slurm: one id that is none, and it answers nothing.
_SQUEUE = """#!/bin/sh
printf '%s\\n' "${{SLURM_CONF-}}" >>{here}/configurations
for argument; do case $argument in --jobs=*)
    case ${{argument#--jobs=}} in *[!0-9,_]*|*,,*|*[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]*)
        echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
    esac
    case ,${{argument#--jobs=}}, in *,77,*) ;; *) exit 0;; esac
esac; done
cat {here}/answer
"""


class TookTooLong(BaseException):
    """A verb that was still at it when its time was over."""


@dataclass
class Tree:
    """A tree of runs with a healthy one, and how the verbs told of it before there was another."""

    base: Path
    here: Path
    told: dict[tuple[str, ...], tuple[int, str]]

    @property
    def manifest(self) -> dict[str, Any]:
        """The healthy run's."""
        content: dict[str, Any] = json.loads(
            (self.base / _HEALTHY / "launches" / "1" / "launcher.json").read_text()
        )
        return content


def run(base: Path, *words: str) -> tuple[int, str, str]:
    """Run a verb in this process, within a time and a memory; return its code and what it printed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(words)

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (_used() + _MEMORY, limits[1]))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words, "--base-results-dir", str(base)])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def _used() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _verbs(run_name: str) -> list[tuple[str, ...]]:
    """The verbs that read a run."""
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


_OF_TREE: list[tuple[str, ...]] = [
    ("status",),
    ("status", "--json"),
    ("list", "runs"),
    ("list", "runs", "--json"),
    ("list", "--all"),
    ("status", "77", "--json"),
    ("status", "4711"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    # Short, as the path of a socket has to be.
    here = tmp_path_factory.mktemp("h")
    base = here / "tree"
    directory = Runs(base).launch(_HEALTHY, tag=_TAG, job_id="77", user="root")
    append(directory, whole_training(0, 100)[:-1])
    leave(directory, "77", started=1000.0)
    log(directory, "77").write_text("all is well\n")
    script = directory / "submitted" / f"{_TAG}.1_submission.sh"
    separator = "\x1f"
    record = ["77", "77", "RUNNING", "None", "n[1-2]", "00:00:50", "0", "0", "root", str(script)]
    (here / "answer").write_text(separator.join(record) + separator + "\n")
    programs = here / "bin"
    programs.mkdir()
    for name, text in (
        ("squeue", _SQUEUE.format(here=here)),
        ("sacct", "#!/bin/sh\nexit 1\n"),
        ("scancel", f"#!/bin/sh\ntouch {here}/cancelled\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        patch.setenv("SLIPWAY_CACHE_DIR", str(here / "cache"))
        patch.delenv("SLURM_CONF", raising=False)
        patch.delenv("SLIPWAY_RESULTS_DIR", raising=False)
        patch.chdir(here)
        patch.setattr(slurm, "_PATIENCE", Patience(rest=0.0))
        told = {}
        for words in _verbs(_HEALTHY):
            code, out, _ = run(base, *words)
            told[words] = (code, out)
        yield Tree(base, here, told)


def evil_configuration(here: Path) -> Path:
    """A configuration of Slurm of nobody's; it need not be one that works."""
    path = here / "evil" / "slurm.conf"
    if not path.exists():
        path.parent.mkdir()
        path.write_text("PluginDir=evil\n")
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        else:
            path.chmod(0o666)
    return path


def _check_healthy(tree: Tree) -> None:
    code, out, _ = run(tree.base, "status", "--json")
    assert code in _CODES
    rows = {Path(row["run_dir"]).name: row for row in json.loads(out)}
    assert rows[_HEALTHY] == json.loads(tree.told["status", _HEALTHY, "--json"][1])[0]
    _, out, _ = run(tree.base, "list", "runs", "--json")
    assert _HEALTHY in {row["run"] for row in json.loads(out)}
    _, out, _ = run(tree.base, "status", "77", "--json")
    assert rows[_HEALTHY] in json.loads(out)


@contextlib.contextmanager
def planted(tree: Tree, hostile: HostileRun) -> Iterator[None]:
    """A hostile run beside the healthy one, and nothing of it after."""
    try:
        hostile.write(
            tree.base / "theirs", tree.manifest | {"run": "theirs", "tag": "theirs-1", "job_id": "17"}
        )
        yield
    finally:
        shutil.rmtree(tree.base / "theirs")
        shutil.rmtree(tree.here / "cache", ignore_errors=True)
        (tree.here / "configurations").unlink(missing_ok=True)
        trust._told.clear()


def check(tree: Tree, verbs: Sequence[tuple[str, ...]]) -> None:
    """Run verbs over the tree: nothing breaks, is executed, or hides the healthy run."""
    evil = evil_configuration(tree.here)
    for words in (*verbs, *_OF_TREE):
        code, out, err = run(tree.base, *words)
        assert code in _CODES, (words, code, err)
        told = err if words[0] == "logs" else out + err
        assert not _CONTROLS.search(told), (words, _CONTROLS.search(told))
        assert "Traceback" not in err
    _check_healthy(tree)
    asked = (tree.here / "configurations").read_text().split()
    assert str(evil) not in asked, "Slurm's commands were given the configuration of somebody else"
    assert not list(tree.here.rglob("canary"))
    assert not (tree.here / "cancelled").exists()


def test_any_run_directory_costs_its_own_row_only(tree: Tree) -> None:
    strategy = hostile_runs(str(evil_configuration(tree.here)), _TAG)

    @settings(
        max_examples=_EXAMPLES,
        phases=[
            Phase.explicit,
            Phase.reuse,
            Phase.generate,
            Phase.target,
            *([Phase.shrink] if _EXAMPLES > 100 else []),
        ],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile=strategy)
    def any_run(hostile: HostileRun) -> None:
        with planted(tree, hostile):
            check(tree, _verbs("theirs"))

    any_run()
