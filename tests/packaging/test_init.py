"""`slipway init`: its files work as they are, and files that exist already are never written over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import init
from launcher.cli.app import main

pytestmark = pytest.mark.usefixtures("forked_slipway_on_path")


def read_tree(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file() or path.is_symlink())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def dry_run(directory: Path, *overrides: str, cwd: Path) -> str:
    """Run the wrapper for a dry run."""
    command = [str(directory / "launch.sh"), *overrides, "--dry-run"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_the_starter_tree_is_written_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "a place/of mine"]) == 0
    assert read_tree(tmp_path / "a place" / "of mine") == read_tree(init.STARTER)
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in init.FILES)
    assert "  'a place/of mine/launch.sh' --dry-run " in output
    *_, last_line = output.strip().splitlines()
    assert all(Path(path).is_dir() for path in last_line.partition(": ")[2].split(", "))


def test_the_tree_works_as_it_stands(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    before = read_tree(tmp_path)
    script = dry_run(tmp_path, "cluster=mine", "training=gpt3/mine", cwd=tmp_path)
    assert "#SBATCH --job-name=nemo-megatron-gpt3_mine\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "# module load cuda\n" in script
    assert read_tree(tmp_path) == before, "a dry run writes nothing"


@pytest.mark.parametrize("name", ["with space", "it's (mine), = [really] $HOME ~{x}"])
def test_the_wrapper_works_from_anywhere_and_wherever_it_is(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    assert main(["init", str(directory)]) == 0
    # Without a container: Pyxis takes no comma in the path of a mount.
    script = dry_run(directory, "container=null", "engine=megatron", cwd=Path("/"))
    assert f"--output={directory}/results/gpt3_mine/launches/1/" in script.replace("\\", "").replace('"', "")
    link = tmp_path / "link.sh"
    link.symlink_to(directory / "launch.sh")
    done = subprocess.run([str(link), "--dry-run", "cluster=local"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_arguments_win_over_the_wrappers_own(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    script = dry_run(
        tmp_path, "training=gpt3/126m", "cluster=bcm", "base_results_dir=/elsewhere", cwd=tmp_path
    )
    assert "#SBATCH --job-name=nemo-megatron-gpt3_126m\n" in script
    assert "#SBATCH --output=/elsewhere/gpt3_126m/" in script


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    scripts = [str(tmp_path / "launch.sh"), str(tmp_path / "script.sh")]
    Path(scripts[1]).write_text(dry_run(tmp_path, cwd=tmp_path))
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", list(init.FILES))
def test_existing_files_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).symlink_to("nowhere")  # a broken link counts too
    assert main(["init", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()] == [name]
    assert not (tmp_path / name).exists()


def test_a_second_init_names_all_existing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path)]) == 0
    (tmp_path / "launch.sh").write_text("edited")
    before = read_tree(tmp_path)
    capsys.readouterr()
    assert main(["init", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, [name for name in init.FILES if name not in printed.err]) == ("", [])
    assert read_tree(tmp_path) == before


def test_files_of_others_stay_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "theirs.yaml").write_text("a: 1\n")
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "conf" / "theirs.yaml").read_text() == "a: 1\n"


def test_failed_write_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`templates` is a file, which shows only after the files before it are written."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "templates").write_text("mine")
    assert main(["init", str(tmp_path / "there")]) == 2
    assert "templates" in capsys.readouterr().err
    assert read_tree(tmp_path) == {"there/templates": b"mine"}
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["templates"]


def test_the_wrapper_works_without_a_slipway_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["init", str(tmp_path)]) == 0
    assert "#SBATCH --job-name=nemo-megatron-gpt3_mine\n" in dry_run(tmp_path, cwd=tmp_path)
