"""`slipway incident` on runs on disk: what it holds, what it must not hold, and what it may not do."""

from __future__ import annotations

import json
import os
import tarfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_marks import leave_marks
from monitor_samples import FAILED, RUNNING, FakeScheduler, Runs, append, log, train, whole_training

from launcher.cli.app import main
from launcher.monitor import incident
from launcher.schedulers.base import JobStatus
from launcher.slurm.questions import Reply
from launcher.slurm.states import State

Capsys = pytest.CaptureFixture[str]

# In parts, as a launch keeps what differs from the commit. The first is in a variable of this process, the
# second in a file of `env_files`, the others are known by their forms or names.
ENVIRONMENT, OF_FILE = "Kx7" + "qkZ99wTq", "rose" + "bud-of-a-file-1"
FORMED = "hf_" + "AbCdEfGhIjKlMnOpQrSt12"
NAMED, URL, ARGV = "swordfish" + "-1", "hunter" + "2-url", "opensesame" + "-9"
KEY_LINE = "MIIEvQIBADANBgkqhkiG9w0BAQEF" + "AASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKB"
SECRETS = [ENVIRONMENT, OF_FILE, FORMED, NAMED, URL, ARGV, KEY_LINE]
KEY = f"-----BEGIN PRIVATE KEY-----\n{KEY_LINE}\n-----END PRIVATE KEY-----\n"
LOG = f"""\
using {ENVIRONMENT} and {OF_FILE}
\x1b[31m{FORMED}\x1b[0m is red
DB_PASSWORD={NAMED}
cloning https://me:{URL}@host.example/x.git
{KEY}RuntimeError: NCCL error: unhandled system error
"""


def failure(rank: int, error: str, **fields: Any) -> str:
    return json.dumps({"time": 1002.0 + rank, "rank": rank, "host": f"n{rank}", "error": error, **fields})


