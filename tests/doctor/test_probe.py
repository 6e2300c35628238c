"""The probe, on programs and files of the tests: it asks each of them, and no failure stops it."""

from __future__ import annotations

import ast
import os
import pwd
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import probe
from launcher.doctor.facts import Machine, machine_of

_ENROOT = """\
#!/usr/bin/env bash
config::init "{conf}"
export ENROOT_VERSION="3.5.0"
"""


@pytest.fixture
def put_program(tmp_path: Path) -> Callable[[str, str], None]:
    """Return a function that writes a program into the only directory on the PATH."""
    (tmp_path / "bin").mkdir()

    def make(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return make


def examine(tmp_path: Path, request: dict[str, dict[str, str]] | None = None, **variables: str) -> Machine:
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **variables}
    return machine_of(probe.gather(request or {}, environment))


def test_probe_runs_with_an_old_python() -> None:
    """RHEL 8 has 3.6, in which `from __future__ import annotations` is an error as well."""
    source = Path(probe.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    own = ("base64", "contextlib", "json", "os", "pathlib", "platform", "pwd", "re", "shutil", "subprocess")
    assert set(names) == {*own, "sys", "zlib"}
    assert "removeprefix" not in source
    assert ":=" not in source


def test_empty_path_has_no_programs(tmp_path: Path) -> None:
    machine = examine(tmp_path)
    assert (machine.tools, machine.enroot, machine.gpus, machine.docker_daemon) == ({}, None, None, None)
    assert machine.places["temporary"].path == "/tmp"


def test_versions_and_compressors_are_read(tmp_path: Path, put_program: Callable[[str, str], None]) -> None:
    put_program("skopeo", "echo skopeo version 1.18.0-dev commit: 1.2.3")
    put_program("unsquashfs", "echo 'unsquashfs version 4.6.1 (2023/03/25)'; exit 1")
    put_program(
        "mksquashfs", r"""printf 'SYNTAX: x\n\tCompressors available:\n\t\t\tgzip (default)\n\t\t\tzstd\n'"""
    )
    put_program("umoci", "exit 1")
    put_program(
        "docker", 'case "$1" in version) echo Cannot connect >&2; exit 1;; *) echo Docker version 28.2;; esac'
    )
    machine = examine(tmp_path)
    assert machine.tools["skopeo"] == "1.18.0-dev"
    assert machine.tools["unsquashfs"] == "4.6.1"
    assert machine.tools["umoci"] is None
    assert machine.compressors == ("gzip", "zstd")
    assert machine.docker_daemon == "!Cannot connect"


def test_namespaces_are_tried(tmp_path: Path, put_program: Callable[[str, str], None]) -> None:
    assert examine(tmp_path).no_namespaces is None
    put_program("unshare", '[ "$*" = "--user --map-root-user --mount $0 --version" ]')
    assert examine(tmp_path).no_namespaces is None
    put_program("unshare", "echo 'unshare failed: Operation not permitted' >&2; exit 1")
    assert examine(tmp_path).no_namespaces == "unshare failed: Operation not permitted"


def test_user_without_a_name_or_home_is_probed(
    tmp_path: Path, put_program: Callable[[str, str], None]
) -> None:
    """A container that runs as another user's id has no $HOME either."""
    put_program("enroot", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HOME", raising=False)
        patch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
        machine = examine(tmp_path, HOME="")
    assert machine.places["enroot data"].path == "~/.local/share/enroot"


def test_ids_of_a_user_are_those_of_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$USER may name another account: su, sudo and cron set it."""
    me = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: types.SimpleNamespace(pw_name="ada"))
    monkeypatch.setattr(probe, "_read", lambda path: "ada:100000:65536\n")
    assert examine(tmp_path, USER=me).subordinate_ids
    monkeypatch.setattr(probe, "_read", lambda path: f"{me}:100000:65536\n")
    assert not examine(tmp_path, USER=me).subordinate_ids


def test_version_of_the_daemon_is_read(tmp_path: Path, put_program: Callable[[str, str], None]) -> None:
    put_program("docker", "echo 28.2.2")
    assert examine(tmp_path).docker_daemon == "28.2.2"


def test_program_without_an_answer_is_ended(
    tmp_path: Path, put_program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_PATIENCE_SECONDS", 0.2)
    put_program("docker", "exec /bin/sleep 600")
    machine = examine(tmp_path)
    assert machine.docker_daemon == "!no answer within 0.2 s"
    assert machine.tools["docker"] is None


def write_enroot(tmp_path: Path, conf: str) -> None:
    etc = tmp_path / "etc"
    for name in ("hooks.d", "mounts.d", "enroot.conf.d"):
        (etc / name).mkdir(parents=True)
    (etc / "enroot.conf").write_text(conf)
    (etc / "hooks.d" / "98-nvidia.sh").touch()
    (etc / "mounts.d" / "10-system.fstab").write_text("/dev/mqueue /dev/mqueue none x-create=dir,bind,rw\n")
    (tmp_path / "bin" / "enroot").write_text(_ENROOT.format(conf=etc / "enroot.conf"))
    (tmp_path / "bin" / "enroot").chmod(0o755)
    for tool in ("bash", "env", "id"):
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")


def test_configuration_of_enroot_is_read_as_enroot_reads_it(
    tmp_path: Path, put_program: Callable[[str, str], None]
) -> None:
    """Expansions, drop-ins and the user's variables count, and no file is created."""
    text = """\
# ENROOT_DATA_PATH /not/this
ENROOT_RUNTIME_PATH /run/enroot/user-$(id -u)
ENROOT_CACHE_PATH   ${HOME}/cache
ENROOT_DATA_PATH    /tmp/data
ENROOT_SQUASH_OPTIONS -comp lz4 -noD
"""
    write_enroot(tmp_path, text)
    (tmp_path / "etc/enroot.conf.d/10-more.conf").write_text("ENROOT_RESTRICT_DEV=yes\n")
    before = sorted(tmp_path.rglob("*"))
    machine = examine(tmp_path, ENROOT_DATA_PATH=str(tmp_path / "mine"), ENROOT_PASSWORD="sesame")
    assert machine.enroot is not None
    assert (machine.enroot.version, machine.enroot.trouble) == ("3.5.0", None)
    assert machine.enroot.conf == str(tmp_path / "etc/enroot.conf")
    assert machine.enroot.settings == {
        "ENROOT_SQUASH_OPTIONS": "-comp lz4 -noD",
        "ENROOT_RESTRICT_DEV": "yes",
    }
    assert machine.enroot.hooks == ("98-nvidia.sh",)
    assert machine.enroot.binds_mqueue
    user = str(machine.uid)
    assert {name: place.path for name, place in machine.places.items()} == {
        "enroot cache": str(tmp_path / "home/cache"),
        "enroot data": str(tmp_path / "mine"),
        "enroot runtime": f"/run/enroot/user-{user}",
        "enroot temp": "/tmp",
        "temporary": "/tmp",
    }
    assert machine.places["enroot data"].there == str(tmp_path)
    assert machine.places["enroot data"].writable
    assert machine.places["enroot data"].free
    assert sorted(tmp_path.rglob("*")) == before


def test_unreadable_configuration_is_reported(
    tmp_path: Path, put_program: Callable[[str, str], None]
) -> None:
    write_enroot(tmp_path, "ENROOT_DATA_PATH /tmp/data\n")
    (tmp_path / "bin/env").unlink()
    machine = examine(tmp_path)
    assert machine.enroot is not None
    assert "enroot.conf cannot be read" in (machine.enroot.trouble or "")


def test_gpus_and_their_driver_are_read(tmp_path: Path, put_program: Callable[[str, str], None]) -> None:
    put_program(
        "nvidia-smi",
        r"""case "$1" in
--query-gpu=*) printf '550.54.15, NVIDIA H100 80GB HBM3\n550.54.15, NVIDIA H100 80GB HBM3\n';;
*) echo '| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |';;
esac""",
    )
    gpus = examine(tmp_path).gpus
    assert gpus is not None
    assert (gpus.driver, gpus.cuda, gpus.trouble) == ("550.54.15", "12.4", None)
    assert gpus.names == ("NVIDIA H100 80GB HBM3",) * 2


def test_error_of_nvidia_smi_is_reported(tmp_path: Path, put_program: Callable[[str, str], None]) -> None:
    put_program("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    gpus = examine(tmp_path).gpus
    assert gpus is not None
    assert (gpus.driver, gpus.trouble) == (
        None,
        "Failed to initialize NVML: Driver/library version mismatch",
    )


@pytest.mark.parametrize("included", [False, True])
def test_line_of_pyxis_is_read_from_plugstack_conf(tmp_path: Path, included: bool) -> None:
    plugin = tmp_path / "spank_pyxis.so"
    line = f"# required other\nrequired {plugin} runtime_path=/run/me use_squashfuse=1 # mine\n"
    stack, folder = tmp_path / "plugstack.conf", tmp_path / "plugstack.conf.d"
    folder.mkdir()
    stack.write_text("include plugstack.conf.d/*.conf\n" if included else line)
    place = folder / "pyxis.conf" if included else stack
    place.write_text(line)
    plugstack = examine(tmp_path, SLURM_CONF=str(tmp_path / "slurm.conf")).plugstack
    assert (plugstack.at, plugstack.plugin, plugstack.there) == (f"{place}:2", str(plugin), False)
    assert plugstack.options == {"runtime_path": "/run/me", "use_squashfuse": "1"}
    plugin.touch()
    request: dict[str, Any] = {"plugstack": {"slurm": str(stack)}}
    assert examine(tmp_path, request).plugstack.there is True


def test_circular_includes_end(tmp_path: Path) -> None:
    (tmp_path / "plugstack.conf").write_text(
        "include plugstack.conf\ninclude nowhere/*\noptional /x/other.so\n"
    )
    plugstack = examine(tmp_path, SLURM_CONF=str(tmp_path / "slurm.conf")).plugstack
    assert (plugstack.at, plugstack.there, plugstack.options) == (None, None, {})
