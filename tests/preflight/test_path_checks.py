"""Files and directories of a job: what this machine has of them, and what is told where it lacks some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from launcher.config.many import Sweep
from launcher.drafting import Draft, Request, draft, drafts
from launcher.errors import Mistakes
from launcher.inspection import file_systems as systems
from launcher.inspection import inspect_draft, refuse
from launcher.inspection.images import why_not_squashfs
from launcher.inspection.indexed_data import why_no_data_set
from launcher.inspection.paths import path_facts
from launcher.preflight.asking import run_checks
from launcher.preflight.facts import Facts
from launcher.preflight.findings import Finding, Severity
from launcher.preflight.path_facts import PathFacts
from launcher.rendering.render import Rendered
from launcher.stages.planning import plan_launch
from tests.preflight.shelves import DISK, NFS, SQUASHFS, SQUASHFS_SIZE, data_set, image, index, stock

SLURM = ("training=gpt3/126m", "cluster=bcm")
BARE = (*SLURM, "container=null")
LOCAL = ("training=gpt3/tiny", "cluster=local")
MOCK = "training.model.data.data_impl=mock"
PREFIX = "training.model.data.data_prefix"
TOKENIZER = "training.model.tokenizer"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a file system that machines share, with what a GPT needs, and no quota."""
    directory = tmp_path / "shared"
    directory.mkdir()
    stock(directory / "data")
    mounts(monkeypatch, tmp_path, NFS)
    monkeypatch.setattr(systems, "EXPORTS", (tmp_path / "exports",))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(directory)
    return directory


def mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "mountinfo").write_text(text)
    monkeypatch.setattr(systems, "MOUNTS", tmp_path / "mountinfo")


# Composes each of many configurations from what it has parsed.
TREE = Sweep(())


def drafted(*overrides: str) -> Draft:
    composition = TREE.compose((f"launcher_scripts_path={Path.cwd()}", *overrides))
    plan = plan_launch(composition.config, number=1, tag="tag")
    return Draft(composition, plan, Rendered("", "", None, "", "", ""))  # no check reads a script


def facts(*overrides: str) -> PathFacts:
    return path_facts(drafted(*overrides))


def found(*overrides: str) -> list[Finding]:
    """What the checks of paths find."""
    return found_in(drafted(*overrides))


def found_in(made: Draft) -> list[Finding]:
    findings = run_checks(made.plan, Facts(paths=path_facts(made)))
    return [one for one in findings if one.id.startswith("path.")]


def told(*overrides: str) -> list[tuple[str, str, str]]:
    return [(one.id, one.severity.value, one.message) for one in found(*overrides)]


@pytest.mark.parametrize("job", [SLURM, LOCAL, (*SLURM, MOCK)], ids=["slurm", "local", "mock"])
def test_nothing_is_found_where_all_is_there(job: tuple[str, ...]) -> None:
    assert told(*job) == []


def test_a_dry_run_looks_at_no_paths(here: Path) -> None:
    (here / "data/bpe/vocab.json").unlink()
    made = draft(Request(overrides=(*SLURM, "engine=nemo"), command=[]))
    looked = {look: [one.id for one in inspect_draft(made, (), look=look)] for look in (True, False)}
    assert "path.tokenizer" in looked[True]
    assert not any(name.startswith("path.") for name in looked[False])


# --- the tokenizer


def test_tokenizer_files_that_are_not_there(here: Path) -> None:
    (here / "data/bpe/merges.txt").rename(here / "data/bpe/merge.txt")
    (here / "data/bpe/vocab.txt").unlink()
    (one,) = found(*SLURM)
    path = here / "data/bpe/merges.txt"
    assert (one.id, one.severity, one.key) == ("path.tokenizer", Severity.ERROR, f"{TOKENIZER}.merge_file")
    assert one.message == f"{TOKENIZER}.merge_file='{path}': there is no such file"
    assert one.fix is not None
    assert one.fix.splitlines() == [
        f"in {path.parent}: merge.txt",
        "`slipway data tokenize` writes vocab.json and merges.txt",
    ]


