"""The configuration of a sandbox with Pyxis, and its messages where a part is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import sandbox as verb
from launcher.cli.app import VerbParser
from launcher.errors import UserError
from launcher.sandbox import configuration, prerequisites
from launcher.sandbox.options import SandboxOptions, SandboxPaths
from tests.sandbox.fixtures import write_and_read

_PLUGIN = Path("/opt/site/lib/slurm/spank_pyxis.so")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH; the machine's own Pyxis is hidden too."""
    folder = tmp_path / "site" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("launcher.sandbox.prerequisites._SYSTEM_FOLDERS", "")
    monkeypatch.setattr(prerequisites, "_FOLDERS", (f"{tmp_path}/usual/*/slurm",))
    return folder


def add_programs(folder: Path, *names: str, text: str = "") -> None:
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def write_plugin(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / prerequisites.PLUGIN).write_bytes(b"\x7fELF, say")
    return folder / prerequisites.PLUGIN


def test_without_pyxis_no_plugin_is_loaded() -> None:
    assert configuration.plugstack_conf(SandboxOptions(directory=Path("/srv/sandbox"))) == ""


def test_pyxis_and_enroot_keep_files_of_a_node_in_its_own_folder() -> None:
    options = SandboxOptions(directory=Path("/srv/sandbox"), pyxis=_PLUGIN)
    node_folder = "/srv/sandbox/containers/own"
    assert configuration.plugstack_conf(options) == f"required {_PLUGIN} runtime_path={node_folder}/pyxis\n"
    machine = "ENROOT_DATA_PATH /raid/$(id -u)\nENROOT_REMAP_ROOT yes"
    lines = configuration.enroot_conf(SandboxPaths(options.directory), machine).splitlines()
    # Enroot takes the first of two values.
    assert lines.index(f"ENROOT_DATA_PATH {node_folder}/data-$(id -u)") < lines.index(
        "ENROOT_DATA_PATH /raid/$(id -u)"
    )
    assert f"ENROOT_RUNTIME_PATH {node_folder}/runtime-$(id -u)" in lines
    assert lines[-1] == "ENROOT_REMAP_ROOT yes"


def test_the_record_of_a_sandbox_knows_its_plugin(tmp_path: Path) -> None:
    options = SandboxOptions(directory=tmp_path, pyxis=_PLUGIN)
    assert write_and_read(options) == options
    assert write_and_read(SandboxOptions(directory=tmp_path), lacking="pyxis").pyxis is None
    assert options.differences(SandboxOptions(directory=tmp_path)) == [f"pyxis {_PLUGIN}, requested none"]
    with pytest.raises(UserError, match="cannot quote a path"):
        SandboxOptions(pyxis=Path("/opt/my site/spank_pyxis.so"))


def test_the_plugin_is_found_beside_enroot_before_the_usual_places(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Pyxis is not installed: spank_pyxis\.so is in none of") as error:
        prerequisites.find_plugin()
    assert f"{tmp_path}/usual/*/slurm" in error.value.message
    assert "slipway sandbox up --pyxis /path/to/spank_pyxis.so" in str(error.value)
    usual = write_plugin(tmp_path / "usual/x86_64-linux-gnu/slurm")
    assert prerequisites.find_plugin() == usual
    add_programs(programs, "enroot")
    assert prerequisites.find_plugin() == usual
    beside = write_plugin(tmp_path / "site/lib/slurm")
    assert prerequisites.find_plugin() == beside


def test_missing_parts_for_containers_are_named_with_the_next_step(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        prerequisites.check_containers(tmp_path / "spank_pyxis.so")
    (tmp_path / "spank_pyxis.so").write_text("not it")
    with pytest.raises(UserError, match="is not a shared library"):
        prerequisites.check_containers(tmp_path / "spank_pyxis.so")
    elsewhere = write_plugin(tmp_path / "elsewhere/lib/slurm")
    with pytest.raises(UserError, match="not installed: enroot") as error:
        prerequisites.check_containers(elsewhere)
    assert "docs/pyxis.md" in str(error.value)
    (tmp_path / "elsewhere/bin").mkdir()
    add_programs(tmp_path / "elsewhere/bin", "enroot")
    with pytest.raises(UserError, match="not installed: enroot") as error:
        prerequisites.check_containers(elsewhere)
    assert f'export PATH="{tmp_path}/elsewhere/bin:$PATH"' in str(error.value)
    add_programs(programs, "enroot", "awk", "getent")
    with pytest.raises(UserError, match="not installed: unsquashfs, pwck") as error:
        prerequisites.check_containers(elsewhere)
    assert "apt-get install --no-install-recommends squashfs-tools passwd" in str(error.value)
    add_programs(programs, "unsquashfs", "pwck")
    add_programs(programs, "unshare", text="echo 'unshare failed: Operation not permitted' >&2; exit 1")
    with pytest.raises(
        UserError, match="Enroot cannot create a user namespace on this machine: unshare failed"
    ) as error:
        prerequisites.check_containers(elsewhere)
    assert "user.max_user_namespaces" in str(error.value)
    add_programs(programs, "unshare", text="exit 0")
    prerequisites.check_containers(elsewhere)


def test_enroot_is_asked_for_its_configuration_and_leaves_nothing_at_home(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # Enroot does this at every call.
    mkdir = (
        '/bin/mkdir -p "${ENROOT_DATA_PATH:-$HOME/.local/share/enroot}" "${ENROOT_CACHE_PATH:-$HOME/.cache}"'
    )
    add_programs(programs, "enroot", text=f'{mkdir}; echo "Config file: {tmp_path}/enroot.conf"')
    with pytest.raises(UserError, match="names no configuration file that exists") as error:
        prerequisites.site_configuration()
    assert f"Config file: {tmp_path}/enroot.conf" in error.value.message
    (tmp_path / "enroot.conf").touch()
    assert prerequisites.site_configuration() == tmp_path / "enroot.conf"
    assert not (tmp_path / "home").exists()


def test_the_verb_looks_for_the_plugin_or_takes_a_file(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[SandboxOptions] = []

    def up(options: SandboxOptions, reporter: object) -> None:
        calls.append(options)
        raise UserError("not now")

    monkeypatch.setattr("launcher.sandbox.lifecycle.up", up)
    beside = write_plugin(tmp_path / "usual/lib/slurm")
    parser = VerbParser(prog="slipway")
    verb.add_parser(parser.add_subparsers())
    for words in ([], ["--pyxis"], ["--pyxis", "mine.so"]):
        args = parser.parse_args(["sandbox", "up", "--dir", str(tmp_path), *words])
        with pytest.raises(UserError, match="not now"):
            args.run(args)
    assert [options.pyxis for options in calls] == [None, beside, Path.cwd() / "mine.so"]
