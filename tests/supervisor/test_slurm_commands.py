"""Slurm's commands as a job calls them: real processes that play Slurm's answers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slipway.common.node.settings import Settings
from slipway.supervisor import slurm as module
from slipway.supervisor.job import Job
from slipway.supervisor.slurm import JobRecord, Slurm, submitted_id

JOB_LINE = (
    "JobId=17 JobName=a JobState=FAILED Requeue=0 UserId=me(1) JobState=COMPLETING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 PreemptTime=None TimeLimit=1-00:02:00 EndTime=1795747882 "
    "Comment=JobState=FAILED WorkDir=/x"
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path / "bin"


def play(commands: Path, name: str, body: str) -> None:
    (commands / name).write_text(
        f'#!/bin/bash\necho "$*" >>"$0.calls"\nenv >"$0.env"\npwd >"$0.cwd"\n{body}\n'
    )
    (commands / name).chmod(0o755)


def calls(commands: Path, name: str) -> list[str]:
    return (commands / f"{name}.calls").read_text().splitlines()


def slurm(tmp_path: Path, **environment: str) -> Slurm:
    script = f"{tmp_path}/launches/1/x_submission.sh"
    settings = Settings("x", 1, "0123abcd", str(tmp_path), script, f"{tmp_path}/log-x_", "slurm", "megatron")
    variables = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", **environment}
    return Slurm(Job("17", "17.0", "17", 1, False, f"{tmp_path}/launches/1", settings, 0, variables))


def test_job_record_is_read_from_scontrol(tmp_path: Path, commands: Path) -> None:
    play(commands, "scontrol", f"echo {JOB_LINE!r}")
    assert slurm(tmp_path).show_job("17") == JobRecord(
        "COMPLETING", "None", "None", True, 2, 86520, 1795747882
    )
    assert calls(commands, "scontrol") == ["--all --local show job --oneliner 17"]


@pytest.mark.parametrize(
    "name",
    [
        "x JobState=COMPLETING Reason=TimeLimit PreemptTime=2026-01-01T00:00:00",
        "JobState=FAILED Reason=x Requeue=0 Restarts=9",
        "x UserId=me(1) JobState=FAILED Reason=x JobName=y UserId=me(1) JobState=TIMEOUT Reason=y",
        "x\n   JobState=FAILED Reason=x",
        "x JobState=FAILED Reason=x  ",
    ],
)
def test_a_name_that_looks_like_fields_is_none(tmp_path: Path, commands: Path, name: str) -> None:
    line = "JobId=17 JobName=%s UserId=root(0) QOS=x JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    line += "PreemptTime=None Comment=JobState=FAILED Reason=x JobState=FAILED Reason=y"
    (commands / "answer").write_text(line % name + "\n")
    (commands / "name").write_text(f"{name}\n")
    play(commands, "scontrol", f"cat {commands}/answer")
    play(commands, "squeue", f"cat {commands}/name")
    assert slurm(tmp_path).show_job("17") == JobRecord("RUNNING", "None", "None", True, 2)
    # Another name meanwhile, or no record any more.
    play(commands, "squeue", "echo z")
    assert slurm(tmp_path).show_job("17") is None


def test_questions_are_repeated_after_a_signal_but_not_after_a_failure(
    tmp_path: Path, commands: Path
) -> None:
    play(commands, "scontrol", f'[[ $(wc -l <"$0.calls") == 3 ]] || kill -KILL $$\necho {JOB_LINE!r}')
    assert slurm(tmp_path).show_job("17") is not None
    play(commands, "squeue", "echo PENDING; exit 1")
    assert slurm(tmp_path).squeue_state("17") == ""
    assert len(calls(commands, "squeue")) == 1


def test_slurms_signals_to_the_job_do_not_end_a_question(tmp_path: Path, commands: Path) -> None:
    play(commands, "squeue", "kill -s TERM $$; kill -s USR1 $$; echo RUNNING")
    assert slurm(tmp_path).squeue_state("17_2") == "RUNNING"
    assert len(calls(commands, "squeue")) == 1


def test_hanging_slurm_is_given_up(tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a wrapper started, and that holds its output open, is ended too."""
    monkeypatch.setattr(module, "_QUESTION_SECONDS", 0.3)
    play(commands, "scontrol", 'sleep 100 & echo $! >"$0.pid"; wait')
    assert slurm(tmp_path).show_job("17") is None
    pid = int((commands / "scontrol.pid").read_text())
    # A killed process that waits for a processor is still there.
    deadline = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_without_slurms_commands_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    client = slurm(tmp_path)
    assert client.show_job("17") is None and client.state_of("17") == "" == client.squeue_state("17")
    assert client.down_nodes(["n1"]) == [] and client.find_submitted(2) is None
    answer = client.submit("x", ["2"], [])
    assert submitted_id(answer) is None and "sbatch" in answer.last_line
    assert not client.cancel(["18"]) and not client.update_excluded(["18"], "n1")


