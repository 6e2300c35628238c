"""Data that were exchanged under a training: reported, and refused until the user accepts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.trainer.data import identity
from slipway.trainer.data.identity import DATA, TOKENIZER, InputFile, accepts, differences, digest, identify
from tests.trainer.conftest import REPOSITORY
from tests.trainer.ranks import Run

PARAMS = "exp_manager.checkpoint_callback_params"
KEYS = {name: f"model.tokenizer.{name}_file" for name in ("vocab", "merge")}


# --- the identity by itself


def input_file(path: Path, kind: str = DATA) -> InputFile:
    return InputFile(kind, "key", str(path), str(path))


def test_a_touched_or_copied_file_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"tokens")
    old = identify([input_file(path)])
    os.utime(path, (1, 1))
    new = identify([input_file(path)])
    assert old[0].mtime != new[0].mtime
    assert differences(old, new) == []
    assert identity.from_json(json.loads(json.dumps(identity.to_json(new)))) == new


@pytest.mark.parametrize("position", [0, 511, 100_000, -1])
def test_a_changed_byte_of_a_file_that_is_hashed_whole_is_found(tmp_path: Path, position: int) -> None:
    path = tmp_path / "x.bin"
    content = bytearray(os.urandom(200_000))
    path.write_bytes(content)
    old = identify([input_file(path)])
    content[position] ^= 1
    path.write_bytes(content)
    changes = differences(old, identify([input_file(path)]))
    assert [change.new.name for change in changes] == [str(path)]
    assert "same size" in str(changes[0])


def test_a_large_bin_is_hashed_by_blocks_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    """A terabyte, of which the file system has only what is written."""
    path, size = tmp_path / "x.bin", 1 << 40
    with path.open("wb") as file:
        file.truncate(size)
    old = identify([input_file(path)])
    assert old[0].checksum.startswith("sha256-256x65536:")
    for position in (0, size // 255, size - 1):
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"\1", position)
        new = identify([input_file(path)])
        assert differences(old, new), position
        old = new


# An offset in a file of 100 MiB that is in none of the hashed blocks.
BETWEEN = 3 << 18


class PreparedData:
    """A data set of 100 MiB, of which the disk has what is written alone, with its manifest."""

    def __init__(self, directory: Path) -> None:
        self.bin, self.manifest = directory / "x.bin", directory / "x.manifest.json"
        self.content: dict[str, Any] = {
            "version": 1,
            "sources": [{"name": name, "sha256": name * 64} for name in "ab"],
            "tokenizer": {"sha256": "t" * 64},
            "options": {"append_eod": True},
        }

    def write(self, sha256: str) -> identity.Identity:
        """Write a byte between the blocks that are hashed, and a manifest of it."""
        with self.bin.open("wb") as file:
            file.truncate(100 << 20)
            os.pwrite(file.fileno(), sha256.encode(), BETWEEN)
        outputs = [{"path": "x.bin", "size": 100 << 20, "sha256": sha256 * 64}]
        self.manifest.write_text(json.dumps({**self.content, "outputs": outputs}))
        return identify([input_file(self.bin)])


def test_change_between_the_blocks_is_seen_by_the_manifest_and_reported_with_its_cause(
    tmp_path: Path,
) -> None:
    data = PreparedData(tmp_path)
    old = data.write("1")
    assert old[0].origin is not None
    assert old[0].origin["sha256"] == "1" * 64
    assert identity.from_json(json.loads(json.dumps(identity.to_json(old)))) == old
    assert differences(old, data.write("1")) == [], "the same bytes, written again"
    data.content["sources"] = [{"name": "a", "sha256": "c" * 64}, {"name": "d", "sha256": "d" * 64}]
    data.content["tokenizer"] = {"sha256": "u" * 64}
    data.content["options"] = {"append_eod": False}
    new = data.write("2")
    assert new[0].content == old[0].content
    (change,) = differences(old, new)
    assert str(change) == (
        f"{data.bin} (key): same size, 111111111111 → 222222222222: source a changed (aaaaaaaaaaaa → "
        "cccccccccccc), without source b, with source d, another tokenizer (tttttttttttt → uuuuuuuuuuuu), "
        "append_eod true → false"
    )
    third = data.write("3")
    assert digest(differences(old, new)) != digest(differences(old, third))


def test_file_written_after_its_manifest_counts_as_changed(tmp_path: Path) -> None:
    data = PreparedData(tmp_path)
    old = data.write("1")
    later = data.manifest.stat().st_mtime_ns + 2_000_000_000
    with data.bin.open("r+b") as file:
        os.pwrite(file.fileno(), b"x", BETWEEN)
    os.utime(data.bin, ns=(later, later))
    (change,) = differences(old, identify([input_file(data.bin)]))
    assert "written again on " in str(change)
    assert "changed after its manifest was written" in str(change)


def test_large_file_without_manifest_counts_as_changed_when_written_again(tmp_path: Path) -> None:
    data = PreparedData(tmp_path)
    data.write("1")
    data.manifest.unlink()
    old = identify([input_file(data.bin)])
    assert differences(old, identify([input_file(data.bin)])) == []
    os.utime(data.bin, (1, 1))
    (change,) = changes = differences(old, identify([input_file(data.bin)]))
    assert "same size, written again on 1970-01-01 00:00:01 UTC" in str(change)
    assert accepts(digest(changes), changes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"outputs": [{"path": "x.bin"}]}', '{"outputs": 3}'])
def test_damaged_manifest_is_ignored(tmp_path: Path, text: str) -> None:
    data = PreparedData(tmp_path)
    data.write("1")
    data.manifest.write_text(text)
    assert identify([input_file(data.bin)])[0].origin is None


def test_missing_and_special_files_have_no_identity(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "directory.bin").mkdir()
    names = ("pipe.bin", "directory.bin", "missing.bin", "nul\0.bin")
    assert identify([input_file(tmp_path / name) for name in names]) == ()
    assert identity.from_json("text") == identity.from_json([{"kind": "data"}, 3]) == ()


def test_hugging_face_directory_is_identified_by_its_tokenizer_files(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    files = identify([input_file(tmp_path, TOKENIZER)])
    assert [file.key for file in files] == ["key/tokenizer.json", "key/tokenizer_config.json"]


def test_a_digest_accepts_these_differences_and_no_others(tmp_path: Path) -> None:
    path, identities = tmp_path / "x.bin", []
    for content in (b"first", b"other", b"third"):
        path.write_bytes(content)
        identities.append(identify([input_file(path)]))
    first, other, third = identities
    name = digest(differences(first, other))
    assert accepts(name, differences(first, other))
    assert not accepts(name, differences(first, third))
    assert not accepts(None, differences(first, other))
    assert accepts(None, differences(first, first))


def test_data_of_other_names_are_distinguished_from_moved_ones(tmp_path: Path) -> None:
    for name, content in {"a.bin": b"a", "moved.bin": b"a", "b.bin": b"b"}.items():
        (tmp_path / name).write_bytes(content)
    a, moved, b = (identify([input_file(tmp_path / f"{name}.bin")]) for name in ("a", "moved", "b"))
    assert differences(a, moved) == differences(a, b) == []
    assert identity.find_renamed(a, moved) == ([], [])
    assert identity.find_renamed(a, b) == ([str(tmp_path / "a.bin")], [str(tmp_path / "b.bin")])


def test_launcher_runs_the_module_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(b"index")
    inputs = [input_file(tmp_path / "x.idx"), input_file(tmp_path / "lost.idx")]
    earlier = identify(inputs)
    (tmp_path / "x.idx").write_bytes(b"other")
    result = subprocess.run(
        [sys.executable, "-S", "-m", "slipway.trainer.data.identity"],
        input=json.dumps({"wanted": [vars(file) for file in inputs], "earlier": identity.to_json(earlier)}),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    answer, now = json.loads(result.stdout), identify(inputs)
    assert identity.from_json(answer["identity"]) == now
    (change,) = changes = differences(earlier, now)
    assert (answer["changed"], answer["accept"]) == ([str(change)], digest(changes))


# --- trainings

pytestmark = pytest.mark.timeout(300)


class Data:
    """A copy of the tokenized corpus that a test may exchange."""

    def __init__(self, tokenized: Any, directory: Path) -> None:
        self.prefix, self.bpe = directory / "text_document", directory / "bpe"
        shutil.copytree(tokenized.prefix.parent, directory)
        self.saved = directory / "saved"

    def config(self, steps: int, **changes: Any) -> dict[str, Any]:
        return {
            "trainer.max_steps": steps,
            "trainer.limit_val_batches": 0,
            "model.optim.sched.max_steps": 8,
            f"{PARAMS}.dirpath": str(self.saved),
            f"{PARAMS}.filename": "m-{step}",
            "model.data.data_prefix": [str(self.prefix)],
            KEYS["vocab"]: str(self.bpe / "vocab.json"),
            KEYS["merge"]: str(self.bpe / "merges.txt"),
            **changes,
        }

    def exchange_tokens(self) -> None:
        """Write the same tokens in another order: the names, the sizes and the .idx stay."""
        path = Path(f"{self.prefix}.bin")
        content = path.read_bytes()
        pairs = [content[at : at + 2] for at in range(0, len(content), 2)]
        path.write_bytes(b"".join(reversed(pairs)))

    def permute_vocabulary(self) -> None:
        path = self.bpe / "vocab.json"
        ids = json.loads(path.read_text())
        first, second = sorted(ids)[10:12]
        ids[first], ids[second] = ids[second], ids[first]
        path.write_text(json.dumps(ids))


@pytest.fixture
def data(tokenized: Any, tmp_path: Path) -> Data:
    return Data(tokenized, tmp_path / "data")


@pytest.mark.trainer
def test_exchanged_tokens_are_refused_until_they_are_accepted(trainings: Any, pool: Any, data: Data) -> None:
    def start(name: str, steps: int, world: int = 1, **changes: Any) -> Run:
        return Run(trainings, pool, name, data.config(steps, **changes), world)

    first = start("identity_first", 2)
    assert first.end() == [0], first.output()
    marker = json.loads((data.saved / "m-step=2/complete.json").read_text())
    names = {file["name"] for file in marker["data"]}
    assert names == {f"{data.prefix}.bin", f"{data.prefix}.idx", *map(str, data.bpe.iterdir())}

    # Touched, and on two ranks, as after an elastic restart: the same data.
    for path in (Path(f"{data.prefix}.bin"), data.bpe / "vocab.json"):
        os.utime(path)
    touched = start("identity_touched", 3, world=2)
    assert touched.end() == [0, 0], touched.output()

    data.exchange_tokens()
    refused = start("identity_refused", 4)
    assert refused.end() == [2], refused.output()
    output = refused.output()
    assert f"{data.prefix}.bin (model.data.data_prefix): same size" in output
    assert ".idx" not in output.partition("other data")[2]
    assert not (data.saved / "m-step=4").exists()
    match = re.search(r"resume\.accept_data=(data-[0-9a-f]{12})", output)
    assert match, output

    wrong = start("identity_wrong", 4, **{"resume.accept_data": "data-000000000000"})
    assert wrong.end() == [2], wrong.output()
    accepted = start("identity_accepted", 4, **{"resume.accept_data": match[1]})
    assert accepted.end() == [0], accepted.output()
    assert "accepted" in accepted.output()

    # The accepted data are from now on the training's; the next exchange is refused although the key stays.
    again = start("identity_again", 5)
    assert again.end() == [0], again.output()
    data.permute_vocabulary()
    permuted = start("identity_permuted", 6, **{"resume.accept_data": match[1]})
    assert permuted.end() == [2], permuted.output()
    assert f"{data.bpe / 'vocab.json'} ({KEYS['vocab']}): " in permuted.output()


@pytest.mark.trainer
def test_data_of_another_tokenizer_are_refused_at_the_first_start(
    trainings: Any, pool: Any, data: Data
) -> None:
    data.permute_vocabulary()
    refused = Run(trainings, pool, "tokenizer_refused", data.config(2), 1)
    assert refused.end() == [2], refused.output()
    output = refused.output()
    assert f"{data.prefix}: its manifest says that vocab.json and merges.txt (sha256 " in output
    assert not list(data.saved.glob("m-*"))
    accept = output.partition("resume.accept_data=")[2].split()[0]
    accepted = Run(trainings, pool, "tokenizer_ok", data.config(2, **{"resume.accept_data": accept}), 1)
    assert accepted.end() == [0], accepted.output()


@pytest.mark.trainer
def test_other_names_are_reported_and_moved_data_are_the_same(trainings: Any, pool: Any, data: Data) -> None:
    first = Run(trainings, pool, "names_first", data.config(2), 1)
    assert first.end() == [0], first.output()
    moved = data.prefix.with_name("moved")
    for suffix in (".bin", ".idx"):
        Path(f"{data.prefix}{suffix}").rename(f"{moved}{suffix}")
    second = Run(
        trainings, pool, "names_moved", data.config(3, **{"model.data.data_prefix": [str(moved)]}), 1
    )
    assert second.end() == [0], second.output()
    assert "other data" not in second.output()

    data.prefix = data.prefix.with_name("another")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{moved}{suffix}", f"{data.prefix}{suffix}")
    data.exchange_tokens()
    third = Run(trainings, pool, "names_other", data.config(4), 1)
    assert third.end() == [0], third.output()
    assert f"the data changed: {moved}.bin → {data.prefix}.bin" in third.output()


@pytest.mark.trainer
def test_checkpoint_without_identity_of_its_data_is_continued(trainings: Any, pool: Any, data: Data) -> None:
    first = Run(trainings, pool, "older_first", data.config(2), 1)
    assert first.end() == [0], first.output()
    path = data.saved / "m-step=2/complete.json"
    marker = json.loads(path.read_text())
    del marker["data"], marker["checksums"]
    path.write_text(json.dumps(marker))
    data.exchange_tokens()
    second = Run(trainings, pool, "older_second", data.config(3), 1)
    assert second.end() == [0], second.output()
