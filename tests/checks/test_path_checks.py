"""Files and directories of a job, and the findings where this machine lacks some of them."""

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
    draft_with,
    facts_with,
    path_findings,
    path_findings_in,
    path_problems,
    set_mounts,
)
from tests.checks.plans import findings_of
from tests.checks.shelves import DISK, NFS, SQUASHFS, SQUASHFS_SIZE, data_set, image, index

pytestmark = pytest.mark.usefixtures("workdir")


@pytest.mark.parametrize("job", [SLURM, LOCAL, (*SLURM, MOCK)], ids=["slurm", "local", "mock"])
def test_complete_job_has_no_findings(job: tuple[str, ...]) -> None:
    assert path_problems(*job) == []


def test_a_dry_run_looks_at_no_paths(workdir: Path) -> None:
    (workdir / "data/bpe/vocab.json").unlink()
    launch_draft = draft(Request(overrides=(*SLURM, "engine=nemo"), command=[]))
    ids = {look: [finding.id for finding in findings_of(launch_draft, look=look)] for look in (True, False)}
    assert "path.tokenizer" in ids[True]
    assert not any(name.startswith("path.") for name in ids[False])


# --- the tokenizer


def test_missing_tokenizer_file_is_an_error(workdir: Path) -> None:
    (workdir / "data/bpe/merges.txt").rename(workdir / "data/bpe/merge.txt")
    (workdir / "data/bpe/vocab.txt").unlink()
    (finding,) = path_findings(*SLURM)
    path = workdir / "data/bpe/merges.txt"
    assert (finding.id, finding.severity, finding.key) == (
        "path.tokenizer",
        Severity.ERROR,
        f"{TOKENIZER}.merge_file",
    )
    assert finding.message == f"{TOKENIZER}.merge_file='{path}': there is no such file"
    assert finding.fix is not None
    assert finding.fix.splitlines() == [
        f"in {path.parent}: merge.txt",
        f"it is looked for in data_dir={workdir / 'data'}; to look elsewhere: data_dir=...",
        "it is made together with vocab.json: with merges of another tokenizer the ids are others",
    ]


@pytest.mark.parametrize("change", ["not there", "not set"])
def test_missing_vocabulary_names_two_ways_to_get_one(workdir: Path, change: str) -> None:
    (workdir / "data/bpe/vocab.json").unlink()
    values = () if change == "not there" else (f"{TOKENIZER}.vocab_file=null",)
    (finding,) = path_findings(*LOCAL, *values)
    assert finding.key == f"{TOKENIZER}.vocab_file"
    assert finding.fix is not None
    ways = finding.fix.splitlines()[-3:]
    assert "`slipway data tokenize` trains vocab.json and merges.txt on your own text" in ways[0]
    assert "data_preparation.tokenizer.vocab_url and merges_url): 50,257 tokens" in ways[1]
    assert ways[2].startswith("their ids differ")


def test_unset_sentencepiece_model_is_described(workdir: Path) -> None:
    (finding,) = path_findings(*LOCAL, f"{TOKENIZER}.library=sentencepiece", f"{TOKENIZER}.model=null")
    assert finding.fix is not None
    assert finding.fix.startswith("a SentencePiece model")


def test_nodes_may_have_a_directory_that_this_machine_lacks() -> None:
    (finding,) = path_findings(*BARE, f"{TOKENIZER}.vocab_file=/no/such/vocab.json")
    assert finding.severity is Severity.WARNING
    assert finding.message.endswith("there is no such file on this machine; every node must have it")
    (finding,) = path_findings(*LOCAL, f"{TOKENIZER}.vocab_file=/no/such/vocab.json")
    assert finding.severity is Severity.ERROR
    assert finding.message.endswith("there is no such file")


def test_shared_disk_lacks_what_is_in_a_directory_that_it_lacks(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = f"41 40 0:41 / {workdir} rw - {{}} server:/shared rw\n"
    missing = (*SLURM, f"data_dir={workdir}/none/data", f"container={workdir}/none/nemo.sqsh")
    for kind, severity in (("lustre", Severity.ERROR), ("autofs", Severity.WARNING)):
        set_mounts(monkeypatch, tmp_path, DISK + mounted.format(kind))
        findings = {finding.id: finding.severity for finding in path_findings(*missing)}
        paths = ("path.data", "path.tokenizer", "path.image", "path.mounts")
        assert {name: findings[name] for name in paths} == dict.fromkeys(paths, severity)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "an empty file"),
        ("version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS's"),
        ("<html>not found</html>", "it does not begin with {"),
    ],
)
def test_malformed_tokenizer_file_is_an_error(workdir: Path, content: str, why: str) -> None:
    (workdir / "data/bpe/vocab.json").write_text(content)
    (finding,) = path_findings(*SLURM)
    assert finding.severity is Severity.ERROR
    assert why in finding.message