def test_where_the_directory_is_not_here_the_nodes_may_have_it() -> None:
    (one,) = found(*BARE, f"{TOKENIZER}.vocab_file=/no/such/vocab.json")
    assert one.severity is Severity.WARNING
    assert one.message.endswith("there is no such file on this machine; every node must have it")
    (one,) = found(*LOCAL, f"{TOKENIZER}.vocab_file=/no/such/vocab.json")
    assert one.severity is Severity.ERROR
    assert one.message.endswith("there is no such file")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "an empty file"),
        ("version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS's"),
        ("<html>not found</html>", "it does not begin with {"),
    ],
)
def test_tokenizer_files_that_are_something_else(here: Path, content: str, why: str) -> None:
    (here / "data/bpe/vocab.json").write_text(content)
    (one,) = found(*SLURM)
    assert one.severity is Severity.ERROR
    assert why in one.message


def test_each_kind_of_tokenizer_has_files_of_its_own(here: Path) -> None:
    pieces = "training=llama/llama2_7b", "cluster=bcm"
    (one,) = found(*pieces)
    assert one.key == f"{TOKENIZER}.model"
    (here / "data/llama").mkdir()
    (here / "data/llama/llama_tokenizer.model").write_bytes(b"\n\x0e")
    assert told(*pieces) == []
    # A name on the hub is no path; a whole path is a directory.
    hub = "training=llama/llama3_8b", "cluster=bcm"
    assert told(*hub) == []
    (one,) = found(*hub, f"{TOKENIZER}.type={here}/data/llama3")
    assert one.message == f"{TOKENIZER}.type='{here}/data/llama3': there is no such directory"
    (here / "data/llama3").mkdir()
    assert told(*hub, f"{TOKENIZER}.type={here}/data/llama3") == []
    words = "training=t5/220m", "cluster=bcm"
    assert told(*words) == []
    (here / "data/bpe/vocab.txt").unlink()
    assert [one.key for one in found(*words)] == [f"{TOKENIZER}.vocab_file"]


def test_mock_data_need_no_tokenizer_of_our_trainer(here: Path) -> None:
    (here / "data/bpe/vocab.json").unlink()
    assert told(*LOCAL, MOCK) == []
    (one,) = found(*SLURM, MOCK, "engine=nemo", "container=nvcr.io#nvidia/nemo:24.07")
    assert one.key == f"{TOKENIZER}.vocab_file"


def test_our_trainer_downloads_no_tokenizer(here: Path) -> None:
    assert [one.message for one in found(*LOCAL, f"{TOKENIZER}.merge_file=null")] == [
        f"{TOKENIZER}.merge_file='null': it is not set"
    ]
    nemo = (*SLURM, "engine=nemo", "container=nvcr.io#nvidia/nemo:24.07")
    assert told(*nemo, f"{TOKENIZER}.merge_file=null") == []


def test_the_same_mistake_is_told_once(here: Path) -> None:
    (here / "data/bpe").rename(here / "data/bpe2")
    (one,) = found(*SLURM)
    assert one.key == f"{TOKENIZER}.vocab_file"
    assert one.also == (f"{TOKENIZER}.merge_file",)
    assert one.message.endswith(f"every node must have it; likewise {TOKENIZER}.merge_file")


# --- the data


def test_data_that_are_not_there(here: Path) -> None:
    data_set(here / "data/other")
    (here / "data/other.bin").unlink()
    prefixes = f"{PREFIX}=[0.5, {here}/data/othr, 0.5, {here}/data/other]"
    first, second = found(*SLURM, prefixes)
    assert {one.id for one in (first, second)} == {"path.data"}
    assert first.message == f"{PREFIX}='{here}/data/othr': its .bin and .idx: there is no such file"
    assert first.fix is not None
    assert f"in {here}/data: other.idx" in first.fix
    assert second.message == f"{PREFIX}='{here}/data/other': its .bin: there is no such file"
    (one,) = found(*SLURM, f"{PREFIX}=[{here}/data/corpus_text_document.bin]")
    assert one.fix == "without the suffix: a prefix names both files"


def test_of_many_that_are_not_there_some_are_named(here: Path) -> None:
    names = ",".join(f"{here}/data/part{number}" for number in range(5))
    (one,) = found(*SLURM, f"{PREFIX}=[{names}]")
    assert one.message == (
        f"{PREFIX}='{here}/data/part0': its .bin and .idx: there is no such file;"
        f" likewise {here}/data/part1, {here}/data/part2 and 2 more"
    )


