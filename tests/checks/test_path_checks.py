"""Files and directories of a job: what this machine has of them, and what is told where it lacks some."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import refuse
from launcher.checks.gathering.data import why_no_data_set
from launcher.drafting import Request, draft, drafts
from launcher.errors import Mistakes
from launcher.images.squashfs import squashfs_fault
from tests.checks.path_jobs import (
    BARE,
    LOCAL,
    MOCK,
    PREFIX,
    SLURM,
    TOKENIZER,
    drafted,
    facts,
    found,
    found_in,
    mounts,
    told,
)
from tests.checks.plans import findings_of
from tests.checks.shelves import DISK, NFS, SQUASHFS, SQUASHFS_SIZE, data_set, image, index

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("job", [SLURM, LOCAL, (*SLURM, MOCK)], ids=["slurm", "local", "mock"])
def test_nothing_is_found_where_all_is_there(job: tuple[str, ...]) -> None:
    assert told(*job) == []


def test_a_dry_run_looks_at_no_paths(here: Path) -> None:
    (here / "data/bpe/vocab.json").unlink()
    made = draft(Request(overrides=(*SLURM, "engine=nemo"), command=[]))
    looked = {look: [one.id for one in findings_of(made, look=look)] for look in (True, False)}
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
        "it is made together with vocab.json: with merges of another tokenizer the ids are others",
    ]


@pytest.mark.parametrize("change", ["not there", "not set"])
def test_a_missing_vocabulary_names_both_ways_to_one_and_how_they_differ(here: Path, change: str) -> None:
    (here / "data/bpe/vocab.json").unlink()
    values = () if change == "not there" else (f"{TOKENIZER}.vocab_file=null",)
    (one,) = found(*LOCAL, *values)
    assert one.key == f"{TOKENIZER}.vocab_file"
    assert one.fix is not None
    ways = one.fix.splitlines()[-3:]
    assert "`slipway data tokenize` trains vocab.json and merges.txt on your own text" in ways[0]
    assert "data_preparation.tokenizer.vocab_url and merges_url): 50,257 tokens" in ways[1]
    assert ways[2].startswith("their ids differ")


def test_a_sentencepiece_model_that_is_not_set_names_what_it_is(here: Path) -> None:
    (one,) = found(*LOCAL, f"{TOKENIZER}.library=sentencepiece", f"{TOKENIZER}.model=null")
    assert one.fix is not None
    assert one.fix.startswith("a SentencePiece model")


def test_nodes_may_have_a_directory_that_this_machine_lacks() -> None:
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


def test_some_of_many_missing_paths_are_named(here: Path) -> None:
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


def test_files_of_an_earlier_stage_are_not_missing(here: Path) -> None:
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
        "bad.sqsh": "not a squashfs image",
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


def test_nodes_may_have_files_that_a_local_disk_lacks(
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


def test_file_systems_of_the_kernel_are_no_shared_disk(
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
    said = squashfs_fault(head, size)
    assert (said is None) if why is None else (said is not None and why in said)


IMAGE = "container=nvcr.io#nvidia/nemo:24.07"


def test_sources_of_mounts_must_exist(here: Path) -> None:
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


def test_checkpoints_that_are_there_are_counted(here: Path) -> None:
    assert facts(*LOCAL).checkpoints_there == 0
    kept = here / "results/gpt3_tiny/checkpoints"
    for name in ("step=1", "step=2", ".unfinished", "damaged/step=3"):
        (kept / name).mkdir(parents=True)
    (kept / "latest").symlink_to("step=2")
    assert facts(*LOCAL).checkpoints_there == 2


def test_checkpoint_of_slipway_is_refused_for_nemo(here: Path) -> None:
    (here / "weights").mkdir()
    nemo = (*SLURM, "engine=nemo", f"container_mounts=[{here}]")
    nemo += (f"training.restore_from_path={here}/weights",)
    assert not [message for _, _, message in told(*nemo) if "restore_from_path" in message]
    (here / "weights/complete.json").write_text('{"step": 0}')
    (one,) = [finding for finding in found(*nemo) if "restore_from_path" in finding.message]
    assert one.severity is Severity.ERROR and one.fix is not None
    assert "a checkpoint of Slipway, which NeMo cannot read" in one.message
    assert "engine=megatron" in one.fix