def test_each_kind_of_tokenizer_has_files_of_its_own(workdir: Path) -> None:
    pieces = "training=llama/llama2_7b", "cluster=bcm"
    (finding,) = path_findings(*pieces)
    assert finding.key == f"{TOKENIZER}.model"
    (workdir / "data/llama").mkdir()
    (workdir / "data/llama/llama_tokenizer.model").write_bytes(b"\n\x0e")
    assert path_problems(*pieces) == []
    # A name on the hub is no path; a whole path is a directory.
    hub = "training=llama/llama3_8b", "cluster=bcm"
    assert path_problems(*hub) == []
    (finding,) = path_findings(*hub, f"{TOKENIZER}.type={workdir}/data/llama3")
    assert finding.message == f"{TOKENIZER}.type='{workdir}/data/llama3': there is no such directory"
    (workdir / "data/llama3").mkdir()
    assert path_problems(*hub, f"{TOKENIZER}.type={workdir}/data/llama3") == []
    words = "training=t5/220m", "cluster=bcm"
    assert path_problems(*words) == []
    (workdir / "data/bpe/vocab.txt").unlink()
    assert [finding.key for finding in path_findings(*words)] == [f"{TOKENIZER}.vocab_file"]


def test_mock_data_need_no_tokenizer_with_our_trainer(workdir: Path) -> None:
    (workdir / "data/bpe/vocab.json").unlink()
    assert path_problems(*LOCAL, MOCK) == []
    (finding,) = path_findings(*SLURM, MOCK, "engine=nemo", "container=nvcr.io#nvidia/nemo:24.07")
    assert finding.key == f"{TOKENIZER}.vocab_file"


def test_our_trainer_downloads_no_tokenizer(workdir: Path) -> None:
    assert [finding.message for finding in path_findings(*LOCAL, f"{TOKENIZER}.merge_file=null")] == [
        f"{TOKENIZER}.merge_file='null': it is not set"
    ]
    nemo = (*SLURM, "engine=nemo", "container=nvcr.io#nvidia/nemo:24.07")
    assert path_problems(*nemo, f"{TOKENIZER}.merge_file=null") == []


def test_same_error_of_several_keys_is_reported_once(workdir: Path) -> None:
    (workdir / "data/bpe").rename(workdir / "data/bpe2")
    (finding,) = path_findings(*SLURM)
    assert finding.key == f"{TOKENIZER}.vocab_file"
    assert finding.also == (f"{TOKENIZER}.merge_file",)
    assert finding.message.endswith(f"every node must have it; likewise {TOKENIZER}.merge_file")


# --- the data


def test_missing_data_are_an_error(workdir: Path) -> None:
    data_set(workdir / "data/other")
    (workdir / "data/other.bin").unlink()
    prefixes = f"{PREFIX}=[0.5, {workdir}/data/othr, 0.5, {workdir}/data/other]"
    first, second = path_findings(*SLURM, prefixes)
    assert {finding.id for finding in (first, second)} == {"path.data"}
    assert first.message == f"{PREFIX}='{workdir}/data/othr': its .bin and .idx: there is no such file"
    assert first.fix is not None
    assert f"in {workdir}/data: other.idx" in first.fix
    assert second.message == f"{PREFIX}='{workdir}/data/other': its .bin: there is no such file"
    (finding,) = path_findings(*SLURM, f"{PREFIX}=[{workdir}/data/corpus_text_document.bin]")
    assert finding.fix == "without the suffix: a prefix names both files"


def test_some_of_many_missing_paths_are_named(workdir: Path) -> None:
    names = ",".join(f"{workdir}/data/part{number}" for number in range(5))
    (finding,) = path_findings(*SLURM, f"{PREFIX}=[{names}]")
    assert finding.message == (
        f"{PREFIX}='{workdir}/data/part0': its .bin and .idx: there is no such file;"
        f" likewise {workdir}/data/part1, {workdir}/data/part2 and 2 more"
    )