def test_data_of_each_split_are_looked_for(here: Path) -> None:
    both = f"+{PREFIX}={{train: [{here}/data/corpus_text_document], validation: [{here}/data/held]}}"
    (one,) = found(*SLURM, f"~{PREFIX}", both)
    assert one.key == f"{PREFIX}.validation"


def test_a_relative_path_means_another_place_in_the_job(here: Path) -> None:
    (one,) = found(*LOCAL, f"{PREFIX}=[data/corpus_text_document]")
    assert one.severity is Severity.ERROR
    assert one.message.endswith("a whole path is needed: the job starts elsewhere")
    assert one.fix == f"by its whole path: {here}/data/corpus_text_document"


def test_a_bin_that_does_not_go_with_its_idx(here: Path) -> None:
    (here / "data/corpus_text_document.bin").write_bytes(bytes(10))
    (one,) = found(*SLURM)
    assert one.severity is Severity.ERROR
    assert one.message.endswith("its .idx tells of 14 bytes of tokens, its .bin has 10")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (index([3, 4]), None),
        (index([3, 4]) + bytes(2), None),  # with the kind of each sequence
        (index([2, 1], code=4), "its .idx tells of 12 bytes of tokens, its .bin has 14"),
        (b"", "an empty file"),
        (b"TNTIDX\x00\x00" + bytes(40), "an older format"),
        (b"no index", "does not begin with MMIDIDX"),
        (index([3, 4])[:20], "cut short"),
        (index([3, 4])[:-1], "cut short: 81 bytes of 82"),
        (index([3, 4]) + bytes(1), "has 83 bytes, and should have 82"),
        (index([3, 4], version=2), "version 2"),
        (index([3, 4]).replace(b"\x08", b"\x0b", 1), "type 11"),
        (index([]), "no documents"),
    ],
)
def test_an_index_and_its_tokens(tmp_path: Path, content: bytes, why: str | None) -> None:
    path = tmp_path / "x.idx"
    path.write_bytes(content)
    said = why_no_data_set(path, 14)
    assert (said is None) if why is None else (said is not None and why in said)


def test_what_an_earlier_stage_makes_is_not_missed(here: Path) -> None:
    overrides = [
        "stages=[data_preparation,training]",
        f"data_preparation.inputs=[{here}]",
        *SLURM,
        "data_preparation.output_prefix=${data_dir}/new",
        "data_preparation.tokenizer_dir=${data_dir}/made",
        f"{PREFIX}=[${{data_dir}}/new]",
        f"{TOKENIZER}.vocab_file=${{data_dir}}/made/vocab.json",
        f"{TOKENIZER}.merge_file=${{data_dir}}/made/merges.txt",
    ]
    for made in drafts(Request(overrides=overrides, command=[])):
        assert found_in(made) == []
    alone = draft(Request(overrides=["stages=[training]", *overrides[2:4], *overrides[6:]], command=[]))
    assert {one.id for one in found_in(alone)} == {"path.tokenizer", "path.data"}


def test_a_job_that_waits_for_another_may_find_it_then(here: Path) -> None:
    (here / "data/bpe/vocab.json").unlink()
    (one,) = found(*SLURM, "training.run.dependency=afterok:12")
    assert one.severity is Severity.WARNING
    assert one.message.endswith("there is no such file yet; the job waits for afterok:12")


# --- the image and its mounts


def test_an_image_is_squashfs(here: Path) -> None:
    def container(path: Path) -> list[Finding]:
        return found(*SLURM, f"container={path}")

    assert container(image(here / "good.sqsh")) == []
    assert found(*SLURM, "container=nvcr.io#nvidia/nemo:24.07") == []
    (here / "bad.sqsh").write_bytes(b"PK\x03\x04" + bytes(200))
    image(here / "short.sqsh", size=200)
    for name, why in {
        "bad.sqsh": "not a squashfs image: it does not begin as one",
        "short.sqsh": "cut short: 200 bytes of a squashfs of 226",
        "gone.sqsh": "there is no such file",
        "data": "a directory, not a file",
    }.items():
        (one,) = container(here / name)
        assert (one.id, one.severity) == ("path.image", Severity.ERROR)
        assert one.message == f"container='{here}/{name}': {why}"
    (one,) = container(Path("/no/such/nemo.sqsh"))
    assert one.severity is Severity.WARNING
    assert one.message == "container='/no/such/nemo.sqsh': not on this machine; every node must have it"


