"""File systems: how much room there is, by their own count and by quota, and which of them nodes share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from launcher import file_systems as systems
from launcher.checks.findings import Severity
from tests.checks.path_jobs import (
    LOCAL,
    PREFIX,
    SLURM,
    TOKENIZER,
    facts_with,
    path_findings,
    path_problems,
    set_mounts,
)
from tests.checks.shelves import DISK, NFS

pytestmark = pytest.mark.usefixtures("workdir")


class _Disk:
    f_frsize, f_blocks, f_bavail, f_files, f_favail, f_flag = 4096, 2000, 1000, 50, 7, 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"f_bavail": 0}, "no space left on device"),
        ({"f_favail": 0}, "no space left on device"),
        ({"f_files": 0, "f_favail": 0}, None),
        ({"f_blocks": 0, "f_bavail": 0}, None),
        ({"f_flag": os.ST_RDONLY}, "read-only file system"),
    ],
)
def test_full_and_read_only_file_systems_are_reported(
    changes: dict[str, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: Any = type("Disk", (_Disk,), changes)
    monkeypatch.setattr("os.statvfs", lambda path: disk)
    assert [finding.message.rpartition(": ")[2] for finding in path_findings(*SLURM)] == (
        [why] if why else []
    )


# --- how much room there is


def write_program(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_room_is_that_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    facts = facts_with(*SLURM)
    assert (facts.free_bytes, facts.free_by) == (4096 * 1000, "file system")


def test_a_file_system_that_counts_no_blocks_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: type("Disk", (_Disk,), {"f_blocks": 0, "f_bavail": 0}))
    facts = facts_with(*SLURM)
    assert facts.free_bytes is None
    assert "free_bytes" in facts.missing


def test_group_quota_of_new_files_counts(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    table = "".join(
        f"Disk quotas for {owner}: \\n Filesystem blocks quota limit grace files\\n"
        f" server:/export {used} 0 1000 0 1 0 0 0\\n"
        for owner, used in (
            ("user me (uid 7)", 10),
            (f"group other (gid {os.getgid() + 1})", 1000),
            (f"group mine (gid {os.getgid()})", 400),
        )
    )
    write_program(tmp_path, "quota", f"echo >> {tmp_path}/asked; printf '{table}'")
    for _ in range(2):
        facts = facts_with(*SLURM)
        assert (facts.free_bytes, facts.free_by) == (600 * 1024, "quota")
    assert (tmp_path / "asked").read_text() == "\n"  # the points of a sweep ask once


@pytest.mark.parametrize(
    ("row", "free_bytes"),
    [
        ("server:/export 900 0 1000 0 1 0 0 0", 100 * 1024),
        ("server:/export 900 950 0 0 1 0 0 0", 50 * 1024),
        ("server:/export 1100* 950 1000 none 1 0 0 0", 0),
        ("server:/export 900 0 0 0 1 0 0 0", None),
        ("/dev/other 900 0 1000 0 1 0 0 0", None),
        ("none", None),
    ],
)
def test_quota_may_leave_less_than_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, free_bytes: int | None
) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    table = f"Disk quotas for user me (uid 7): \\n Filesystem blocks quota limit grace files\\n {row}\\n"
    write_program(tmp_path, "quota", f"printf '{table}'; exit 1")
    facts = facts_with(*SLURM)
    expected = (4096 * 1000, "file system") if free_bytes is None else (free_bytes, "quota")
    assert (facts.free_bytes, facts.free_by) == expected


def test_quota_of_lustre_is_read_by_lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    set_mounts(monkeypatch, tmp_path, NFS.replace("nfs4 server:/export", "lustre 10.0.0.1@tcp:/fsx"))
    say = 'case "$3" in -u) echo "/ 5 0 0 - 1 0 0 -" ;; -g) printf "/\\n  400 0 700 - 1 0 0 -\\n" ;; esac'
    write_program(tmp_path, "lfs", f'[ "$1 $2 $5" = "quota -q /" ] && {say}')
    facts = facts_with(*SLURM)
    assert (facts.free_bytes, facts.free_by) == (300 * 1024, "quota")


def test_a_quota_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    monkeypatch.setattr(systems, "_QUOTA_PATIENCE_SECONDS", 0.05)
    write_program(tmp_path, "quota", "exec /bin/sleep 600")
    assert facts_with(*SLURM).free_by == "file system"


# --- what nodes share


def test_disks_of_this_machine_are_not_shared(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mounts(monkeypatch, tmp_path, DISK)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    results, inputs = path_findings(*SLURM)
    assert {(finding.id, finding.severity) for finding in (results, inputs)} == {
        ("path.shared", Severity.WARNING)
    }
    assert results.message == (
        f"base_results_dir='{workdir}/results': it is on a local file system of this machine"
        " (ext4, mounted at /); the job's 8 nodes write to this directory together"
    )
    assert inputs.key == PREFIX
    assert inputs.also == (f"{TOKENIZER}.vocab_file", f"{TOKENIZER}.merge_file")
    assert "each of the job's 8 nodes must have it; likewise " in inputs.message


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.trainer.num_nodes=1",),
        ("cluster=sandbox", "cluster.gpus_per_node=8"),
        LOCAL,
    ],
    ids=["one node", "sandbox", "local"],
)
def test_nothing_need_be_shared_if_this_machine_is_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    set_mounts(monkeypatch, tmp_path, DISK)
    assert path_problems("training=gpt3/126m", *overrides) == []


def test_directories_that_this_machine_exports_are_shared(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mounts(monkeypatch, tmp_path, DISK)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    (tmp_path / "exports").write_text(f"# ours\n{workdir} *(rw)\n")
    assert path_problems(*SLURM) == []


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("9 1 0:9 / {here} rw - nfs4 s:/x rw\n", None),
        ("9 1 0:9 / {here} rw - tmpfs tmpfs rw\n", "tmpfs"),
        ("9 1 0:9 / {here} rw - lustre fsx rw\n9 1 0:9 / {here} rw - xfs /dev/sdb rw\n", "xfs"),
        ("9 1 0:9 / {here}x rw - tmpfs tmpfs rw\n9 1 0:9 / {here} rw - fuse.s3fs s3fs rw\n", None),
    ],
)
def test_innermost_and_latest_mount_counts(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, kind: str | None
) -> None:
    set_mounts(monkeypatch, tmp_path, DISK + lines.format(here=workdir))
    mount = systems.find_local_mount(workdir / "not" / "yet" / "there")
    assert (mount.kind if mount is not None else None) == kind


def test_names_with_blanks_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "a b"
    directory.mkdir()
    set_mounts(monkeypatch, tmp_path, f"{DISK}9 1 0:9 / {tmp_path}/a\\040b rw - beegfs b rw\n")
    assert systems.find_local_mount(directory) is None
    assert systems.find_local_mount(tmp_path) is not None


def test_unknown_mounts_skip_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "MOUNTS", tmp_path / "no-such-file")
    (finding,) = path_findings(*SLURM)
    assert (finding.id, finding.severity) == ("path.shared", Severity.SKIPPED)
    assert "the file systems of this machine are unknown" in finding.message
