"""NeMo's own environment, and launches of its trainers on the sandbox."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.chains.recorded_directories import installed_versions

HERE = Path(__file__).parent
SLIPWAY = Path(sys.executable).with_name("slipway")


@dataclass(frozen=True)
class Nemo:
    """The place of NeMo: its interpreter, and the directory that holds its scripts.

    The scripts are not in NeMo's wheel. Those in ``source`` do the same in few lines; SLIPWAY_NEMO_SOURCE
    names a checkout of NeMo whose own are to be used.
    """

    python: Path
    source: Path

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of a launch on bare metal, without a GPU."""
        return [
            "cluster=sandbox",
            "engine=nemo",
            "container=null",
            f"cluster.python={self.python}",
            f"nemo_path={self.source}",
            f"env_vars.PYTHONPATH={HERE / 'cpu'}",
        ]

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that its trainers and their checkpoints depend on."""
        return installed_versions(self.python, "nemo_toolkit", "megatron-core", "lightning", "torch")


@pytest.fixture(scope="session")
def nemo(repository: Path) -> Nemo:
    environment = Path(os.environ.get("SLIPWAY_NEMO_ENV", repository / ".venv-nemo"))
    if not (environment / "requirements.txt").is_file():
        pytest.skip(f"needs NeMo's own environment, {environment}: make nemo-test")
    source = Path(os.environ.get("SLIPWAY_NEMO_SOURCE", HERE / "source"))
    return Nemo((environment / "bin" / "python").absolute(), source.absolute())


Submit = Callable[..., Path]


@pytest.fixture
def submit(nemo: Nemo, sandbox: Sandbox, tmp_path: Path) -> Submit:
    """Return a function that submits a training in `tmp_path` and returns its run directory."""

    def call(*overrides: str) -> Path:
        command = [str(SLIPWAY), "launch", *nemo.overrides, *overrides]
        result = subprocess.run(
            command, cwd=tmp_path, env=sandbox.environment(), capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr
        match = re.search(r"^ *directory +(\S+)$", result.stdout, re.MULTILINE)
        assert match, result.stdout
        return tmp_path / match.group(1)

    return call


Train = Callable[..., Path]


@pytest.fixture
def train(submit: Submit, sandbox: Sandbox, tmp_path: Path) -> Train:
    """Return a function that runs a training to its successful end and returns its run directory."""

    def call(*overrides: str) -> Path:
        run = submit(*overrides)
        command = [str(SLIPWAY), "follow", str(run)]
        result = subprocess.run(
            command, cwd=tmp_path, env=sandbox.environment(), capture_output=True, text=True, timeout=600
        )
        assert "COMPLETED" in result.stdout, result.stdout[-4000:] + result.stderr
        return run

    return call