def test_what_a_disk_of_this_machine_lacks_the_nodes_may_have(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, DISK)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    (here / "data/bpe/vocab.json").unlink()
    (here / "data/corpus_text_document.bin").unlink()
    given = (*SLURM, f"container={here}/gone.sqsh", f"container_mounts=[{here}]")
    lost = {one.id: one for one in found(*given, "training.trainer.num_nodes=1")}
    assert {"path.tokenizer", "path.data", "path.image"} <= set(lost)
    for one in lost.values():
        assert one.severity is Severity.WARNING
        assert one.message.endswith("on this machine; every node must have it")
    image(here / "gone.sqsh", size=200)  # what is here, and broken, is wrong wherever the disk is
    (broken,) = (one for one in found(*given) if one.id == "path.image")
    assert broken.severity is Severity.ERROR


def test_an_image_that_an_earlier_job_makes_may_be_there_then(here: Path) -> None:
    (one,) = found(*SLURM, f"container={here}/later.sqsh", "training.run.dependency=afterok:12")
    assert (one.id, one.severity) == ("path.image", Severity.WARNING)


def test_a_pipe_is_not_waited_for(here: Path) -> None:
    (here / "data/bpe/vocab.json").unlink()
    os.mkfifo(here / "data/bpe/vocab.json")
    (one,) = found(*SLURM)
    assert one.message.endswith("it cannot be read: not a file")


def test_what_the_kernel_tells_of_this_machine_is_no_shared_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, f"{NFS}9 1 0:9 / /sys rw - sysfs sysfs rw\n")
    (one,) = found(*SLURM, IMAGE, "container_mounts=[/sys/no-such-device]")
    assert one.severity is Severity.WARNING


def test_an_image_that_is_not_there_is_refused(here: Path) -> None:
    image(here / "nemo-24.07.sqsh")
    made = drafted(*SLURM, f"container={here}/nemo.sqsh")
    with pytest.raises(Mistakes) as raised:
        refuse(made, found_in(made))
    (mistake,) = raised.value.mistakes
    assert mistake.key == "container"
    assert f"from the command line: container={here}/nemo.sqsh" in str(mistake)
    assert f"in {here}: nemo-24.07.sqsh" in str(mistake)


def test_without_slurm_there_is_no_container(here: Path) -> None:
    known = facts(*LOCAL, f"container={here}/gone.sqsh", "container_mounts=[/no/such/place]")
    assert (known.image, known.mounts) == (None, None)


@pytest.mark.parametrize(
    ("head", "size", "why"),
    [
        (SQUASHFS, SQUASHFS_SIZE, None),
        (SQUASHFS, SQUASHFS_SIZE - 1, "cut short"),
        (SQUASHFS[:40], 40, "cut short: 40 bytes"),
        (SQUASHFS[:28] + b"\x03" + SQUASHFS[29:], 4096, "version 3.0"),
        (b"", 0, "an empty file"),
    ],
    ids=["whole", "without its end", "without its head", "of old", "empty"],
)
def test_the_first_bytes_of_a_squashfs(head: bytes, size: int, why: str | None) -> None:
    said = why_not_squashfs(head, size)
    assert (said is None) if why is None else (said is not None and why in said)


IMAGE = "container=nvcr.io#nvidia/nemo:24.07"


def test_what_is_mounted_is_there(here: Path) -> None:
    assert told(*SLURM, IMAGE, "container_mounts=[/etc]") == []
    (one,) = found(*SLURM, IMAGE, f"container_mounts=[{here}/gone]")
    assert (one.id, one.severity, one.key) == ("path.mounts", Severity.ERROR, "container_mounts")
    assert one.message == f"container_mounts='{here}/gone': there is no such file or directory to mount"


