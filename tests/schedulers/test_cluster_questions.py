"""Questions to a cluster: all at once, in an environment that changes nothing, with little patience."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.slurm.cluster import pairs, rows
from launcher.slurm.questions import Reply, ask_at_once, questions

LONG = 300.0


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH: all of Slurm's programs there print their arguments."""
    for name in ("scontrol", "sinfo", "sacctmgr", "srun"):
        script(tmp_path / name, f'echo "{name} $*"')
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("sleep", "touch", "ls", "grep"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_each_question_has_its_answer(programs: Path, tmp_path: Path) -> None:
    commands = questions("gpu,low", "me")
    replies = ask_at_once(commands, None, LONG)
    assert replies == {name: Reply(" ".join(command) + "\n") for name, command in commands.items()}
    assert "--partition=gpu,low" in replies["nodes"].text
    assert "name=me" in replies["associations"].text
    assert "--partition" not in " ".join(questions(None, "me")["nodes"])
    assert "--all" in questions(None, "me")["nodes"]
    assert "--all" not in commands["nodes"]  # sinfo would report a conflict
    assert all("--local" in replies[name].text for name in ("nodes", "partitions"))
    assert "--all" in replies["partitions"].text


def test_all_but_the_first_are_asked_at_the_same_time(programs: Path) -> None:
    """Each question waits for the others: one after the other, none would ever be answered."""
    wait = f"""case "$*" in "show config") exit;; esac
touch {programs}/asked-$$
until [ "$(ls {programs} | grep -c asked-)" = 5 ]; do sleep 0.01; done
echo together"""
    for name in ("scontrol", "sinfo", "sacctmgr", "srun"):
        script(programs / name, wait)
    replies = ask_at_once(questions(None, "me"), None, LONG)
    assert [reply.text for reply in replies.values()] == ["", *["together\n"] * 5]


def test_a_command_that_does_not_answer_leaves_its_part_out(programs: Path) -> None:
    script(programs / "sinfo", "exec sleep 600")
    replies = ask_at_once(questions(None, "me"), None, 0.5)
    assert replies["nodes"] == Reply(why="Slurm did not answer within 0.5 s")


def test_a_refusal_is_the_reason(programs: Path) -> None:
    script(programs / "sacctmgr", 'echo "sacctmgr: error: not today" >&2; exit 1')
    (programs / "srun").unlink()
    replies = ask_at_once(questions(None, "me"), None, LONG)
    assert replies["qos"] == replies["associations"] == Reply(why="sacctmgr: not today")
    assert replies["partitions"].why is None


def test_without_a_slurm_nothing_more_is_asked(programs: Path, tmp_path: Path) -> None:
    """All questions have the same reason."""
    script(programs / "sinfo", f"touch {programs}/asked")
    script(programs / "scontrol", "echo 'fetch_config: DNS SRV lookup failed' >&2; exit 1")
    commands = questions(None, "me")
    assert ask_at_once(commands, None, LONG) == dict.fromkeys(
        commands, Reply(why="no Slurm found on this machine")
    )
    (programs / "scontrol").unlink()
    reply = Reply(why="scontrol is not on this machine: there is no Slurm here")
    assert ask_at_once(commands, None, LONG) == dict.fromkeys(commands, reply)
    missing = f"{tmp_path}/slurm.conf"
    assert ask_at_once(commands, missing, LONG) == dict.fromkeys(
        commands, Reply(why=f"there is no {missing}")
    )
    assert not (programs / "asked").exists()


def test_the_users_own_variables_change_no_answer(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINFO_FORMAT", "%P")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    script(programs / "sinfo", 'echo "$SINFO_FORMAT$SLURM_JOB_ID$SLURM_CONF"')
    (programs / "slurm.conf").touch()
    replies = ask_at_once(questions(None, "me"), str(programs / "slurm.conf"), LONG)
    assert replies["nodes"].text == f"{programs}/slurm.conf\n"


def test_lines_are_split_as_the_commands_write_them() -> None:
    assert list(rows("a|1\nbroken\nb|\n", ("name", "number"))) == [
        {"name": "a", "number": "1"},
        {"name": "b", "number": ""},
    ]
    assert pairs("A=1 B=cpu=2,mem=3 word C=") == {"A": "1", "B": "cpu=2,mem=3", "C": ""}