def test_data_of_each_split_are_looked_for(workdir: Path) -> None:
    prefixes = (
        f"+{PREFIX}={{train: [{workdir}/data/corpus_text_document], validation: [{workdir}/data/held]}}"
    )
    (finding,) = path_findings(*SLURM, f"~{PREFIX}", prefixes)
    assert finding.key == f"{PREFIX}.validation"


def test_a_relative_path_means_another_place_in_the_job(workdir: Path) -> None:
    (finding,) = path_findings(*LOCAL, f"{PREFIX}=[data/corpus_text_document]")
    assert finding.severity is Severity.ERROR
    assert finding.message.endswith("a whole path is needed: the job starts elsewhere")
    assert finding.fix == f"by its whole path: {workdir}/data/corpus_text_document"


def test_bin_that_does_not_match_its_idx_is_an_error(workdir: Path) -> None:
    data_set(workdir / "data/corpus_text_document")
    (workdir / "data/corpus_text_document.bin").write_bytes(bytes(10))
    (finding,) = path_findings(*SLURM)
    assert finding.severity is Severity.ERROR
    assert finding.message.endswith("its .idx tells of 14 bytes of tokens, its .bin has 10")


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
def test_index_is_checked_against_its_tokens(tmp_path: Path, content: bytes, why: str | None) -> None:
    path = tmp_path / "x.idx"
    path.write_bytes(content)
    reason = why_no_data_set(path, 14)
    assert (reason is None) if why is None else (reason is not None and why in reason)


@pytest.mark.parametrize("engine", ["megatron", "nemo", "megatron_lm"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "https", "msc"])
def test_no_engine_opens_a_url(workdir: Path, engine: str, scheme: str) -> None:
    url, here = f"{scheme}://bucket/text", workdir / "data/corpus_text_document"
    overrides = (*LOCAL, f"engine={engine}", "training.trainer.accelerator=gpu")
    findings = path_findings(*overrides, f"{PREFIX}=[0.5, {here}, 0.5, '{url}']")
    (finding,) = [finding for finding in findings if finding.id == "path.data"]
    assert finding.severity is Severity.ERROR
    assert finding.message == f"{PREFIX}='{url}': engine={engine} reads files, and opens no {scheme}:// here"
    tokenizer = [finding.key for finding in path_findings(*overrides, f"{TOKENIZER}.vocab_file='{url}'")]
    cache = [f"{PREFIX}=[{here}]", f"training.model.data.index_mapping_dir='{url}'"]
    assert [finding.id for finding in path_findings(*overrides, *cache) if url in finding.message] == [
        "path.data"
    ]
    # NeMo fetches a tokenizer.
    assert (f"{TOKENIZER}.vocab_file" in tokenizer) is (engine != "nemo")


SPLITS = "training.model.data.splits_string"
NO_VALIDATION = "training.trainer.limit_val_batches=0"


@pytest.mark.parametrize(
    ("lengths", "overrides", "split", "size"),
    [
        ((200, 200), (f"{SPLITS}='1,0,0'",), "validation", "0 tokens in 0 documents"),
        ((200, 200), (f"{SPLITS}='99990,8,2'",), "validation", "0 tokens in 0 documents"),
        ((200, 128, 1), (f"{SPLITS}='1,1,1'",), "validation", "128 tokens in 1 document"),
        ((128,), (f"{SPLITS}='1'", NO_VALIDATION), "train", "128 tokens in 1 document"),
        ((200, 129, 1), (f"{SPLITS}='1,1,1'",), None, ""),
        ((129,), (f"{SPLITS}='1'", NO_VALIDATION), None, ""),
        # Ends are rounded: megatron-core's rule has a document left for validation.
        ((200,) * 10, (f"{SPLITS}='900,50,50'",), None, ""),
        # Another engine's own rules are not known here.
        (
            (200, 200),
            (f"{SPLITS}='1,0,0'", "engine=megatron_lm", "training.trainer.accelerator=gpu"),
            None,
            "",
        ),
    ],
)
def test_each_split_has_a_window(
    workdir: Path, lengths: tuple[int, ...], overrides: tuple[str, ...], split: str | None, size: str
) -> None:
    """Compare with the windows of gpt3/tiny, of 128 tokens and one."""
    data_set(workdir / "data/corpus_text_document", lengths)
    findings = path_findings(*LOCAL, *overrides)
    if split is None:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.id, finding.severity) == ("path.data", Severity.ERROR)
    assert finding.message.endswith(f": its {split} split has {size}, and a window needs 129")
    assert finding.fix is not None
    assert (NO_VALIDATION in finding.fix) is (split == "validation")


