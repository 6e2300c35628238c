"""`launcher_cmd.log` holds the command of a launch, and one that renders its script again."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_slipway import forked_command
from tests.integration.conftest import SLIPWAY, run_command

# The job does nothing: the test is about its script.
MOCK = "training.model.data.data_impl=mock"
FAST = ["cluster=local", "cluster.python=/bin/true", "training=gpt3/tiny", MOCK]


def command_log(run: Path, launch: int) -> list[str]:
    return (run / "launches" / str(launch) / "launcher_cmd.log").read_text().splitlines()


def script(run: Path, launch: int) -> bytes:
    (path,) = (run / "launches" / str(launch)).glob("*_submission.sh")
    return path.read_bytes()


def replay(line: str, *, cold: bool = False) -> bytes:
    """Run a line of a log with bash; unless it starts cold, `slipway` is forked."""
    if not cold:
        assert str(SLIPWAY) in line
        line = line.replace(str(SLIPWAY), shlex.join(forked_command()))
    done = subprocess.run(["bash", "-c", line], cwd="/", capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("way", ["main.py", "slipway", "own trees", "data tokenize"])
def test_a_launch_replays_to_the_same_bytes(repository: Path, tmp_path: Path, way: str) -> None:
    cwd = tmp_path / "it's here; $(touch canary) #1"
    cwd.mkdir()
    (cwd / "ours" / "cluster").mkdir(parents=True)
    (cwd / "ours" / "cluster" / "mine.yaml").write_text("defaults: [local, _self_]\npython: /bin/true\n")
    (cwd / "ours" / "sbatch.sh.j2").write_text(
        '{% extends "slipway/sbatch.sh.j2" %}{% block environment %}{{ super() }}# ours\n{% endblock %}'
    )
    (cwd / "text.txt").write_text("words")
    main = [sys.executable, repository / "launcher" / "main.py"]
    commands: dict[str, list[str | Path]] = {
        "main.py": [*main, *FAST, "env_vars.X='a  b $(touch canary)'"],
        "slipway": [SLIPWAY, "launch", *FAST, "training.trainer.max_steps=7"],
        "own trees": [SLIPWAY, "launch", "--config-dir=ours", "--template-dir", "ours", "cluster=mine", MOCK],
        "data tokenize": [SLIPWAY, "data", "tokenize", "text.txt", "cluster.python=/bin/true"],
    }
    cold = way in ("main.py", "slipway")  # these two lines run as they are written
    run_command(*commands[way], cwd=cwd)
    (run,) = (cwd / "results").iterdir()
    command, _, render_line = command_log(run, 1)
    assert replay(render_line.removeprefix("# "), cold=cold) == script(run, 1)
    assert [path.name for path in (run / "launches").iterdir()] == ["1"], "a replay launches nothing"

    replay(command, cold=cold)
    assert script(run, 2) != script(run, 1)
    tags = [command_log(run, number)[2].rpartition("--tag=")[2] for number in (1, 2)]
    moved = script(run, 1).replace(b"launches/1", b"launches/2").replace(b"launch=1\n", b"launch=2\n")
    assert script(run, 2) == moved.replace(tags[0].encode(), tags[1].encode())
    assert replay(command_log(run, 2)[2].removeprefix("# "), cold=cold) == script(run, 2)
    assert not list(tmp_path.rglob("canary*"))


def test_a_number_or_tag_without_a_dry_run_is_refused(tmp_path: Path) -> None:
    for option in ("--launch-number=3", "--tag=x"):
        done = run_command(SLIPWAY, "launch", *FAST, option, cwd=tmp_path, check=2)
        assert "they need --dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_edited_and_deleted_trees_do_not_change_a_replay(tmp_path: Path) -> None:
    """The cluster, the root's keys and the templates are those of the launch."""
    ours = tmp_path / "ours"
    (ours / "cluster").mkdir(parents=True)
    cluster = ours / "cluster/mine.yaml"
    cluster.write_text("defaults: [local, _self_]\npython: /bin/true\nenv_vars: {WHICH: first}\n")
    (ours / "local.sh.j2").write_text(
        '{% extends "slipway/local.sh.j2" %}{% block environment %}{{ super() }}'
        '{% include "part.j2" %}\n{% endblock %}'
    )
    (ours / "part.j2").write_text("# a part\n")
    trees = ["--config-dir=ours", "--template-dir=ours"]
    run_command(SLIPWAY, "launch", *trees, "cluster=mine", MOCK, cwd=tmp_path)
    (run,) = (tmp_path / "results").iterdir()
    render_line = command_log(run, 1)[2].removeprefix("# ")
    before = script(run, 1)
    task = (run / "launches/1/task.sh").read_bytes()
    older_line = render_line.replace(f"--launch-dir={run}/launches/1 ", "")
    assert older_line != render_line

    cluster.write_text(cluster.read_text().replace("first", "second"))
    (ours / "part.j2").write_text("# another part\n")
    assert replay(render_line) == before
    assert replay(older_line) == before, "the number and the tag name the launch too"
    shutil.rmtree(ours)
    assert replay(render_line) == before
    rendered = run_command(SLIPWAY, "render", f"--launch-dir={run}/launches/1", cwd=Path("/"))
    assert rendered.stdout.encode() == before
    rendered = run_command(SLIPWAY, "render", "--task", "--launch-dir", run / "launches/1", cwd=Path("/"))
    assert rendered.stdout.encode() == task
    assert b"first" in before + task and b"# a part" in before
    assert [path.name for path in (run / "launches").iterdir()] == ["1"]


def test_directory_without_a_launch_is_refused(tmp_path: Path) -> None:
    for directory in ("nowhere", "."):
        done = run_command(SLIPWAY, "render", f"--launch-dir={directory}", cwd=tmp_path, check=2)
        assert "launcher.json does not exist" in done.stderr
    done = run_command(SLIPWAY, "launch", *FAST, "--launch-dir=x", cwd=tmp_path, check=2)
    assert "Traceback" not in done.stderr
