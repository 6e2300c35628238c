"""The wheel in an empty directory: it holds all that it needs, and needs nothing of the checkout."""

from __future__ import annotations

import filecmp
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import Installed, run
from tests.sandbox.fixtures import skip_without_slurm

DRY_RUN = ["launch", "training=gpt3/126m", "cluster=bcm", "--dry-run"]
TREES = {
    "conf": "launcher/conf",
    "templates": "launcher/templates",
    "containers": "launcher/dockerfiles",
}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def checkout(source: Path) -> dict[str, bytes]:
    """Return the files of the wheel by name: the two packages, and the trees linked into them."""
    tops = {name: name for name in ("launcher", "slipway")} | TREES
    return {
        str(Path(target) / path.relative_to(source / top)): path.read_bytes()
        for top, target in tops.items()
        for path in (source / top).rglob("*")
        if path.is_file()
    }


def test_the_wheel_holds_what_the_checkout_has_and_nothing_else(
    wheel: Path, checkout: dict[str, bytes]
) -> None:
    assert contents(wheel) == checkout
    for name in (
        "launcher/conf/config.yaml",
        "launcher/templates/sbatch.sh.j2",
        "launcher/py.typed",
        "launcher/releases.json",
    ):
        assert name in checkout


def test_the_wheel_built_directly_is_the_same(
    source: Path, checkout: dict[str, bytes], tmp_path: Path
) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    run(*build, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    assert contents(wheel) == checkout


def test_the_wheel_carries_the_license_and_the_readme(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (license_file,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert archive.read(license_file) == (source / "LICENSE").read_bytes()
        message = Parser().parsestr(archive.read(metadata).decode())
    assert message["License"] == "Apache-2.0"
    assert message.get_payload() == (source / "README.md").read_text()


def test_the_source_distribution_has_no_results_and_no_tests(dist: Path) -> None:
    (path,) = dist.glob("slipway-*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    packages = {"launcher", "slipway"}
    assert packages | {"setup.cfg", "pyproject.toml", "LICENSE", "README.md"} <= tops
    assert not {"tests", "results", "benchmarks"} & tops


def test_the_wheel_runs_its_own_packages(installed: Installed, tmp_path: Path) -> None:
    program = "import launcher, slipway.trainer; print(launcher.__file__); print(slipway.trainer.__file__)"
    paths = installed.run("python", "-c", program, cwd=tmp_path).split()
    assert all(Path(path).is_relative_to(installed.directory) for path in paths)
    assert re.fullmatch(r"slipway \d\S+\n", installed.run("slipway", "--version", cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_owns_two_names_alone(wheel: Path) -> None:
    """`supervisor` is supervisord's and `trainer` Coqui's: of two such wheels one overwrites the other."""
    assert {name.partition("/")[0] for name in contents(wheel)} == {"launcher", "slipway"}


def test_supervisord_works_beside_the_wheel(installed: Installed, wheel: Path, tmp_path: Path) -> None:
    theirs = {str(path) for path in importlib.metadata.files("supervisor") or ()}
    assert any(path.startswith("supervisor/") for path in theirs)
    assert not theirs & contents(wheel).keys()
    version = importlib.metadata.version("supervisor")
    run_it = ["python", "-m", "supervisor.supervisord", "--version"]
    assert installed.run(*run_it, cwd=tmp_path).strip() == version
    assert installed.run("slipway", "list", "training", cwd=tmp_path)


def test_the_watch_sees_what_is_opened(repository: Path, installed: Installed, tmp_path: Path) -> None:
    """The tests that see no file opened rely on the watch."""
    before = installed.files_of_the_checkout()
    installed.run("python", "-c", f"open({str(repository / 'LICENSE')!r})", cwd=tmp_path)
    assert [*before, str(repository / "LICENSE")] == installed.files_of_the_checkout()
    installed.opened.unlink()


def test_a_dry_run_prints_the_checkouts_script(
    repository: Path, installed: Installed, tmp_path: Path
) -> None:
    script = installed.run("slipway", *DRY_RUN, cwd=tmp_path)
    expected = run(sys.executable, repository / "launcher" / "main.py", *DRY_RUN[1:], cwd=tmp_path)
    tag = re.compile(r"\d+-\d{6}-[0-9a-f]{6}")
    assert tag.sub("", script) == tag.sub("", expected)
    assert "#SBATCH --job-name=nemo-megatron-gpt3_126m\n" in script
    assert list(tmp_path.iterdir()) == []
    assert installed.files_of_the_checkout() == []


def test_a_starter_tree_of_the_wheel_works(installed: Installed, tmp_path: Path) -> None:
    assert "./launch.sh --dry-run" in installed.run("slipway", "init", cwd=tmp_path)
    script = installed.run("./launch.sh", "cluster=mine", "training=gpt3/mine", "--dry-run", cwd=tmp_path)
    assert "#SBATCH --job-name=nemo-megatron-gpt3_mine\n" in script
    assert "# module load cuda\n" in script
    assert installed.files_of_the_checkout() == []


@pytest.mark.slurm
@pytest.mark.trainer
def test_a_launch_of_the_wheel_completes(installed: Installed, tmp_path: Path, short_directory: Path) -> None:
    skip_without_slurm()
    sandbox = {"SLIPWAY_SANDBOX_DIR": str(short_directory / "sandbox")}
    small = ["training.trainer.max_steps=2", "training.trainer.limit_val_batches=0"]
    mock = ["training.model.data.data_impl=mock", "training.model.encoder_seq_length=32"]
    launch = ["slipway", "launch", "training=gpt3/tiny", "cluster=sandbox", *small, *mock, "--follow"]
    try:
        installed.run("slipway", "sandbox", "up", cwd=tmp_path, **sandbox)
        assert "COMPLETED" in installed.run(*launch, cwd=tmp_path, **sandbox)
        rows = json.loads(installed.run("slipway", "status", "--json", cwd=tmp_path, **sandbox))
    finally:
        installed.run("slipway", "sandbox", "down", cwd=tmp_path, **sandbox)
    assert [(row["run"], row["state"], row["step"]) for row in rows] == [("gpt3_tiny", "COMPLETED", 2)]
    code = tmp_path / "results" / "gpt3_tiny" / "launches" / "1" / "code" / "slipway"
    (site,) = installed.directory.glob("lib/python*/site-packages")
    names = [str(path.relative_to(code)) for path in code.rglob("*.py")]
    assert "trainer/pretrain.py" in names
    same, *different = filecmp.cmpfiles(code, site / "slipway", names, shallow=False)
    assert (len(same), different) == (len(names), [[], []])
    assert installed.files_of_the_checkout() == []


# The libraries of all extras, which the environment of the tests has.
BARE = """
import subprocess
import sys

EXTRAS = {"torch", "megatron", "numpy", "psutil", "tensorboard", "tokenizers", "orjson", "zstandard"}
EXTRAS |= {"pyarrow", "sentencepiece", "gigatoken", "safetensors", "transformers", "matplotlib", "plotext"}

class Finder:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *arguments):
        return None if name.partition(".")[0] in EXTRAS else self.finder.find_spec(name, *arguments)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
"""
COUNTS = {"documents": 1, "tokens": 9, "dropped": {}}
TRAINING: dict[str, Any] = {
    "model": {"data": {}},
    "trainer": {"num_nodes": 1, "devices": 1},
    "exp_manager": {},
}
LACKING = [
    ("data lint a.jsonl", "lacks numpy"),
    ("data show a", "lacks numpy"),
    ("data prepare a.jsonl", "cannot import numpy"),
    ("data plot a", "plots need matplotlib"),
    ("generate . text", "lacks torch"),
    ("convert .", "cannot import torch"),
    ("evaluate . evaluation.training=a.yaml", "cannot import torch"),
    ("launch training=gpt3/tiny cluster=local", "cannot import torch"),
]


def test_each_verb_says_what_to_install(installed: Installed, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a.manifest.json").write_text(json.dumps({"counts": COUNTS, "lengths": {"8": 1}}))
    (tmp_path / "a.yaml").write_text(json.dumps(TRAINING))
    environment = {**installed.environment, "PYTHONPATH": str(tmp_path)}
    for words, message in LACKING:
        done = subprocess.run(
            ["slipway", *words.split()], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        said = f"{done.stdout}{done.stderr}"
        assert done.returncode == 2, f"{words}\n{said}"
        assert message in said
        assert "Traceback" not in said
        assert "plots" in message or f"{wheel}[" in said, said