def test_a_data_set_that_is_named_for_a_split_is_whole(workdir: Path) -> None:
    for name, tokens in {"long": 200, "short": 128}.items():
        data_set(workdir / f"data/{name}", (tokens,))
    for splits, expected in (
        ({"train": "long", "validation": "long", "test": "short"}, []),
        ({"train": "long", "validation": "short"}, [f"{PREFIX}.validation"]),
        ({"train": "short", "validation": "long"}, [f"{PREFIX}.train"]),
    ):
        node = ", ".join(f"{split}: [{workdir}/data/{name}]" for split, name in splits.items())
        findings = path_findings(*LOCAL, f"~{PREFIX}", f"+{PREFIX}={{{node}}}")
        assert [finding.key for finding in findings] == expected


def test_a_t5_whose_split_has_no_input_is_found(workdir: Path) -> None:
    data_set(workdir / "data/corpus_text_document", (200, 20))
    overrides = ("training=t5/tiny", "cluster=local", f"{SPLITS}='1,1,0'")
    assert [finding.id for finding in path_findings(*overrides)] == ["path.data"]


def test_files_of_an_earlier_stage_are_not_missing(workdir: Path) -> None:
    overrides = [
        "stages=[data_preparation,training]",
        f"data_preparation.inputs=[{workdir}]",
        *SLURM,
        "data_preparation.output_prefix=${data_dir}/new",
        "data_preparation.tokenizer_dir=${data_dir}/made",
        f"{PREFIX}=[${{data_dir}}/new]",
        f"{TOKENIZER}.vocab_file=${{data_dir}}/made/vocab.json",
        f"{TOKENIZER}.merge_file=${{data_dir}}/made/merges.txt",
    ]
    for launch_draft in drafts(Request(overrides=overrides, command=[])):
        assert path_findings_in(launch_draft) == []
    training_draft = draft(
        Request(overrides=["stages=[training]", *overrides[2:4], *overrides[6:]], command=[])
    )
    assert {finding.id for finding in path_findings_in(training_draft)} == {"path.tokenizer", "path.data"}


@pytest.mark.parametrize(
    ("written", "severity"),
    [
        ("${data_dir}/corpus_text_document", None),
        ("${data_dir}/mine_text_document", Severity.WARNING),
        ("/no/such/mine_text_document", Severity.WARNING),
    ],
)
def test_training_that_does_not_read_what_is_prepared_before_it(
    written: str, severity: Severity | None, workdir: Path
) -> None:
    overrides = [
        "stages=[data_preparation,training]",
        f"data_preparation.inputs=[{workdir}]",
        f"data_preparation.output_prefix={written}",
        *BARE,
    ]
    *_, launch_draft = drafts(Request(overrides=overrides, command=[]))
    findings = path_findings_in(launch_draft)
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    if severity is not None:
        where = written.replace("${data_dir}", f"{workdir}/data")
        assert findings[0].fix == f"{PREFIX}=[{where}]"
        (workdir / "data/corpus_text_document.idx").unlink()
        (finding,) = path_findings_in(launch_draft)
        assert (finding.id, finding.severity, finding.key) == ("path.data", Severity.ERROR, PREFIX)
        assert f"the data preparation before it writes {where}, which the" in finding.message


def test_file_that_an_earlier_job_may_make_is_a_warning(workdir: Path) -> None:
    (workdir / "data/bpe/vocab.json").unlink()
    (finding,) = path_findings(*SLURM, "training.run.dependency=afterok:12")
    assert finding.severity is Severity.WARNING
    assert finding.message.endswith("there is no such file yet; the job waits for afterok:12")


# --- the image and its mounts


def test_image_that_is_no_squashfs_is_an_error(workdir: Path) -> None:
    def container(path: Path) -> list[Finding]:
        return path_findings(*SLURM, f"container={path}")

    assert container(image(workdir / "good.sqsh")) == []
    assert path_findings(*SLURM, "container=nvcr.io#nvidia/nemo:24.07") == []
    (workdir / "bad.sqsh").write_bytes(b"PK\x03\x04" + bytes(200))
    image(workdir / "short.sqsh", size=200)
    for name, why in {
        "bad.sqsh": "not a squashfs image",
        "short.sqsh": "cut short: 200 bytes of a squashfs of 226",
        "gone.sqsh": "there is no such file",
        "data": "a directory, not a file",
    }.items():
        (finding,) = container(workdir / name)
        assert (finding.id, finding.severity) == ("path.image", Severity.ERROR)
        assert finding.message == f"container='{workdir}/{name}': {why}"
    (finding,) = container(Path("/no/such/nemo.sqsh"))
    assert finding.severity is Severity.WARNING
    why = "there is no such file on this machine; every node must have it"
    assert finding.message == f"container='/no/such/nemo.sqsh': {why}"


