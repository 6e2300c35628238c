"""Containers in a sandbox: Pyxis as a plugin of its Slurm, and an Enroot of its own for every node."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox.prerequisites import find_program, install_line, program

PLUGIN = "spank_pyxis.so"
# Where `make install` and the packages put it, next to the folder that Slurm loads its own plugins from.
_FOLDERS = (
    "/usr/local/lib/slurm",
    "/usr/lib/slurm",
    "/usr/lib64/slurm",
    "/usr/lib/*/slurm",
    "/usr/lib/*/slurm-wlm",
    "/opt/slurm/lib/slurm",
    "/opt/slurm/lib64/slurm",
)
# Programs that Enroot calls to create and start a container from a squashfs, with Debian's packages of them.
_PROGRAMS = {"unsquashfs": "squashfs-tools", "awk": "gawk", "getent": "libc-bin", "pwck": "passwd"}
_BUILD = (
    "docs/pyxis.md explains how to install both, from their releases or from github.com/NVIDIA/{enroot,pyxis}"
)


def find_plugin() -> Path:
    """Return Pyxis' plugin, from beside Enroot or from where Slurm's plugins usually are.

    Raises
    ------
    UserError
        When it is in none of these places.
    """
    folders = list(_FOLDERS)
    if (enroot := find_program("enroot")) is not None:
        prefix = Path(enroot).resolve().parent.parent
        folders[:0] = [str(prefix / "lib/slurm"), str(prefix / "lib64/slurm")]
    for folder in folders:
        # Patterns are relative to the root in pathlib.
        for plugin in sorted(Path("/").glob(f"{folder.lstrip('/')}/{PLUGIN}")):
            return plugin
    raise UserError(
        f"Pyxis is not installed: {PLUGIN} is in none of {', '.join(dict.fromkeys(folders))}",
        hint=f"name it: slipway sandbox up --pyxis /path/to/{PLUGIN}\n  {_BUILD}",
    )


def check(plugin: Path) -> None:
    """Check the further requirements of a sandbox with containers.

    Raises
    ------
    UserError
        If something is missing, with how to install it.
    """
    _check_plugin(plugin)
    if find_program("enroot") is None:
        beside = plugin.resolve().parents[2] / "bin" if len(plugin.resolve().parents) > 2 else None
        is_there = beside is not None and (beside / "enroot").exists()
        hint = f'export PATH="{beside}:$PATH"' if is_there else _BUILD
        raise UserError("not installed: enroot, which starts the containers for Pyxis", hint=hint)
    missing = [name for name in _PROGRAMS if find_program(name) is None]
    if missing:
        packages = dict.fromkeys(_PROGRAMS[name] for name in missing)
        raise UserError(f"not installed: {', '.join(missing)}", hint=install_line(packages))
    _check_user_namespaces()


def site_configuration() -> Path:
    """Return the enroot.conf that Enroot reads on this machine.

    Raises
    ------
    UserError
        If Enroot does not name one, or names a file that does not exist.
    """
    # Enroot creates its folders at every call: below a scratch directory, and not in the user's home.
    with tempfile.TemporaryDirectory() as scratch:
        folders = {f"ENROOT_{name}_PATH": f"{scratch}/{name}" for name in ("CACHE", "DATA", "RUNTIME")}
        outcome = subprocess.run(
            [program("enroot"), "info"],
            env=dict(os.environ) | folders,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    for line in outcome.stdout.splitlines():
        key, _, value = line.partition(":")
        if key == "Config file" and Path(value.strip()).is_file():
            return Path(value.strip())
    output = (outcome.stderr or outcome.stdout).strip()
    raise UserError(
        f"`enroot info` names no configuration file that exists: {output}",
        hint="install Enroot 3.4 or newer with its enroot.conf; an empty file will do",
    )


def _check_plugin(plugin: Path) -> None:
    try:
        with plugin.open("rb") as file:
            is_library = file.read(4) == b"\x7fELF"
    except OSError as error:
        raise UserError(f"--pyxis {plugin}: {error.strerror}", hint=f"name the file {PLUGIN}") from error
    if not is_library:
        raise UserError(f"--pyxis {plugin} is not a shared library", hint=f"name the file {PLUGIN}")


def _check_user_namespaces() -> None:
    outcome = subprocess.run(
        [program("unshare"), "--user", "--mount", "true"], capture_output=True, text=True, timeout=10
    )
    if outcome.returncode:
        raise UserError(
            f"Enroot cannot create a user namespace on this machine: {outcome.stderr.strip()}",
            hint="sysctl user.max_user_namespaces must not be 0, and in a container SYS_ADMIN is needed",
        )
