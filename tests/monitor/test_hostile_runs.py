"""Reading a tree with a hostile run: no verb executes its content, hangs, or hides other runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile_runs import (
    FILES,
    FURTHER_VERBS,
    NOBODY,
    HostileRun,
    Thing,
    further_verb,
    hostile_runs,
    root_config,
    run,
    verbs_about,
    without_waiting,
)
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from job_marks import leave_marks
from monitor_samples import Runs, append, log, whole_training

from launcher.runs import trust
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.commands import Retry

# By hand: SLIPWAY_HOSTILE_EXAMPLES=2000 pytest tests/monitor/test_hostile_runs.py
_EXAMPLES = int(os.environ.get("SLIPWAY_HOSTILE_EXAMPLES", "100"))
_CODES = {0, 1, 2, 3, 4, 75, 130}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
_HEALTHY, _TAG = "healthy", "20261121-120000-abcdef"

# As strict as Slurm: it answers nothing if one id is invalid.
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


@dataclass
class Tree:
    """A tree with a healthy run, and the outputs of the verbs before a hostile run was added."""

    base: Path
    root: Path
    outputs: dict[tuple[str, ...], tuple[int, str]]

    @property
    def manifest(self) -> dict[str, Any]:
        """The healthy run's manifest."""
        content: dict[str, Any] = json.loads(
            (self.base / _HEALTHY / "launches" / "1" / "launcher.json").read_text()
        )
        return content


_TREE_VERBS: list[tuple[str, ...]] = [
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
    root = tmp_path_factory.mktemp("h")
    base = root / "tree"
    directory = Runs(base).launch(_HEALTHY, tag=_TAG, job_id="77", user="root")
    append(directory, whole_training(0, 100)[:-1])
    leave_marks(directory, "77", started=1000.0)
    (directory / "root_config.yaml").write_text(root_config(base))
    log(directory, "77").write_text("all is well\n")
    script = directory / "submitted" / f"{_TAG}.1_submission.sh"
    separator = "\x1f"
    record = ["77", "77", "RUNNING", "None", "n[1-2]", "00:00:50", "0", "0", "root", str(script)]
    (root / "answer").write_text(separator.join(record) + separator + "\n")
    programs = root / "bin"
    programs.mkdir()
    for name, text in (
        ("squeue", _SQUEUE.format(here=root)),
        ("sacct", "#!/bin/sh\nexit 1\n"),
        ("scancel", f"#!/bin/sh\ntouch {root}/cancelled\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        patch.setenv("SLIPWAY_CACHE_DIR", str(root / "cache"))
        patch.delenv("SLURM_CONF", raising=False)
        patch.delenv("SLIPWAY_RESULTS_DIR", raising=False)
        patch.chdir(root)
        patch.setattr(SlurmScheduler.__init__, "__defaults__", (None, Retry(rest=0.0)))
        with without_waiting():
            outputs = {}
            for words in verbs_about(_HEALTHY):
                code, out, _ = run(base, *words)
                outputs[words] = (code, out)
            yield Tree(base, root, outputs)


def evil_configuration(root: Path) -> Path:
    """Write a Slurm configuration that belongs to nobody, and need not work; return its path."""
    path = root / "evil" / "slurm.conf"
    if not path.exists():
        path.parent.mkdir()
        path.write_text("PluginDir=evil\n")
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        else:
            path.chmod(0o666)
    return path


def _check_healthy(tree: Tree) -> None:
    code, out, _ = run(tree.base, "status", "--json")
    assert code in _CODES
    rows = {Path(row["run_dir"]).name: row for row in json.loads(out)}
    assert rows[_HEALTHY] == json.loads(tree.outputs["status", _HEALTHY, "--json"][1])[0]
    _, out, _ = run(tree.base, "list", "runs", "--json")
    assert _HEALTHY in {row["run"] for row in json.loads(out)}
    # A manifest may claim this job: then the user is shown all runs of that id.
    _, out, err = run(tree.base, "status", "77", "--json")
    assert rows[_HEALTHY] in json.loads(out) or f"tree/{_HEALTHY} (" in err


@contextlib.contextmanager
def planted_run(tree: Tree, hostile: HostileRun) -> Iterator[None]:
    """Write a hostile run beside the healthy one; remove all traces of it afterwards."""
    try:
        hostile.write(
            tree.base / "theirs",
            tree.manifest | {"run": "theirs", "tag": "theirs-1", "job_id": "17", "job_name": "job"},
        )
        yield
    finally:
        shutil.rmtree(tree.base / "theirs")
        shutil.rmtree(tree.root / "cache", ignore_errors=True)
        (tree.root / "configurations").unlink(missing_ok=True)
        trust._logged.clear()


def check(tree: Tree, verbs: Sequence[tuple[str, ...]]) -> None:
    """Run verbs over the tree; assert that nothing breaks, is executed, or hides the healthy run."""
    evil = evil_configuration(tree.root)
    for words in (*verbs, *_TREE_VERBS):
        code, out, err = run(tree.base, *words)
        assert code in _CODES, (words, code, err)
        # Output for programs is not escaped where there is no terminal.
        output = err if words[0] in ("logs", "render", "launch") else out + err
        assert not _CONTROLS.search(output), (words, _CONTROLS.search(output))
        assert "Traceback" not in err
    _check_healthy(tree)
    configurations = (tree.root / "configurations").read_text().split()
    assert str(evil) not in configurations, "Slurm's commands were given the configuration of somebody else"
    assert not list(tree.root.rglob("canary"))
    assert not (tree.root / "cancelled").exists()


def test_any_run_directory_costs_its_own_row_only(tree: Tree) -> None:
    strategy = hostile_runs(str(evil_configuration(tree.root)), _TAG)

    @settings(
        max_examples=_EXAMPLES,
        derandomize=_EXAMPLES <= 100,  # the suite repeats its examples; the longer run draws new ones
        phases=[
            Phase.explicit,
            Phase.reuse,
            Phase.generate,
            Phase.target,
            *([Phase.shrink] if _EXAMPLES > 100 else []),
        ],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile=strategy, further=st.integers(0, len(FURTHER_VERBS) - 1))
    @example(hostile=HostileRun({"job_id": "77_1"}, None), further=0)  # a point of an array of the healthy id
    def any_run(hostile: HostileRun, further: int) -> None:
        with planted_run(tree, hostile):
            check(tree, [*verbs_about("theirs"), further_verb(further, "theirs", tree.base)])

    any_run()


@pytest.mark.parametrize("number", range(len(FURTHER_VERBS)))
def test_every_further_verb_reads_a_healthy_run(tree: Tree, number: int) -> None:
    """The property must not try a verb that is refused for a reason of its own."""
    code, out, err = run(tree.base, *further_verb(number, _HEALTHY, tree.base))
    is_refused = FURTHER_VERBS[number][0] == "sweep"  # the run is no sweep
    assert code in ((2,) if is_refused else (0, 1, 3, 130)), err
    assert bool(out) is not is_refused


@pytest.mark.parametrize("number", range(len(FURTHER_VERBS)))
def test_no_further_verb_waits_for_a_fifo(tree: Tree, number: int) -> None:
    with planted_run(tree, HostileRun({}, None, dict.fromkeys(FILES, Thing("fifo")))):
        check(tree, [further_verb(number, "theirs", tree.base)])


# regressions: inputs that broke a verb once


ODD_JOB_IDS = ["abc", "5_[1-", "-1", "--user=root", "../x", "9" * 20, "é", "0", "77,", ""]


@pytest.mark.parametrize("job_id", ODD_JOB_IDS)
def test_an_odd_job_id_costs_its_own_row_only(tree: Tree, job_id: str) -> None:
    """All ids go into one question to Slurm, which answers nothing if one of them is invalid."""
    with planted_run(tree, HostileRun({"job_id": job_id}, None)):
        check(tree, verbs_about("theirs"))
        code, out, _ = run(tree.base, "status", "--json")
    (theirs,) = [row for row in json.loads(out) if row["run"] == "theirs"]
    assert (theirs["state"], code) == ("UNKNOWN", 3)
    assert "launcher.json is not a launch's manifest: job_id is" in theirs["reason"]


_READ = ["launcher.json", "results/metrics.jsonl", "marks/17.0.started.json", "marks/job", "log-job_17.out"]


@pytest.mark.parametrize(
    "thing",
    [
        Thing("fifo"),
        Thing("sparse"),
        Thing("link", "/dev/zero"),
        Thing("link", "/proc/kmsg"),
        Thing("socket"),
    ],
    ids=lambda thing: str(thing.content or thing.kind),
)
@pytest.mark.parametrize("name", _READ)
def test_no_verb_waits_for_special_files(tree: Tree, name: str, thing: Thing) -> None:
    """Sparse files of 20 GiB and endless devices are not read into memory either: `run` limits it."""
    replacement = thing if name == "launcher.json" else None
    with planted_run(
        tree,
        HostileRun(
            {"job_id": None} if name == "marks/job" else {}, replacement, {} if replacement else {name: thing}
        ),
    ):
        check(tree, verbs_about("theirs"))


def test_two_runs_of_one_tag_are_distinguished(tree: Tree) -> None:
    """A manifest may claim another run's tag: the other run's job is still reported."""
    for job_id in ("17", "78"):
        with planted_run(tree, HostileRun({"tag": _TAG, "job_id": job_id}, None)):
            # The answer for the run that is looked at last must not stand for both.
            os.utime(tree.base / "theirs" / "launches", (0, 0))
            check(tree, verbs_about("theirs"))


REPEATS = [
    {"job.2": "17"},
    {"job.2": "18", "job.3": "18"},
    {"job": "17", "job.2": "17", "job.3": "17", "job.4": "17"},
    {"job.2.17": ""},
    {"job.2": "77"},
]


@pytest.mark.parametrize("marks", REPEATS)
@pytest.mark.parametrize("changes", [{"links": 5}, {"every": 1, "waits_for": "x"}])
def test_marks_that_repeat_an_id_cost_their_own_row_only(
    tree: Tree, marks: dict[str, str], changes: dict[str, Any]
) -> None:
    files = {f"marks/{name}": Thing("text", f"{text}\n") for name, text in marks.items()}
    with planted_run(tree, HostileRun(changes, None, files)):
        check(tree, [("logs", "theirs"), ("history", "theirs"), ("verify", "theirs"), ("follow", "theirs")])
        _, out, _ = run(tree.base, "status", "theirs", "--json")
        links = json.loads(out)[0]["links"]
        assert len({link["job_id"] for link in links}) == len(links)


NUMBERS = [10**400, -(10**4000), 1e308, -1e308, 5e-324, float("nan"), float("inf")]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:9])
def test_any_number_of_an_evaluation_is_read(tree: Tree, number: object) -> None:
    content = {"perplexity": {"loss": number}, "lm_eval": {"arc": {"acc": number, "acc_stderr": number}}}
    files = {f"../../evaluations/step-{step}.json": Thing("json", content) for step in (2, 3)}
    with planted_run(tree, HostileRun({}, None, files)):
        check(tree, [("history", "theirs"), ("history", "theirs", "--json"), ("plot", "theirs")])


UNREADABLE = ["", "launches", "launches/1", "launches/1/marks", "launches/1/launcher.json", "evaluations"]


@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_may_not_be_read_costs_its_own_row_only(
    tree: Tree, name: str, mode: int, other_user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user reads the tree, and one whose umask is 077."""
    files = {
        "marks/17.0.started.json": Thing("json", {"started": 1000}),
        "../../evaluations/step-2.json": Thing("json", {}),
        "results/metrics.jsonl": Thing("lines", whole_training(0, 10)),
    }
    monkeypatch.setenv("SLIPWAY_CACHE_DIR", str(tree.root / "their cache"))
    tree.root.chmod(0o777)
    (tree.root / "configurations").unlink(missing_ok=True)
    with planted_run(tree, HostileRun({}, None, files)):
        (tree.base / "theirs" / name).chmod(mode)
        os.seteuid(other_user)
        try:
            check(tree, [(verb, "theirs") for verb in ("status", "history", "logs", "verify")])
        finally:
            os.seteuid(0)
            tree.root.chmod(0o700)
            shutil.rmtree(tree.root / "their cache", ignore_errors=True)
            (tree.root / "configurations").unlink(missing_ok=True)


@pytest.mark.parametrize("verb", ["cancel", "hold", "release"])
def test_the_verbs_that_act_print_no_control_characters(tree: Tree, verb: str) -> None:
    with planted_run(tree, HostileRun({"run": "x\x1b]0;owned\x07", "host": "\x9b31m"}, None)):
        _, out, err = run(tree.base, verb, "theirs")
        assert "x\\x1b]0;owned\\x07" in out + err
        assert not _CONTROLS.search(out + err)


def test_following_waits_for_no_fifo(tree: Tree, fast: None) -> None:
    files = {name: Thing("fifo") for name in ("results/metrics.jsonl", "log-job_17.out")}
    files["marks/17.0.ended.json"] = Thing("json", {"job_id": "17", "exit_code": 1, "ended": 1100})
    with planted_run(tree, HostileRun({}, None, files)):
        for words in (("follow", "theirs"), ("logs", "-f", "theirs")):
            code, _, err = run(tree.base, *words)
            assert code == 1, err


@pytest.mark.parametrize("name", ["$\\frac{1$", "a\x1b[2J\nb", "\udcff", "漢" * 70])
def test_any_run_name_can_be_the_title_of_a_plot(tree: Tree, name: str) -> None:
    """Matplotlib reads a formula between dollars, and fails on an invalid one."""
    files = {"results/metrics.jsonl": Thing("lines", whole_training(0, 10))}
    with planted_run(tree, HostileRun({"run": name}, None, files)):
        check(tree, [("plot", "theirs")])
        assert (tree.base / "theirs" / "loss.png").stat().st_size


_CANARY = "{{ cycler.__init__.__globals__.os.system('touch canary') }}"


def test_templates_of_another_user_are_not_rendered(tree: Tree) -> None:
    """A launch is rendered again with its stored templates, and a Jinja template can run any code."""
    files = {"templates/task.sh.j2": Thing("text", _CANARY), "root_config.yaml": Thing("root config", {})}
    with planted_run(tree, HostileRun({}, None, files, owned_by_nobody=True)):
        launch = tree.base / "theirs" / "launches" / "1"
        if os.geteuid() != 0:
            (launch / "templates").chmod(0o777)
        check(tree, [("render", "--task", f"--launch-dir={launch}")])
        code, _, err = run(tree.base, "render", "--task", f"--launch-dir={launch}")
        assert code == 2
        assert f"{launch}/templates: templates can run commands, and these are not trusted" in err
        for path in (launch.parents[1], *launch.parents[1].rglob("*")):
            os.chown(path, os.geteuid(), os.getegid())
            path.chmod(0o755)
        assert run(tree.base, "render", "--task", f"--launch-dir={launch}")[0] == 0  # own ones are trusted
        (tree.root / "canary").unlink()


def test_own_cluster_is_asked(tree: Tree) -> None:
    conf = tree.root / "slurm.conf"
    conf.touch(mode=0o644)
    with planted_run(tree, HostileRun({"slurm_conf": str(conf)}, None)):
        _, _, err = run(tree.base, "status")
        assert err == ""
        assert str(conf) in (tree.root / "configurations").read_text().split()
        conf.chmod(0o666)
        _, _, err = run(tree.base, "status")
        assert err == (
            f"slipway: {tree.base}/theirs/launches/1/launcher.json names the cluster of SLURM_CONF={conf}, "
            f"which is not trusted (everybody may write {conf}): this machine's own is asked\n"
        )
