"""`slipway cancel` of many jobs: few commands of Slurm, the right word for each job, and the right order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from control_project import write_launch

from launcher.cli.app import main
from launcher.runs.provenance import user
from launcher.slurm.records import SEPARATOR
from slipway.common.node.marks import cancelled_by

Capsys = pytest.CaptureFixture[str]

# The queue is a directory with a file for each job: its state. `theirs` has jobs of another user.
_SQUEUE = """#!/bin/bash
cd {here}
echo "squeue $*" >>calls
for argument; do
    [[ $argument == --jobs=* ]] || continue
    IFS=, read -ra wanted <<<"${{argument#--jobs=}}"
    for job in "${{wanted[@]}}"; do
        [[ -e queue/$job ]] || continue
        script=/r/submitted/$(<tags/$job).1_submission.sh
        reason=$(cat "reasons/$job" 2>/dev/null || echo None)
        printf '%s{s}' "$job" "$job" "$(<queue/$job)" "$reason" "" 0:01 0 0 ada "$script"
        echo
    done
done
"""
_SCANCEL = """#!/bin/bash
cd {here}
echo "scancel $*" >>calls
[[ ! -e broken ]] || {{ echo "scancel: error: it broke" >&2; exit 1; }}
code=0
for job; do
    [[ $job != --* ]] || continue
    if grep -qx "$job" theirs; then
        echo "scancel: error: Kill job error on job id $job: Access/permission denied" >&2
        code=210
    elif [[ $* != *--signal* ]]; then
        rm -f "queue/$job"
    fi
    [[ ! -e stops ]] || break
done
exit $code
"""


_SCONTROL = """#!/bin/bash
cd {here}
echo "scontrol $*" >>calls
verb=$1; shift
code=0
for job; do
    if grep -qx "$job" theirs; then
        echo "Access/permission denied for job $job" >&2
        code=1
    elif [[ $verb = uhold ]]; then
        echo JobHeldUser >"reasons/$job"
    else
        rm -f "reasons/$job"
    fi
    [[ ! -e stops ]] || {{ echo "slurm_suspend error" >&2; exit 1; }}
