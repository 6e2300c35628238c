"""The probe, on programs and files that the tests make: what it asks, and that nothing stops it."""

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
def programs(tmp_path: Path) -> Callable[[str, str], None]:
    """Makes a program in the one directory in which programs are looked for."""
    (tmp_path / "bin").mkdir()

    def make(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return make


def look(tmp_path: Path, asked: dict[str, dict[str, str]] | None = None, **variables: str) -> Machine:
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **variables}
    return machine_of(probe.gather(asked or {}, environment))


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
    found = look(tmp_path)
    assert (found.tools, found.enroot, found.gpus, found.docker_daemon) == ({}, None, None, None)
    assert found.places["temporary"].path == "/tmp"


def test_versions_and_compressors_are_read(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    programs("skopeo", "echo skopeo version 1.18.0-dev commit: 1.2.3")
    programs("unsquashfs", "echo 'unsquashfs version 4.6.1 (2023/03/25)'; exit 1")
    programs(
        "mksquashfs", r"""printf 'SYNTAX: x\n\tCompressors available:\n\t\t\tgzip (default)\n\t\t\tzstd\n'"""
    )
    programs("umoci", "exit 1")
    programs(
        "docker", 'case "$1" in version) echo Cannot connect >&2; exit 1;; *) echo Docker version 28.2;; esac'
    )
    found = look(tmp_path)
    assert found.tools["skopeo"] == "1.18.0-dev"
    assert found.tools["unsquashfs"] == "4.6.1"
    assert found.tools["umoci"] is None
    assert found.compressors == ("gzip", "zstd")
    assert found.docker_daemon == "!Cannot connect"


def test_namespaces_are_tried(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    assert look(tmp_path).no_namespaces is None
    programs("unshare", '[ "$*" = "--user --map-root-user --mount $0 --version" ]')
    assert look(tmp_path).no_namespaces is None
    programs("unshare", "echo 'unshare failed: Operation not permitted' >&2; exit 1")
    assert look(tmp_path).no_namespaces == "unshare failed: Operation not permitted"


def test_user_without_a_name_or_home_is_probed(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    """Nor $HOME, as in a container of another user's id."""
    programs("enroot", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HOME", raising=False)
        patch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
        found = look(tmp_path, HOME="")
    assert found.places["enroot data"].path == "~/.local/share/enroot"


def test_ids_of_a_user_are_those_of_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$USER is what su, sudo and cron make of it."""
    me = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: types.SimpleNamespace(pw_name="ada"))
    monkeypatch.setattr(probe, "_read", lambda path: "ada:100000:65536\n")
    assert look(tmp_path, USER=me).subordinate_ids
    monkeypatch.setattr(probe, "_read", lambda path: f"{me}:100000:65536\n")
    assert not look(tmp_path, USER=me).subordinate_ids


def test_version_of_the_daemon_is_read(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    programs("docker", "echo 28.2.2")
    assert look(tmp_path).docker_daemon == "28.2.2"


def test_program_without_an_answer_is_ended(
    tmp_path: Path, programs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_PATIENCE_SECONDS", 0.2)
    programs("docker", "exec /bin/sleep 600")
    found = look(tmp_path)
    assert found.docker_daemon == "!no answer within 0.2 s"
    assert found.tools["docker"] is None


def enroot(tmp_path: Path, conf: str) -> None:
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
    tmp_path: Path, programs: Callable[[str, str], None]
) -> None:
    """With expansions, drop-ins, and what the user's environment has instead; and nothing is made."""
    text = """\
# ENROOT_DATA_PATH /not/this
ENROOT_RUNTIME_PATH /run/enroot/user-$(id -u)
ENROOT_CACHE_PATH   ${HOME}/cache
ENROOT_DATA_PATH    /tmp/data
ENROOT_SQUASH_OPTIONS -comp lz4 -noD
"""
    enroot(tmp_path, text)
    (tmp_path / "etc/enroot.conf.d/10-more.conf").write_text("ENROOT_RESTRICT_DEV=yes\n")
    before = sorted(tmp_path.rglob("*"))
    found = look(tmp_path, ENROOT_DATA_PATH=str(tmp_path / "mine"), ENROOT_PASSWORD="sesame")
    assert found.enroot is not None
    assert (found.enroot.version, found.enroot.trouble) == ("3.5.0", None)
    assert found.enroot.conf == str(tmp_path / "etc/enroot.conf")
    assert found.enroot.settings == {
        "ENROOT_SQUASH_OPTIONS": "-comp lz4 -noD",
        "ENROOT_RESTRICT_DEV": "yes",
    }
    assert found.enroot.hooks == ("98-nvidia.sh",)
    assert found.enroot.binds_mqueue
    user = str(found.uid)
    assert {name: place.path for name, place in found.places.items()} == {
        "enroot cache": str(tmp_path / "home/cache"),
        "enroot data": str(tmp_path / "mine"),
        "enroot runtime": f"/run/enroot/user-{user}",
        "enroot temp": "/tmp",
        "temporary": "/tmp",
    }
    assert found.places["enroot data"].there == str(tmp_path)
    assert found.places["enroot data"].writable
    assert found.places["enroot data"].free
    assert sorted(tmp_path.rglob("*")) == before


def test_unreadable_configuration_is_reported(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    enroot(tmp_path, "ENROOT_DATA_PATH /tmp/data\n")
    (tmp_path / "bin/env").unlink()
    found = look(tmp_path)
    assert found.enroot is not None
    assert "enroot.conf cannot be read" in (found.enroot.trouble or "")


def test_gpus_and_their_driver_are_read(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    programs(
        "nvidia-smi",
        r"""case "$1" in
--query-gpu=*) printf '550.54.15, NVIDIA H100 80GB HBM3\n550.54.15, NVIDIA H100 80GB HBM3\n';;
*) echo '| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |';;
esac""",
    )
    found = look(tmp_path).gpus
    assert found is not None
    assert (found.driver, found.cuda, found.trouble) == ("550.54.15", "12.4", None)
    assert found.names == ("NVIDIA H100 80GB HBM3",) * 2


def test_error_of_nvidia_smi_is_reported(tmp_path: Path, programs: Callable[[str, str], None]) -> None:
    programs("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = look(tmp_path).gpus
    assert found is not None
    assert (found.driver, found.trouble) == (
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
    found = look(tmp_path, SLURM_CONF=str(tmp_path / "slurm.conf")).plugstack
    assert (found.at, found.plugin, found.there) == (f"{place}:2", str(plugin), False)
    assert found.options == {"runtime_path": "/run/me", "use_squashfuse": "1"}
    plugin.touch()
    asked: dict[str, Any] = {"plugstack": {"slurm": str(stack)}}
    assert look(tmp_path, asked).plugstack.there is True


def test_circular_includes_end(tmp_path: Path) -> None:
    (tmp_path / "plugstack.conf").write_text(
        "include plugstack.conf\ninclude nowhere/*\noptional /x/other.so\n"
    )
    found = look(tmp_path, SLURM_CONF=str(tmp_path / "slurm.conf")).plugstack
    assert (found.at, found.there, found.options) == (None, None, {})
