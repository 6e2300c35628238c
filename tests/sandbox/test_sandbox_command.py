"""`slipway sandbox` without a Slurm: its messages when something is missing or down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher import file_systems
from launcher.cli import sandbox as verb
from launcher.cli.app import VerbParser
from launcher.errors import UserError
from launcher.sandbox import prerequisites
from launcher.sandbox.lifecycle import down, mounts_under, up
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.state import Process, load, locked
from tests.sandbox.fixtures import write_and_read


def run(*arguments: str) -> int:
    """Run `slipway sandbox ...` as the command does, errors aside."""
    parser = VerbParser(prog="slipway")
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["sandbox", *arguments])
    return int(args.run(args) or 0)


def test_status_without_a_sandbox_is_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--dir", str(tmp_path)) == 3
    assert capsys.readouterr().out == f"down: no sandbox in {tmp_path}\n"
    assert run("status", "--json", "--dir", str(tmp_path)) == 3
    assert json.loads(capsys.readouterr().out)["phase"] == "down"


def test_env_without_a_sandbox_prints_nothing_for_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("env", "--dir", str(tmp_path)) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"the sandbox in {tmp_path} is down" in printed.err


def test_down_without_a_sandbox_leaves_the_directory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    assert run("down", "--dir", str(tmp_path)) == 0
    assert "nothing to stop" in capsys.readouterr().out
    assert (tmp_path / "precious").exists()
    assert run("down", "--dir", str(tmp_path / "absent")) == 0


def test_the_environment_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_SANDBOX_DIR", str(tmp_path))
    assert run("status") == 3
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["up", "down", "status", "env"])
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(name, "--help")
    assert raised.value.code == 0
    help_text = capsys.readouterr().out
    assert "examples:\n" in help_text
    assert "exit code:\n" in help_text


def test_up_without_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="needs root") as error:
        up(SandboxOptions(directory=tmp_path / "sandbox"))
    assert "cluster=local" in str(error.value)
    assert not (tmp_path / "sandbox").exists()


def test_missing_programs_are_named_with_the_line_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(prerequisites, "_SYSTEM_FOLDERS", "")
    for name in ("unshare", "setpriv", "mount", "hostname", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(UserError, match=r"not installed: slurmctld, slurmd, .*munged\n") as error:
        prerequisites.check_programs(accounting=False)
    assert "srun" not in error.value.message
    assert "apt-get install --no-install-recommends slurm-wlm munge\n" in str(error.value)
    with pytest.raises(UserError, match="slurmdbd") as error:
        prerequisites.check_programs(accounting=True)
    assert " slurm-wlm munge slurmdbd " in str(error.value)
    assert " mariadb-server\n" in str(error.value)


def test_a_missing_database_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "find_program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(prerequisites, "_DEBIAN_PLUGINS", str(tmp_path.relative_to("/")))
    monkeypatch.setattr(prerequisites, "Path", lambda _: Path("/"))
    with pytest.raises(UserError, match="accounting_storage_mysql") as error:
        prerequisites.check_programs(accounting=True)
    assert "recommends slurm-wlm-mysql-plugin\n" in str(error.value)
    (tmp_path / "accounting_storage_mysql.so").touch()
    prerequisites.check_programs(accounting=True)


def test_a_container_without_rights_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unshare").write_text(
        "#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n"
    )
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UserError, match="Operation not permitted") as error:
        prerequisites.check_namespaces()
    assert "SYS_ADMIN and SETGID" in str(error.value)


@pytest.mark.parametrize(
    ("printed", "version"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.5", (24, 11)), ("slurm 26.05.0-0rc1", (26, 5))],
)
def test_the_version_of_slurm_is_read(
    printed: str, version: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_slurmctld(tmp_path, monkeypatch, printed)
    assert prerequisites.slurm_version() == version


def test_a_slurmctld_without_a_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_slurmctld(tmp_path, monkeypatch, "slurm")
    with pytest.raises(UserError, match="slurmctld -V printed no version: 'slurm'"):
        prerequisites.slurm_version()


def install_slurmctld(folder: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    """Put a slurmctld on the PATH that only prints its version."""
    (folder / "slurmctld").write_text(f"#!/bin/sh\necho '{printed}'\n")
    (folder / "slurmctld").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sandbox.json").write_text('{"version": 99}')
    with pytest.raises(UserError, match="not the record of a sandbox"):
        load(tmp_path)
    with pytest.raises(UserError, match="not the record of a sandbox"):
        down(tmp_path)
    assert (tmp_path / "sandbox.json").exists()


def test_a_record_without_a_directory_is_refused(tmp_path: Path) -> None:
    write_and_read(SandboxOptions(tmp_path))
    path = tmp_path / "sandbox.json"
    record = json.loads(path.read_text())
    del record["options"]["directory"]
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"not the record of a sandbox.*directory"):
        load(tmp_path)


def test_fields_of_daemons_that_a_later_version_records_are_ignored(tmp_path: Path) -> None:
    write_and_read(SandboxOptions(tmp_path))
    path = tmp_path / "sandbox.json"
    daemons = {"munged": {"pid": 1, "start_time": 2, "binary": "/usr/sbin/munged"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "daemons": daemons}))
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.daemons == {"munged": Process(1, 2)}


def test_a_directory_has_one_lock_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_mounts_are_found() -> None:
    assert Path("/proc") in mounts_under(Path("/"))
    assert mounts_under(Path("/nowhere")) == []


def test_mounts_that_cannot_be_read_are_no_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "no-such-file")
    with pytest.raises(FileNotFoundError):
        mounts_under(tmp_path)
