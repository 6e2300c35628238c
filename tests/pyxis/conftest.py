"""A Slurm with Pyxis, and images for it; without Enroot and Pyxis on the machine these tests are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.sandbox import prerequisites
from launcher.sandbox.lifecycle import Sandbox
from tests.pyxis.pyxis_images import add_trainer, rootfs_with_programs, squash
from tests.sandbox.fixtures import booted

# The image's `python3`: it reports where the task is, in place of a trainer.
_REPORT = """\
#!/bin/bash
# Written by the tests: one line for each thing that a task can see.
into=$REPORT_TO/$SLURM_PROCID
{
    echo "node $(hostname)"
    echo "image $(cat /etc/image-name)"
    echo "directory $PWD"
    echo "arguments $*"
    for name in OF_THE_IMAGE OF_THE_JOB IN_BOTH RANK WORLD_SIZE MASTER_ADDR CAME_THROUGH HOME STARTED_IN; do
        echo "$name ${!name-unset}"
    done
    for folder in $LOOK_AT; do
        { touch "$folder/of-$SLURM_PROCID"; } 2>/dev/null && how=writable || how=read-only
        [[ -d $folder ]] || how=absent
        echo "$folder $how: $(ls "$folder" 2>/dev/null | tr '\\n' ' ')"
    done
} >"$into.new"
mv "$into.new" "$into"
# Stays while a test wants to look at it.
while [[ -e ${STAY_WHILE:-/nowhere} ]]; do sleep 0.1; done
"""


@pytest.fixture(scope="session")
def pyxis_sandbox() -> Iterator[Sandbox]:
    """Two nodes with two fake GPUs each, and Pyxis."""
    try:
        plugin = prerequisites.find_plugin()
        prerequisites.check_containers(plugin)
    except UserError as error:
        pytest.skip(f"needs Enroot and Pyxis: {error.message}")
    with booted(nodes=2, gpus=2, cloud_nodes=0, pyxis=plugin) as booted_sandbox:
        yield booted_sandbox


@pytest.fixture
def on_pyxis(pyxis_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """That sandbox, as the Slurm of this process."""
    for name in set(os.environ) - set(pyxis_sandbox.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(pyxis_sandbox.slurm_conf))
    return pyxis_sandbox


@pytest.fixture(scope="session")
def shell_image(pyxis_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of a few megabytes whose `python3` writes to $REPORT_TO what it sees."""
    return reporting_image(tmp_path_factory.mktemp("shell"), "shell")


@pytest.fixture(scope="session")
def other_shell_image(pyxis_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image like `shell_image` with another name in it."""
    return reporting_image(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="session")
def cuda_image(pyxis_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that asks for GPUs, as those of CUDA do."""
    return reporting_image(tmp_path_factory.mktemp("cuda"), "cuda", NVIDIA_VISIBLE_DEVICES="all")


def reporting_image(directory: Path, name: str, **environment: str) -> Path:
    variables = {"OF_THE_IMAGE": "made at build", "IN_BOTH": "image", **environment}
    root = rootfs_with_programs(directory / "root", **variables)
    (root / "etc/image-name").write_text(f"{name}\n")
    (root / "usr/bin/python3").write_text(_REPORT)
    (root / "usr/bin/python3").chmod(0o755)
    return squash(root, directory / f"{name}.sqsh")


@pytest.fixture(scope="session")
def trainer_image(pyxis_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """An image with this Python, the packages of the extra `train`, and our trainer."""
    directory = tmp_path_factory.mktemp("trainer")
    root = rootfs_with_programs(directory / "root", PYTHONPATH="/opt/packages:/opt/slipway")
    requirements = ("torch", "megatron-core", "numpy", "psutil", "pyyaml", "tensorboard", "tokenizers")
    add_trainer(root, repository, *requirements)
    image = squash(root, directory / "trainer.sqsh")
    shutil.rmtree(root)
    return image


def run_step(command: list[str | Path], **environment: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