def test_a_data_dir_that_is_not_there_is_mounted_for_mock_data_too(here: Path) -> None:
    (one,) = (one for one in found(*SLURM, IMAGE, MOCK, f"data_dir={here}/none") if one.id == "path.mounts")
    assert (one.severity, one.key) == (Severity.ERROR, "data_dir")
    assert one.fix == f"mkdir -p {here}/none, or data_dir=..."
    assert told(*LOCAL, IMAGE, MOCK, f"data_dir={here}/none") == []


def test_disks_of_this_machine_tell_nothing_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, DISK)
    given = (*SLURM, IMAGE, "container_mounts=[/dev/no-such-device]", "training.trainer.num_nodes=1")
    (one,) = found(*given)
    assert one.severity is Severity.WARNING
    assert one.message.endswith("on this machine; every node must have it")


def test_paths_in_the_container_are_those_of_its_mounts(here: Path) -> None:
    inside = (f"{PREFIX}=[/corpus/text]", f"container_mounts=['{here}/data/deep:/corpus']")
    (here / "data/deep").mkdir()
    (one,) = found(*SLURM, IMAGE, *inside)
    assert one.message == f"{PREFIX}='/corpus/text': its .bin and .idx: there is no such file"
    data_set(here / "data/deep/text")
    assert told(*SLURM, IMAGE, *inside) == []
    (one,) = found(*SLURM, IMAGE, f"{PREFIX}=[/elsewhere/text]")
    assert one.severity is Severity.WARNING
    assert "no mount of the container has it" in one.message
    assert one.fix == "container_mounts=[/elsewhere]"


# --- the results


