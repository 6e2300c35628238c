"""The command line of a launch: its options, exit codes and imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.app import main
from tests.supervisor.test_every_python import interpreter

MODULES = """
import sys
from launcher.cli.app import main
code = main(sys.argv[1:])
print(*sorted({name.removeprefix("slipway.").partition(".")[0] for name in sys.modules}), file=sys.stderr)
sys.exit(code)
"""
# Where argparse ends the program.
EXITING = "code = 0\ntry: main(sys.argv[1:])\nexcept SystemExit: pass"


def run_main(*arguments: str, cwd: Path, check: int = 0) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).resolve().parents[2] / "launcher" / "main.py"
    done = subprocess.run([sys.executable, str(script), *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == check, done.stderr
    return done


@pytest.mark.parametrize("option", ["--dry-run", "dry_run=true", "dry_run=t"])
def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path: Path, option: str) -> None:
    done = run_main("training=gpt3/126m", option, "cluster=bcm", cwd=tmp_path)
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=nemo-megatron-gpt3_126m\n")
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_in_a_pipe_imports_neither_submitit_nor_rich_nor_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MODULES, "launch", "--dry-run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported = done.stderr.split()
    assert "hydra" in imported
    assert not {"submitit", "rich", "torch", "trainer", "numpy"} & set(imported)


def test_a_dry_run_of_a_named_image_imports_no_builder_of_images(tmp_path: Path) -> None:
    program = MODULES.replace('.removeprefix("slipway.").partition(".")[0]', "")
    words = ["launch", "--dry-run", "cluster=bcm", "container=nvcr.io#nvidia/nemo:24.07"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.split())
    assert "launcher.drafting" in imported
    makers = {"launcher.stages.image", "launcher.launching.building"}
    assert {name for name in imported if "launcher.images." in name} <= {"launcher.images.references"}
    assert not makers & imported


@pytest.mark.parametrize("verb", ["status", "sandbox", "data", "logs", "follow", "plot", "verify", "launch"])
def test_no_verb_imports_torch_or_the_trainer(tmp_path: Path, verb: str) -> None:
    program = MODULES.replace("code = main(sys.argv[1:])", EXITING)
    done = subprocess.run(
        [sys.executable, "-c", program, verb, "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "usage: slipway" in done.stdout
    assert "example" in done.stdout
    assert not {"torch", "trainer", "numpy", "matplotlib"} & set(done.stderr.split())


def test_the_version_imports_no_verb(tmp_path: Path) -> None:
    program = MODULES.replace('.removeprefix("slipway.").partition(".")[0]', "").replace(
        "code = main(sys.argv[1:])", EXITING
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith("slipway ")
    assert not {"hydra", "launcher.cli.launch", "launcher.cli.status"} & set(done.stderr.split())


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    done = run_main("training=gpt3/126b", cwd=tmp_path, check=2)
    assert done.stdout == ""
    assert done.stderr.startswith("slipway: training=gpt3/126b: there is no such choice\n")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path: Path) -> None:
    done = run_main("training=gpt3/5b", "--dry-run", "training.trainer.num_nodes=4", cwd=tmp_path)
    assert "#SBATCH --nodes=4\n" in done.stdout
    assert "gpt3_5b" in done.stdout


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    assert "--dryrun" in run_main("--dryrun", cwd=tmp_path, check=2).stderr


@pytest.mark.parametrize("version", [None, *(f"3.{minor}" for minor in range(6, 15))])
def test_main_py_of_a_python_that_cannot_run_it_says_so_in_a_line(
    tmp_path: Path, version: str | None
) -> None:
    """Without a version: this Python, without its packages."""
    python = sys.executable if version is None else interpreter(version)
    main = Path(__file__).resolve().parents[2] / "launcher" / "main.py"
    done = subprocess.run(
        [python, "-S", main, "training=gpt3/126m", "--dry-run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    is_old = version is not None and tuple(map(int, version.split("."))) < (3, 11)
    for words in (
        python,
        "is older than 3.11" if is_old else "lacks hydra",
        ".venv/bin/activate",
        "make setup",
    ):
        assert words in line
    assert list(tmp_path.iterdir()) == []


def test_main_py_hides_no_module_of_others(tmp_path: Path) -> None:
    """The script runs in its own folder, beside `plan`, `config` and `errors`."""
    main = Path(__file__).resolve().parents[2] / "launcher"
    done = subprocess.run([sys.executable, "main.py", "--dry-run"], cwd=main, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["launch"],
        ["launch", "cluster=local", "training.trainer.num_nodes=1"],
        ["sweep", "training.model.seed=1,2"],
    ],
)
def test_nothing_is_launched_that_nobody_chose(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of config.yaml takes 64 GPUs for a day."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "no training is chosen" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert run_main(cwd=tmp_path, check=2).stderr.startswith("slipway: no training is chosen")