@pytest.fixture
def failed(runs: Runs, scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose first launch was interrupted and whose second failed on rank 1; with secrets everywhere."""
    monkeypatch.setenv("MY_API_KEY", ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(incident, "ask_at_once", answer)
    first = runs.launch(overrides=["training=gpt3/tiny"], version="0.1.0")
    append(first, whole_training(0, 50)[:-1])
    (first / "root_config.yaml").write_text("training:\n  lr: 1.0e-4\n")
    scheduler.set("11", JobStatus(State.INTERRUPTED, "saved", exit_code=75))
    words = ["training=gpt3/tiny", "training.lr=1e-3", f"env_vars.HF_TOKEN={FORMED}"]
    second = runs.launch(
        number=2, overrides=words, version="0.2.0", command=["slipway", "launch", "--password", ARGV]
    )
    secret_file = tmp_path / "token"
    secret_file.write_text(f"{OF_FILE}\n")
    config = f"training:\n  lr: 1.0e-3\nenv_files: {{MY_TOKEN: {secret_file}}}\ndb:\n  password: {NAMED}\n"
    (second / "root_config.yaml").write_text(config)
    (second / "job_submission.sh").write_text("#!/bin/bash\n")
    append(second, [*whole_training(50, 60)[:-1], train(61, loss=float("nan"))])
    leave_marks(second, "12", started=1000.0, ended=1100.0, code=1, nodes="n0,n1")
    mark = second / "marks" / "12.0.ended.json"
    why = {"rule": "gpu_lost", "verdict": "exclude", "why": "a GPU was lost", "excluded": "n1"}
    mark.write_text(json.dumps(json.loads(mark.read_text()) | why))
    log(second, "12").write_text("1234567890\n" * 60_000 + LOG)
    (second / "results" / "failures").mkdir()
    (second / "results" / "failures" / "globalrank-1.json").write_text(failure(1, f"CUDA: {FORMED}\nx"))
    (second / "results" / "nemo_log_globalrank-1_x.txt").write_text(f"own log of rank 1: {KEY}")
    alert = {
        "alert": "non_finite-1",
        "event": "opened",
        "number": 1,
        "time": 1030.0,
        "detector": "non_finite",
    }
    alert |= {"why": "the loss is no number [step 61]", "password": NAMED}
    (second.parents[1] / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    scheduler.set("12", FAILED)
    return second.parents[1]


def answer(queries: dict[str, list[str]], *_: object) -> dict[str, Reply]:
    """Answer as Slurm does; the accounting is silent."""
    assert queries["job"] == ["scontrol", "--all", "show", "job", "12"]
    assert queries["nodes"][-1] in ("n1,n0", "n1")  # of the marks, which others may not read
    nodes = (
        "NodeName=n1 Arch=x86\n   State=DOWN+DRAIN ThreadsPerCore=1\n   Reason=Xid 79 | [x](http://evil)\n"
    )
    job = f"JobId=12 Comment=api_key={NAMED}\n"
    return {name: Reply(why="no accounting") for name in queries} | {
        "job": Reply(job),
        "nodes": Reply(nodes),
    }


def gather(run: Path | str, capsys: Capsys, *options: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the verb; return its answer, and the texts of the archive, which are those of the folder."""
    assert main(["incident", str(run), "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    folder = Path(answer["directory"])
    with tarfile.open(answer["archive"]) as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert {f"{folder.name}/{name}": text for name, text in files.items()} == texts
    assert next(iter(texts)) == f"{folder.name}/incident.md"
    return answer, files


def test_the_report_says_what_when_where_and_what_to_try(failed: Path, capsys: Capsys) -> None:
    answer, files = gather(failed, capsys)
    report = files["incident.md"].splitlines()
    assert report[0] == "# Incident: gpt3_tiny, launch 2"
    text = files["incident.md"]
    assert "| why | a GPU was lost (rule `gpu_lost`, verdict exclude) |" in text
    assert "| failed first | rank 1 on n1 failed first: CUDA: ***\\nx |" in text
    assert "tell the administrators: the node has to be restarted" in text
    assert "ended 1970-01-01T00:18:20Z" in text
    assert "| n1 | at fault, by the rule; rank 1 failed at" in text
    assert "State=DOWN+DRAIN; Reason=Xid 79 \\| \\[x\\](http://evil) |" in text
    assert "- launch 1: INTERRUPTED, steps 0→50" in text
    assert "- + training.lr=1e-3" in text
    assert "- version: 0.1.0 → 0.2.0" in text
    assert "  step 61  loss nan  gradient norm 1.5000  4.10k tokens/s" in text
    assert "·  6.5627 → nan" in text  # the last loss is no number
    assert "- 1970-01-01 00:17:10Z: the loss is no number \\[step 61\\] (open)" in text
    assert "-  lr: 0.0001\n+  lr: 0.001\n" in files["changes.diff"]
    assert answer["missing"] == ["slurm/ping.txt: no accounting", "slurm/sacct.txt: no accounting"]
    assert set(files) == {
        *("incident.md", "provenance.json", "history.json", "changes.diff", "metrics.jsonl", "alerts.jsonl"),
        *("slurm/job.txt", "slurm/nodes.txt", "marks/job", "marks/12.0.started.json"),
        *("marks/12.0.ended.json", "failures/globalrank-1.json", "logs/nemo_log_globalrank-1_x.txt"),
        *("configuration/root_config.yaml", "logs/log-nemo-megatron-gpt3_tiny_12.out"),
    }
    assert all(f"- `{name}`" in report for name in files if name != "incident.md")


def test_no_secret_is_in_any_artefact(failed: Path, capsys: Capsys) -> None:
    answer, files = gather(failed, capsys)
    assert [(name, each) for name, text in files.items() for each in SECRETS if each in text] == []
    assert [each for each in SECRETS if each in json.dumps(answer)] == []
    text = files["logs/log-nemo-megatron-gpt3_tiny_12.out"]
    assert "*** is red" in text
    assert text.endswith("RuntimeError: NCCL error: unhandled system error\n")
    assert Path(answer["archive"]).stat().st_mode & 0o077 == 0
    assert Path(answer["directory"]).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", [0, 1, 10, 30, 90])
def test_a_secret_at_the_cut_of_a_log_is_masked_too(
    failed: Path, capsys: Capsys, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident, "_LOG_BYTES", 200)
    monkeypatch.setattr(incident, "_MARGIN_BYTES", cut)
    end = "x" * 99 + "\n"
    for text in (f"HF_TOKEN={FORMED}\n", KEY):
        log(failed / "launches" / "2", "12").write_text("a line\n" * 99 + text + end * 2)
        _, files = gather(failed, capsys)
        assert [each for each in SECRETS if each in files["logs/log-nemo-megatron-gpt3_tiny_12.out"]] == []


def test_sizes_are_bounded_and_nothing_is_written_over(
    failed: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(200):
        (failed / "launches" / "2" / "results" / "failures" / f"stack-{number:03}").write_text("x" * 100_000)
    monkeypatch.setattr(incident, "_ALL_BYTES", 1 << 20)
    output = tmp_path / "new" / "tickets"
    archives = set()
    for _ in range(3):
        answer, files = gather(failed, capsys, "-o", str(output))
        assert len(files["logs/log-nemo-megatron-gpt3_tiny_12.out"]) < (1 << 18) + 100
        assert sum(map(len, files.values())) < (1 << 20) + 50_000
        assert "failures: 137 of 201 files" in answer["missing"]
        assert "failures/stack-199: the incident would be larger than 1 MiB" in answer["missing"]
        archives.add(answer["archive"])
    assert len(archives) == 3
    assert len(list(output.iterdir())) == 6


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a link leads out of the run": lambda path: path.symlink_to("/etc/passwd"),
    "not a regular file": os.mkfifo,
    "1099511627776 bytes, nearly all a hole": lambda path: os.truncate(path, 1 << 40),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_hostile_files_are_named_and_left_out(failed: Path, capsys: Capsys, why: str) -> None:
    second = failed / "launches" / "2"
    names = {
        "logs/log-nemo-megatron-gpt3_tiny_12.err": log(second, "12", "err"),
        "failures/a_1b_31m___x": second / "results" / "failures" / "a\x1b[31m\n`x",
        "configuration/task.sh": second / "task.sh",
        "job/packages.json": second / "results" / "packages.json",
    }
    for path in names.values():
        if "hole" in why:
            path.write_text("")
        HOSTILE[why](path)
    answer, files = gather(failed, capsys)
    assert all("root:" not in text for text in files.values())
    assert not set(names) & set(files)
    # A FIFO is no log for `logs`, too, and so not looked at.
    shown = {reason.partition(": ")[0] for reason in answer["missing"] if reason.endswith(why)}
    assert shown >= {"configuration/task.sh", "job/packages.json"}
    assert "\x1b" not in files["incident.md"]


def test_a_configuration_behind_a_link_is_not_compared(failed: Path, capsys: Capsys, tmp_path: Path) -> None:
    private = tmp_path / "private.yaml"
    private.write_text("mine: 1\n")
    config = failed / "launches" / "1" / "root_config.yaml"
    config.unlink()
    config.symlink_to(private)
    answer, files = gather(failed, capsys)
    assert "changes.diff: a link leads out of the run" in answer["missing"]
    assert all("mine" not in text for text in files.values())


def test_a_run_of_another_user_names_what_cannot_be_read(
    failed: Path, capsys: Capsys, other_user: int, tmp_path: Path
) -> None:
    second = failed / "launches" / "2"
    log(second, "12").chmod(0o600)
    (second / "marks").chmod(0o700)
    output = tmp_path / "theirs"
    output.mkdir()
    output.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(other_user)
            os._exit(main(["incident", str(failed), "-o", str(output)]))
        except BaseException:
            (output / "error").write_text(traceback.format_exc())
            os._exit(70)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, [path.read_text() for path in output.iterdir()]
    (archive,) = output.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        report = packed.extractfile(packed.next()).read().decode()  # type: ignore[arg-type,union-attr]
    assert "- logs/log-nemo-megatron-gpt3\\_" not in report
    assert "- logs/log-nemo-megatron-gpt3_tiny_12.out: permission denied" in report
    assert "- marks: permission denied" in report


def test_a_live_run_and_a_silent_scheduler_have_an_incident(
    failed: Path, capsys: Capsys, scheduler: FakeScheduler
) -> None:
    scheduler.set("12", RUNNING)
    assert "| what | RUNNING |" in gather("gpt3_tiny", capsys, "--launch", "2")[1]["incident.md"]
    scheduler.error = "Slurm does not answer"
    report = gather(failed, capsys)[1]["incident.md"]
    assert "UNKNOWN" in report or "FAILED" in report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt3_tinny"], "did you mean 'gpt3_tiny'?"),
        (["gpt3_tiny", "--launch", "7"], "has no launch 7"),
        (["gpt3_tiny", "-o", "/proc/nope"], "cannot write into /proc/nope: no such file"),
        (["gpt3_tiny", "-o", "token"], "into token: file exists"),
    ],
)
def test_mistakes_write_nothing(
    failed: Path, capsys: Capsys, tmp_path: Path, words: list[str], message: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["incident", *words]) == 2
    assert message in capsys.readouterr().err.lower()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_line_of_any_length_is_masked_in_time(runs: Runs) -> None:
    files = incident.IncidentFiles(runs.base, ())
    began = time.monotonic()
    for text in ("TOKEN=" * 40_000, '"' * 270_000, "a" * 270_000, "--password " * 24_000, "=\\" * 130_000):
        files.add(text[:9], text)
    assert time.monotonic() - began < 60