done
exit $code
"""


class CountedSlurm:
    """A queue, and a count of the calls to Slurm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("queue", "tags", "reasons"):
            (directory / name).mkdir(parents=True)
        for name in ("calls", "theirs"):
            (directory / name).touch()

    def job(self, run: str, number: int, state: str = "PENDING") -> str:
        """Put a job into the queue: launch `number` of a run."""
        write_launch(run, number)
        (self.directory / "queue" / str(number)).write_text(state)
        (self.directory / "tags" / str(number)).write_text(f"{run}-{number}")
        return str(number)

    def not_ours(self, *jobs: str) -> None:
        (self.directory / "theirs").write_text("".join(f"{job}\n" for job in jobs))

    def held(self) -> set[str]:
        return {path.name for path in (self.directory / "reasons").iterdir()}

    def queue(self) -> set[str]:
        return {path.name for path in (self.directory / "queue").iterdir()}

    def calls(self, program: str = "") -> list[str]:
        lines = (self.directory / "calls").read_text().splitlines()
        return [line for line in lines if line.startswith(program)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountedSlurm:
    programs = tmp_path / "bin"
    programs.mkdir()
    directory = tmp_path / "slurm"
    texts = {"squeue": _SQUEUE, "scancel": _SCANCEL, "scontrol": _SCONTROL, "sacct": "#!/bin/bash\nexit 1\n"}
    for name, text in texts.items():
        (programs / name).write_text(text.format(here=directory, s=SEPARATOR))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert shutil.which("squeue") == str(programs / "squeue")
    return CountedSlurm(directory)


def cancel(capsys: Capsys, *words: str, verb: str = "cancel") -> tuple[int, list[str], list[str]]:
    capsys.readouterr()
    code = main([verb, *words])
    output = capsys.readouterr()
    return code, output.out.splitlines(), output.err.splitlines()


def runs(slurm: CountedSlurm, count: int, state: str = "PENDING") -> list[str]:
    names = [f"r{number:03}" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        slurm.job(name, number, state)
    return names


def lines_with(lines: Sequence[str], words: str) -> list[str]:
    return [line for line in lines if words in line]


def test_as_many_calls_for_forty_jobs_as_for_four(slurm: CountedSlurm, capsys: Capsys) -> None:
    names = runs(slurm, 44)
    assert cancel(capsys, *names[:4])[0] == 0
    few = len(slurm.calls())
    code, out, err = cancel(capsys, *names[4:])
    assert (code, err, slurm.queue()) == (0, [], set())
    assert len(slurm.calls()) - few == few == 3, slurm.calls()
    assert out == [f"cancelled job {n} of r{n:03} (launch {n}): it was PENDING" for n in range(44, 4, -1)]
    assert cancelled_by(Path("results/r044/launches/44"), "44") == user()


def test_a_long_list_is_cut(slurm: CountedSlurm, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.schedulers.slurm._AT_ONCE", 10)
    assert cancel(capsys, *runs(slurm, 25))[0] == 0
    assert [len(call.split()) - 1 for call in slurm.calls("scancel")] == [10, 10, 5]
    assert slurm.queue() == set()


def test_refusals_among_many_cancellations(slurm: CountedSlurm, capsys: Capsys) -> None:
    """Each refusal is of its own job, with one question more for all of them."""
    names = runs(slurm, 40, "RUNNING")
    slurm.not_ours("7", "31")
    code, out, err = cancel(capsys, *names)
    assert (code, slurm.queue()) == (1, {"7", "31"})
    assert len(lines_with(out, "cancelled job")) == 38 and len(out) == 38
    assert err == [
        line
        for job in ("31", "7")
        for line in (
            f"slipway: job {job} of r{job:0>3} (launch {job}) was not cancelled:"
            f" Kill job error on job id {job}: Access/permission denied",
            "  the job is ada's: ada can, or an administrator",
        )
    ]
    assert len(slurm.calls("scancel")) == 1 and len(slurm.calls("squeue")) <= 4


def test_jobs_after_a_refusal_that_stops_scancel_are_cancelled(slurm: CountedSlurm, capsys: Capsys) -> None:
    """Jobs that it does not mention, or that still wait, are ended one by one."""
    names = runs(slurm, 6)
    slurm.not_ours("6")
    (slurm.directory / "stops").touch()
    code, out, _ = cancel(capsys, *names)
    assert (code, slurm.queue()) == (1, {"6"})
    assert len(lines_with(out, "cancelled job")) == 5


def test_a_broken_scancel_is_reported_for_each_job(slurm: CountedSlurm, capsys: Capsys) -> None:
    names = runs(slurm, 3)
    (slurm.directory / "broken").touch()
    code, out, err = cancel(capsys, *names)
    assert (code, out, len(slurm.queue())) == (1, [], 3)
    assert len(lines_with(err, "was not cancelled: it broke")) == 3


def test_launches_of_one_run_end_one_after_the_other(slurm: CountedSlurm, capsys: Capsys) -> None:
    """Pending jobs end before running ones, the newest first: so none starts where another ended."""
    for number, state in ((1, "RUNNING"), (2, "PENDING"), (3, "PENDING")):
        slurm.job("a", number, state)
    slurm.job("b", 4, "PENDING")
    slurm.job("c", 5, "RUNNING")
    assert cancel(capsys, "a", "b", "c")[0] == 0
    ended = [set(call.split()[1:]) for call in slurm.calls("scancel")]
    assert ended == [{"4", "3"}, {"2"}, {"5", "1"}]


def test_many_are_told_to_save_at_once(slurm: CountedSlurm, capsys: Capsys) -> None:
    names = runs(slurm, 12, "RUNNING")
    slurm.job("w", 13)
    slurm.not_ours("3")
    code, out, err = cancel(capsys, "--save", "w", *names)
    assert code == 1
    assert len(lines_with(out, "to save and exit: it is RUNNING")) == 11
    assert len(lines_with(out, "cancelled job 13 of w")) == 1
    assert lines_with(err, "job 3 of r003 (launch 3) was not cancelled")
    first, second = slurm.calls("scancel")
    assert first == "scancel 13" and second.startswith("scancel --batch --signal=USR1 ")
    assert slurm.queue() == {str(number) for number in range(1, 13)}


@pytest.mark.parametrize(("verb", "done"), [("hold", "held"), ("release", "released")])
def test_as_many_calls_to_hold_forty_jobs_as_four(
    slurm: CountedSlurm, capsys: Capsys, verb: str, done: str
) -> None:
    names = runs(slurm, 44)
    if verb == "release":
        assert cancel(capsys, *names, verb="hold")[0] == 0
    before = len(slurm.calls())
    assert cancel(capsys, *names[:4], verb=verb)[0] == 0
    few = len(slurm.calls()) - before
    code, out, err = cancel(capsys, *names[4:], verb=verb)
    assert (code, err) == (0, [])
    assert len(slurm.calls()) - few - before == few == 3, slurm.calls()
    assert len(lines_with(out, f"{done} job")) == len(out) == 40
    assert len(slurm.held()) == (44 if verb == "hold" else 0)
    before_repeat, (code, out, err) = len(slurm.calls()), cancel(capsys, *names, verb=verb)
    assert (code, err) == (0, [])
    assert len(lines_with(out, "it is held already" if verb == "hold" else "it is not held")) == 44
    assert len(slurm.calls()) - before_repeat <= 2


def test_refusals_among_many_holds(slurm: CountedSlurm, capsys: Capsys) -> None:
    names = runs(slurm, 40)
    slurm.not_ours("7", "31")
    code, out, err = cancel(capsys, *names, verb="hold")
    assert (code, len(lines_with(out, "held job")), len(out)) == (1, 38, 38)
    assert err == [
        line
        for job in ("31", "7")
        for line in (
            f"slipway: job {job} of r{job:0>3} (launch {job}) was not held:"
            f" Access/permission denied for job {job}",
            "  the job is ada's: ada can, or an administrator",
        )
    ]
    assert len(slurm.calls("scontrol")) == 1 and len(slurm.calls("squeue")) <= 4


def test_jobs_that_scontrol_passed_over_are_held_singly(slurm: CountedSlurm, capsys: Capsys) -> None:
    (slurm.directory / "stops").touch()
    code, out, err = cancel(capsys, *runs(slurm, 3), verb="hold")
    # The stub complains of each job that is held singly: the queue afterwards counts.
    assert slurm.held() == {"1", "2", "3"}, (code, out, err)


def test_running_jobs_are_not_held_among_many(slurm: CountedSlurm, capsys: Capsys) -> None:
    slurm.job("a", 1, "RUNNING")
    slurm.job("a", 2)
    slurm.job("b", 3, "RUNNING")
    code, out, err = cancel(capsys, "a", "b", verb="hold")
    assert (code, slurm.held()) == (2, {"2"})
    assert [line.partition(":")[0] for line in out] == [
        "held job 2 of a (launch 2)",
        "left job 1 of a (launch 1) alone",
    ]
    assert "job 3 of b (launch 3) cannot be held: it is RUNNING" in err[0]


_FULL, _NO_READER = '"$@" >/dev/full', '"$@" | true; exit ${PIPESTATUS[0]}'
_SEVEN = "jobs 7, 6, 5, 4, 3 and 2 more"


@pytest.mark.parametrize(
    ("verb", "line", "message"),
    [
        ("cancel", _FULL, f"cancelled {_SEVEN}"),
        ("cancel --json", _FULL, f"cancelled {_SEVEN}"),
        ("cancel", _NO_READER, f"cancelled {_SEVEN}"),
        ("cancel --save", _FULL, f"cancelled {_SEVEN}; asked job 8 to save and exit"),
        ("hold", _FULL, f"held {_SEVEN}"),
        ("release", _FULL, "released job 1"),
    ],
)
def test_actions_are_reported_if_the_output_is_lost(
    slurm: CountedSlurm, verb: str, line: str, message: str
) -> None:
    """Exit code 2 would say that nothing was done."""
    names = runs(slurm, 7)
    if verb == "cancel --save":
        names.append("r008")
        slurm.job("r008", 8, "RUNNING")
    if verb == "release":
        (slurm.directory / "reasons" / "1").write_text("JobHeldUser")
    code, err = slipway(line, [*verb.split(), *names])
    assert code == 4, err
    assert f"slipway: done before the failure: {message}\n" in err
    assert "Traceback" not in err


def test_exit_code_says_that_nothing_was_done(slurm: CountedSlurm) -> None:
    names = runs(slurm, 2)
    slurm.not_ours(*"12")
    code, err = slipway(_FULL, ["cancel", *names])
    assert code == 1, err  # each refusal is told on stderr
    code, err = slipway(_FULL, ["release", *names])
    assert code == 2, err
    assert "before the failure" not in err


def slipway(line: str, words: Sequence[str]) -> tuple[int, str]:
    """Run a line of bash with `slipway WORDS` as its arguments; return its exit code and its stderr."""
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "launcher.cli.app", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr
