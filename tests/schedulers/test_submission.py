"""The contract with submitit's private hooks, and the environment that submissions see."""

from __future__ import annotations

import inspect
import os
import shlex
from operator import attrgetter
from pathlib import Path

import pytest
import submitit
from submitit.core.core import PicklingExecutor

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.launching.submission import describe_ignored
from launcher.schedulers.base import NoAnswer, Submission
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.environment import clean_environment

SBATCH = """#!/bin/bash
printf '%s\\n' "$@" >"$RECORD/arguments"
env >"$RECORD/environment"
cp "$1" "$RECORD/script"
[[ ${REFUSE:-} ]] && { echo "sbatch: error: invalid partition specified: $REFUSE" >&2; exit 1; }
echo "Submitted batch job 4242"
"""


@pytest.fixture
def sbatch_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch on PATH that records how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", "#!/bin/bash\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path))
    return tmp_path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "launch" / "job_submission.sh"
    path.parent.mkdir()
    path.write_text("#!/bin/bash\necho ours\n")
    return path


def submission(script: Path) -> Submission:
    return Submission("a-tag", script, "me", "2026-01-01T00:00:00Z")


def test_the_hooks_that_we_override_exist() -> None:
    for name in ("_make_submission_file_text", "_make_submission_command"):
        assert callable(getattr(submitit.SlurmExecutor, name))
    assert list(inspect.signature(PicklingExecutor._submit_command).parameters) == ["self", "command"]


def test_our_own_script_is_submitted(sbatch_record: Path, script: Path) -> None:
    assert SlurmScheduler(None).submit(submission(script)) == "4242"
    submitted = script.parent / "submitted" / "a-tag.1_submission.sh"
    assert (sbatch_record / "arguments").read_text() == f"{submitted}\na-tag\n"
    assert submitted.resolve() == script
    assert (sbatch_record / "script").read_text() == script.read_text()


@pytest.fixture
def clean_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the variables of Slurm away that the shell of the tests may have."""
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_"))]:
        monkeypatch.delenv(name)


def test_variables_that_would_change_the_submission_do_not_reach_sbatch(
    sbatch_record: Path, script: Path, clean_shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    scheduler = SlurmScheduler(None)
    scheduler.submit(submission(script))
    environment = (sbatch_record / "environment").read_text()
    assert "SBATCH_PARTITION" not in environment
    assert "SLURM_JOB_ID" not in environment
    assert os.environ["SBATCH_PARTITION"] == "elsewhere", "the launcher's own environment stays as it is"
    warnings = describe_ignored(scheduler.ignored_environment())
    assert warnings[0].startswith("SBATCH_PARTITION=elsewhere of your shell is not passed on to sbatch")
    assert warnings[0].endswith("instead: cluster.partition=elsewhere")
    assert "job 7, in which you are" in warnings[1]


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("SBATCH_QOS", "0012", "cluster.qos"),
        ("SBATCH_PARTITION", "a,b", "cluster.partition"),
        ("SBATCH_CONSTRAINT", "[rack1|rack2]*2", "cluster.constraint"),
        ("SBATCH_CONSTRAINT", "a100&ib", "cluster.constraint"),
        ("SBATCH_RESERVATION", "null", "cluster.reservation"),
        ("SBATCH_REQ_SWITCH", "1@10:00", "cluster.switches"),
        ("SBATCH_SIGNAL", "B:USR1@60", "cluster.signal"),
        ("SBATCH_TIMELIMIT", "1-12:00", "training.run.time_limit"),
        ("SBATCH_GPUS_PER_NODE", "4", "cluster.gpus_per_node"),
    ],
)
def test_the_override_named_in_place_of_a_variable_does_the_same(
    clean_shell: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, key: str
) -> None:
    monkeypatch.setenv(variable, value)
    (message,) = describe_ignored(SlurmScheduler(None).ignored_environment())
    start = f"{variable}={value} of your shell is not passed on to sbatch; instead: "
    assert message.startswith(start)
    config = compose(["training=gpt3/126m", "cluster=bcm", *shlex.split(message.removeprefix(start))]).config
    assert str(attrgetter(key)(config)) == value


def test_the_key_named_in_place_of_a_variable_is_the_stages(clean_shell: None) -> None:
    (message,) = describe_ignored({"SBATCH_TIMELIMIT": "10"}, "command")
    assert message.endswith("instead: command.run.time_limit=10")


def test_no_override_is_named_for_an_empty_variable(
    clean_shell: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_QOS", "")
    assert describe_ignored(SlurmScheduler(None).ignored_environment()) == [
        "SBATCH_QOS= of your shell is not passed on to sbatch"
    ]


def test_the_cluster_chosen_is_the_one_submitted_to(sbatch_record: Path, script: Path) -> None:
    SlurmScheduler("/site/slurm.conf").submit(submission(script))
    assert "SLURM_CONF=/site/slurm.conf\n" in (sbatch_record / "environment").read_text()


def test_a_refusal_is_reported_in_slurms_words(
    sbatch_record: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "nope")
    with pytest.raises(UserError, match="invalid partition specified: nope"):
        SlurmScheduler(None).submit(submission(script))


@pytest.mark.parametrize("message", ["Socket timed out on send", "Unable to contact slurm controller"])
def test_a_controller_that_says_nothing_has_not_refused(
    sbatch_record: Path, script: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setenv("REFUSE", f"{message} (connect failure)")
    with pytest.raises(NoAnswer, match=message):
        SlurmScheduler(None).submit(submission(script))


def test_sbatch_that_did_not_start_left_no_job(
    sbatch_record: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{sbatch_record}/bin")
    with pytest.raises(UserError, match="sbatch cannot be run: env: no such file or directory") as raised:
        SlurmScheduler(None).submit(submission(script))
    assert not isinstance(raised.value, NoAnswer)


def test_without_slurm_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as raised:
        SlurmScheduler(None).validate("#!/bin/bash\n")
    assert "slipway sandbox up" in str(raised.value)
    assert "--dry-run" in str(raised.value)


def test_a_sandbox_that_is_down_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        SlurmScheduler(str(tmp_path / "slurm.conf")).validate("")
    assert "slipway sandbox up" in str(raised.value)


def test_clean_environment_keeps_the_sites_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/site.conf")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    assert clean_environment(None)["SLURM_CONF"] == "/etc/site.conf"
    assert "SQUEUE_FORMAT" not in clean_environment(None)
    assert clean_environment("/other.conf")["SLURM_CONF"] == "/other.conf"