def test_nodes_may_have_files_that_a_local_disk_lacks(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mounts(monkeypatch, tmp_path, DISK)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    (workdir / "data/bpe/vocab.json").unlink()
    (workdir / "data/corpus_text_document.bin").unlink()
    overrides = (*SLURM, f"container={workdir}/gone.sqsh", f"container_mounts=[{workdir}]")
    warnings = {finding.id: finding for finding in path_findings(*overrides, "training.trainer.num_nodes=1")}
    assert {"path.tokenizer", "path.data", "path.image"} <= set(warnings)
    for finding in warnings.values():
        assert finding.severity is Severity.WARNING
        assert finding.message.endswith("on this machine; every node must have it")
    image(workdir / "gone.sqsh", size=200)  # a broken image on this machine is an error on any disk
    (broken,) = (finding for finding in path_findings(*overrides) if finding.id == "path.image")
    assert broken.severity is Severity.ERROR


def test_image_that_an_earlier_job_may_make_is_a_warning(workdir: Path) -> None:
    (finding,) = path_findings(
        *SLURM, f"container={workdir}/later.sqsh", "training.run.dependency=afterok:12"
    )
    assert (finding.id, finding.severity) == ("path.image", Severity.WARNING)


def test_a_pipe_is_not_waited_for(workdir: Path) -> None:
    (workdir / "data/bpe/vocab.json").unlink()
    os.mkfifo(workdir / "data/bpe/vocab.json")
    (finding,) = path_findings(*SLURM)
    assert finding.message.endswith("it cannot be read: not a file")


def test_file_systems_of_the_kernel_are_no_shared_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mounts(monkeypatch, tmp_path, f"{NFS}9 1 0:9 / /sys rw - sysfs sysfs rw\n")
    (finding,) = path_findings(*SLURM, IMAGE, "container_mounts=[/sys/no-such-device]")
    assert finding.severity is Severity.WARNING


def test_missing_image_is_refused(workdir: Path) -> None:
    image(workdir / "nemo-24.07.sqsh")
    launch_draft = draft_with(*SLURM, f"container={workdir}/nemo.sqsh")
    with pytest.raises(Mistakes) as raised:
        refuse(launch_draft, path_findings_in(launch_draft))
    (mistake,) = raised.value.mistakes
    assert mistake.key == "container"
    assert f"from the command line: container={workdir}/nemo.sqsh" in str(mistake)
    assert f"in {workdir}: nemo-24.07.sqsh" in str(mistake)


def test_without_slurm_there_is_no_container(workdir: Path) -> None:
    facts = facts_with(*LOCAL, f"container={workdir}/gone.sqsh", "container_mounts=[/no/such/place]")
    assert (facts.image, facts.mounts) == (None, None)


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
def test_faults_are_seen_in_the_first_bytes_of_a_squashfs(head: bytes, size: int, why: str | None) -> None:
    fault = squashfs_fault(head, size)
    assert (fault is None) if why is None else (fault is not None and why in fault)


IMAGE = "container=nvcr.io#nvidia/nemo:24.07"


def test_sources_of_mounts_must_exist(workdir: Path) -> None:
    assert path_problems(*SLURM, IMAGE, "container_mounts=[/etc]") == []
    (finding,) = path_findings(*SLURM, IMAGE, f"container_mounts=[{workdir}/gone]")
    assert (finding.id, finding.severity, finding.key) == ("path.mounts", Severity.ERROR, "container_mounts")
    assert (
        finding.message == f"container_mounts='{workdir}/gone': there is no such file or directory to mount"
    )


def test_missing_data_dir_is_an_error_for_mock_data_too(workdir: Path) -> None:
    (finding,) = (
        finding
        for finding in path_findings(*SLURM, IMAGE, MOCK, f"data_dir={workdir}/none")
        if finding.id == "path.mounts"
    )
    assert (finding.severity, finding.key) == (Severity.ERROR, "data_dir")
    assert finding.fix == f"mkdir -p {workdir}/none, or data_dir=..."
    assert path_problems(*LOCAL, IMAGE, MOCK, f"data_dir={workdir}/none") == []


def test_disks_of_this_machine_tell_nothing_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mounts(monkeypatch, tmp_path, DISK)
    overrides = (*SLURM, IMAGE, "container_mounts=[/dev/no-such-device]", "training.trainer.num_nodes=1")
    (finding,) = path_findings(*overrides)
    assert finding.severity is Severity.WARNING
    assert finding.message.endswith("on this machine; every node must have it")


@pytest.mark.parametrize(
    ("mounts", "hidden"),
    [
        ("[/dev/shm:/x/sub,/dev:/x]", "'/dev/shm:/x/sub': /dev:/x is mounted after it, and hides it"),
        ("[/dev:/b,/proc:/b]", "'/dev:/b': /proc:/b is mounted after it, and hides it"),
        ("[/dev:/x,/dev/shm:/x/sub]", None),
        ("[/dev/null:/x/null,/dev:/x]", None),  # the same file
        ("[/dev:/x,tmpfs:/x]", None),
        ("[/dev:/xy,/proc:/x]", None),
    ],
)
def test_mount_that_a_later_one_hides_is_a_warning(mounts: str, hidden: str | None, workdir: Path) -> None:
    image(workdir / "x.sqsh")
    findings = path_findings(*SLURM, f"container={workdir}/x.sqsh", f"container_mounts={mounts}")
    messages = [finding.message for finding in findings if finding.id == "path.mounts"]
    assert messages == ([f"container_mounts={hidden}"] if hidden else [])
    assert all(finding.severity is Severity.WARNING for finding in findings if finding.id == "path.mounts")


def test_paths_in_the_container_are_those_of_its_mounts(workdir: Path) -> None:
    inside = (f"{PREFIX}=[/corpus/text]", f"container_mounts=['{workdir}/data/deep:/corpus']")
    (workdir / "data/deep").mkdir()
    (finding,) = path_findings(*SLURM, IMAGE, *inside)
    assert finding.message == f"{PREFIX}='/corpus/text': its .bin and .idx: there is no such file"
    data_set(workdir / "data/deep/text")
    assert path_problems(*SLURM, IMAGE, *inside) == []
    (finding,) = path_findings(*SLURM, IMAGE, f"{PREFIX}=[/elsewhere/text]")
    assert finding.severity is Severity.WARNING
    assert "no mount of the container has it" in finding.message
    assert finding.fix == "container_mounts=[/elsewhere]"


# --- the results


def test_unwritable_results_are_an_error(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "file").touch()
    (finding,) = path_findings(*SLURM, f"base_results_dir={workdir}/file/x")
    assert (finding.id, finding.severity, finding.key) == (
        "path.writable",
        Severity.ERROR,
        "base_results_dir",
    )
    assert (
        f"base_results_dir='{workdir}/file/x': cannot write {workdir}/file/x/gpt3_126m: not a dir"
        in finding.message
    )
    (workdir / "file").unlink()
    assert path_problems(*SLURM, f"base_results_dir={workdir}/file/x") == []
    closed = "training.run.results_dir=" + str(workdir / "theirs/run")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (finding,) = path_findings(*BARE, closed)
    assert (finding.key, finding.message.rpartition(": ")[2]) == (
        "training.run.results_dir",
        "permission denied",
    )


def test_existing_checkpoints_are_counted(workdir: Path) -> None:
    assert facts_with(*LOCAL).checkpoints_there == 0
    checkpoints = workdir / "results/gpt3_tiny/checkpoints"
    for name in ("step=1", "step=2", ".unfinished", "damaged/step=3"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "latest").symlink_to("step=2")
    assert facts_with(*LOCAL).checkpoints_there == 2


def test_checkpoint_of_slipway_is_refused_for_nemo(workdir: Path) -> None:
    (workdir / "weights").mkdir()
    nemo = (*SLURM, "engine=nemo", f"container_mounts=[{workdir}]")
    nemo += (f"training.restore_from_path={workdir}/weights",)
    assert not [message for _, _, message in path_problems(*nemo) if "restore_from_path" in message]
    (workdir / "weights/complete.json").write_text('{"step": 0}')
    (error,) = [finding for finding in path_findings(*nemo) if "restore_from_path" in finding.message]
    assert error.severity is Severity.ERROR and error.fix is not None
    assert "a checkpoint of Slipway, which NeMo cannot read" in error.message
    assert "engine=megatron" in error.fix