def test_results_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").touch()
    (one,) = found(*SLURM, f"base_results_dir={here}/file/x")
    assert (one.id, one.severity, one.key) == ("path.writable", Severity.ERROR, "base_results_dir")
    assert f"base_results_dir='{here}/file/x': cannot write {here}/file/x/gpt3_126m: not a dir" in one.message
    (here / "file").unlink()
    assert told(*SLURM, f"base_results_dir={here}/file/x") == []
    closed = "training.run.results_dir=" + str(here / "theirs/run")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (one,) = found(*BARE, closed)
    assert (one.key, one.message.rpartition(": ")[2]) == ("training.run.results_dir", "permission denied")


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
def test_file_systems_that_take_nothing(
    changes: dict[str, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: Any = type("Disk", (_Disk,), changes)
    monkeypatch.setattr("os.statvfs", lambda path: disk)
    assert [one.message.rpartition(": ")[2] for one in found(*SLURM)] == ([why] if why else [])


# --- how much room there is


def program(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_room_is_that_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    known = facts(*SLURM)
    assert (known.free_bytes, known.free_by) == (4096 * 1000, "file system")


def test_a_file_system_that_counts_no_blocks_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: type("Disk", (_Disk,), {"f_blocks": 0, "f_bavail": 0}))
    known = facts(*SLURM)
    assert known.free_bytes is None
    assert "free_bytes" in known.missing


def test_of_group_quotas_that_of_new_files_counts(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    table = "".join(
        f"Disk quotas for {who}: \\n Filesystem blocks quota limit grace files\\n"
        f" server:/export {used} 0 1000 0 1 0 0 0\\n"
        for who, used in (
            ("user me (uid 7)", 10),
            (f"group other (gid {os.getgid() + 1})", 1000),
            (f"group mine (gid {os.getgid()})", 400),
        )
    )
    program(tmp_path, "quota", f"echo >> {tmp_path}/asked; printf '{table}'")
    for _ in range(2):
        known = facts(*SLURM)
        assert (known.free_bytes, known.free_by) == (600 * 1024, "quota")
    assert (tmp_path / "asked").read_text() == "\n"  # the points of a sweep ask once


@pytest.mark.parametrize(
    ("row", "left"),
    [
        ("server:/export 900 0 1000 0 1 0 0 0", 100 * 1024),
        ("server:/export 900 950 0 0 1 0 0 0", 50 * 1024),
        ("server:/export 1100* 950 1000 none 1 0 0 0", 0),
        ("server:/export 900 0 0 0 1 0 0 0", None),
        ("/dev/other 900 0 1000 0 1 0 0 0", None),
        ("none", None),
    ],
)
def test_a_quota_may_end_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, left: int | None
) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    table = f"Disk quotas for user me (uid 7): \\n Filesystem blocks quota limit grace files\\n {row}\\n"
    program(tmp_path, "quota", f"printf '{table}'; exit 1")
    known = facts(*SLURM)
    expected = (4096 * 1000, "file system") if left is None else (left, "quota")
    assert (known.free_bytes, known.free_by) == expected


def test_lustre_is_asked_in_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    mounts(monkeypatch, tmp_path, NFS.replace("nfs4 server:/export", "lustre 10.0.0.1@tcp:/fsx"))
    say = 'case "$3" in -u) echo "/ 5 0 0 - 1 0 0 -" ;; -g) printf "/\\n  400 0 700 - 1 0 0 -\\n" ;; esac'
    program(tmp_path, "lfs", f'[ "$1 $2 $5" = "quota -q /" ] && {say}')
    known = facts(*SLURM)
    assert (known.free_bytes, known.free_by) == (300 * 1024, "quota")


def test_a_quota_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: _Disk)
    monkeypatch.setattr(systems, "_QUOTA_PATIENCE_SECONDS", 0.05)
    program(tmp_path, "quota", "exec /bin/sleep 600")
    assert facts(*SLURM).free_by == "file system"


def test_checkpoints_that_are_there_are_counted(here: Path) -> None:
    assert facts(*LOCAL).checkpoints_there == 0
    kept = here / "results/gpt3_tiny/checkpoints"
    for name in ("step=1", "step=2", ".unfinished"):
        (kept / name).mkdir(parents=True)
    assert facts(*LOCAL).checkpoints_there == 2


# --- what nodes share


def test_disks_of_this_machine_are_not_shared(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, DISK)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    results, inputs = found(*SLURM)
    assert {(one.id, one.severity) for one in (results, inputs)} == {("path.shared", Severity.WARNING)}
    assert results.message == (
        f"base_results_dir='{here}/results': it lies on a file system of this machine's own"
        " (ext4, mounted at /); the job's 8 nodes write to this directory together"
    )
    assert inputs.key == PREFIX
    assert inputs.also == (f"{TOKENIZER}.vocab_file", f"{TOKENIZER}.merge_file")
    assert "each of the job's 8 nodes must have it (likewise " in inputs.message


@pytest.mark.parametrize(
    "more",
    [
        ("training.trainer.num_nodes=1",),
        ("cluster=sandbox", "cluster.gpus_per_node=8"),
        LOCAL,
    ],
    ids=["one node", "sandbox", "local"],
)
def test_where_nodes_are_this_machine_nothing_need_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    mounts(monkeypatch, tmp_path, DISK)
    assert told("training=gpt3/126m", *more) == []


def test_what_this_machine_exports_is_shared(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, DISK)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    (tmp_path / "exports").write_text(f"# ours\n{here} *(rw)\n")
    assert told(*SLURM) == []


@pytest.mark.parametrize(
    ("mounted", "kind"),
    [
        ("9 1 0:9 / {here} rw - nfs4 s:/x rw\n", None),
        ("9 1 0:9 / {here} rw - tmpfs tmpfs rw\n", "tmpfs"),
        ("9 1 0:9 / {here} rw - lustre fsx rw\n9 1 0:9 / {here} rw - xfs /dev/sdb rw\n", "xfs"),
        ("9 1 0:9 / {here}x rw - tmpfs tmpfs rw\n9 1 0:9 / {here} rw - fuse.s3fs s3fs rw\n", None),
    ],
)
def test_the_innermost_mount_counts_and_of_two_the_later(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: str, kind: str | None
) -> None:
    mounts(monkeypatch, tmp_path, DISK + mounted.format(here=here))
    found = systems.local_mount(here / "not" / "yet" / "there")
    assert (found.kind if found is not None else None) == kind


def test_names_with_blanks_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    mounts(monkeypatch, tmp_path, f"{DISK}9 1 0:9 / {tmp_path}/a\\040b rw - beegfs b rw\n")
    assert systems.local_mount(place) is None
    assert systems.local_mount(tmp_path) is not None


def test_a_system_that_does_not_tell_skips_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "MOUNTS", tmp_path / "no-such-file")
    (one,) = found(*SLURM)
    assert (one.id, one.severity) == ("path.shared", Severity.SKIPPED)
    assert "this machine does not tell what its file systems are" in one.message