@pytest.mark.parametrize("shown", ["echo JobState=COMPLETING x", "exit 1"])
def test_the_accounting_knows_what_the_controller_has_forgotten(
    tmp_path: Path, commands: Path, shown: str
) -> None:
    play(commands, "scontrol", shown)
    play(commands, "sacct", "printf 'REQUEUED\\nCANCELLED by 0\\n'")
    assert slurm(tmp_path).state_of("16") == "CANCELLED"
    assert calls(commands, "sacct")[0].endswith("--jobs=16")


def test_down_nodes_are_listed(tmp_path: Path, commands: Path) -> None:
    play(commands, "sinfo", "printf 'n1 mixed\\nn2 down*\\nn3 idle*\\nn2 down*\\nn4 failing\\n'")
    assert slurm(tmp_path).down_nodes(["n1", "n2", "n3", "n4"]) == ["n2", "n3", "n4"]


@pytest.mark.parametrize(
    ("shown", "killed"), [("17.batch 17.extern 17.0 17.12", ["17.0", "17.12"]), ("", [])]
)
def test_steps_are_killed_and_the_script_is_not(
    tmp_path: Path, commands: Path, shown: str, killed: list[str]
) -> None:
    play(commands, "squeue", f"printf '%s\\n' {shown}")
    play(commands, "scancel", "")
    slurm(tmp_path).kill_steps()
    done = (commands / "scancel.calls").exists() and calls(commands, "scancel")
    assert done == (["--signal=KILL " + " ".join(killed)] if killed else False)


def test_the_next_link_has_the_environment_of_this_ones_submission(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TASKS", "1")  # exported by the script since
    play(commands, "sbatch", "echo 'sbatch: a notice' >&2; echo '18;cluster'")
    variables = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CPUS_PER_TASK": "8",
        "SBATCH_PARTITION": "other",
        "SLURMD_NODENAME": "n1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_GPUS": "0",
        "CUDA_VISIBLE_DEVICES": "0",
        "BASH_FUNC_module%%": "() { :; }",
        "OF_THE_USER": "kept",
    }
    answer = slurm(tmp_path, **variables).submit("/x.sh", ["2", "0123abcd"], ["--dependency=afterany:17"])
    assert submitted_id(answer) == "18"
    assert calls(commands, "sbatch") == ["--parsable --dependency=afterany:17 /x.sh 2 0123abcd"]
    environment = (commands / "sbatch.env").read_text().splitlines()
    assert {"OF_THE_USER=kept", "BASH_FUNC_module%%=() {  :", "SLURM_CONF=/etc/slurm.conf"} <= set(
        environment
    )
    assert [line for line in environment if line.startswith(("SLURM", "SBATCH", "CUDA", "OF_THE_TASKS"))] == [
        "SLURM_CONF=/etc/slurm.conf"
    ]
    assert (commands / "sbatch.cwd").read_text().strip() == str(tmp_path)


def test_users_own_choice_of_gpus_is_kept(tmp_path: Path, commands: Path) -> None:
    play(commands, "sbatch", "echo 18")
    slurm(tmp_path, CUDA_VISIBLE_DEVICES="3", SLURM_SUBMIT_DIR="/gone").submit("/x.sh", [], [])
    assert "CUDA_VISIBLE_DEVICES=3" in (commands / "sbatch.env").read_text().splitlines()


def test_a_lost_job_is_found_by_its_tag_and_link(tmp_path: Path, commands: Path) -> None:
    lines = [
        "20|PENDING|(null)|/elsewhere/submitted/ffff.2_submission.sh",
        "21|PENDING|(null)|/x/submitted/0123abcd.3_submission.sh",
        "x|PENDING|(null)|/x/submitted/0123abcd.2_submission.sh",
        "22|PENDING|(null)|/x/submitted/0123abcd.2_submission.sh 2 0123abcd",
    ]
    queue = "cat <<'END'\n" + "\n".join(lines) + "\nEND"
    play(commands, "squeue", queue)
    assert slurm(tmp_path, SQUEUE_STATES="RUNNING").find_submitted(2) == "22"
    assert "SQUEUE_STATES" not in (commands / "squeue.env").read_text()
    assert slurm(tmp_path).find_submitted(4) is None
    # A squeue that fails lists jobs that exist, and may leave out others.
    play(commands, "squeue", f"{queue}\nexit 1")
    assert slurm(tmp_path).find_submitted(2) == "22"
    assert slurm(tmp_path).queued_jobs("0123abcd") is None


@pytest.mark.parametrize("output", ["", "sbatch: error: 17", "18 19", "0x12", "18\nPending job allocation"])
def test_only_an_id_is_read_as_one(output: str) -> None:
    assert submitted_id(module.Answer(0, output, "")) == ("18" if output.startswith("18\n") else None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "17"),
        ({"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "2"}, "16_2"),
        ({"SLURM_JOB_ID": ""}, ""),
    ],
)
def test_job_id_is_the_one_of_slurm(tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    assert slurm(tmp_path, **variables).job_id == expected
