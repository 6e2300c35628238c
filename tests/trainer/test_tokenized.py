"""The tokenizer that made the data is compared with the training's, however either is written down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.data import Data
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.data import tokenized
from slipway.trainer.data.tokenized import mismatch, read_data_tokenizer, read_training_tokenizer
from tests.corpus.tokenized import OTHER_TEXTS, TEXTS, TokenizedSet, tokenizer_of, write_tokenizer
from tests.trainer.conftest import REPOSITORY

pytestmark = pytest.mark.trainer


def data_of(prepared: TokenizedSet, tokenizer: Tokenizer, **changes: Any) -> Data:
    data = Data("mmap", None, None, None, None, False, False, False, tokenizer)
    return replace(data, **changes)


KINDS = ("gpt2", "huggingface", "sentencepiece")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizedSet]:
    directory = tmp_path_factory.mktemp("prepared")
    return {kind: TokenizedSet(directory / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_preparation_and_a_training_describe_a_tokenizer_alike(
    prepared: dict[str, TokenizedSet], kind: str
) -> None:
    own = read_training_tokenizer(prepared[kind].tokenizer)
    assert own is not None
    assert own._replace(files=prepared[kind].record.files) == prepared[kind].record
    assert mismatch(prepared[kind].record, own, True) is None
    data = data_of(
        prepared[kind], replace(prepared[kind].tokenizer, override_size=4096), reset_attention=True
    )
    tokenized.check(data, [prepared[kind].prefix])


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_a_tokenizer_with_as_many_tokens_and_the_same_end_are_refused(
    prepared: dict[str, TokenizedSet], tmp_path: Path, kind: str
) -> None:
    other = TokenizedSet(tmp_path / "other", kind, OTHER_TEXTS)
    own = other.record
    data = data_of(prepared[kind], other.tokenizer)
    with pytest.raises(UserError, match=rf"{prepared[kind].prefix}: its manifest says that ") as error:
        tokenized.check(data, [other.prefix, prepared[kind].prefix])
    assert str(prepared[kind].record.sha256)[:12] in str(error.value)
    assert str(own.sha256)[:12] in str(error.value)
    accept = str(error.value).partition("resume.accept_data=")[2].split()[0]
    tokenized.check(replace(data, accepted=accept), [other.prefix, prepared[kind].prefix])
    with pytest.raises(UserError):
        tokenized.check(replace(data, accepted="tokenizer-000000000000"), [prepared[kind].prefix])


@pytest.mark.parametrize("data", KINDS)
@pytest.mark.parametrize("training", KINDS)
def test_forms_of_tokenizers_that_cannot_be_one_are_refused_and_others_noted(
    prepared: dict[str, TokenizedSet], data: str, training: str
) -> None:
    own = read_training_tokenizer(prepared[training].tokenizer)
    assert own is not None
    record = prepared[data].record._replace(end=own.end, size=own.size)
    expected = None if data == training else "huggingface" not in (data, training)
    problem = mismatch(record, own, True)
    assert (problem and problem[1]) == expected
    if expected is False:
        more = mismatch(record._replace(size=own.size + 1), own, True)
        assert more is not None and more[1]


@pytest.mark.parametrize("matters", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "huggingface", "sentencepiece"])
def test_another_end_of_documents_is_refused_where_it_is_used(
    tmp_path: Path, kind: str, matters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    token = "<s>" if kind == "sentencepiece" else "<|im_end|>"
    other = TokenizedSet(tmp_path / "other", kind, tokenizer={"end_of_document": token})
    for name in ("eod_mask_loss", "reset_positions", "reset_attention"):
        data = data_of(other, other.tokenizer, **{name: matters})
        if matters:
            with pytest.raises(UserError, match="its documents end with the token 1, and the training takes"):
                tokenized.check(data, [other.prefix])
        else:
            tokenized.check(data, [other.prefix])
    without = other.record._replace(end=None)
    own = read_training_tokenizer(other.tokenizer)
    assert own is not None and mismatch(without, own, True) is None


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"outputs": [{"path": "x.bin", "size": 1}]}', "FIFO"])
def test_data_without_a_manifest_of_their_own_are_not_known(
    prepared: dict[str, TokenizedSet], tmp_path: Path, manifest: str | None
) -> None:
    prefix, path = tmp_path / "x", tmp_path / "x.manifest.json"
    shutil.copy(f"{prepared['gpt2'].prefix}.bin", f"{prefix}.bin")
    if manifest == "FIFO":
        os.mkfifo(path)
    elif manifest is not None:
        path.write_text(manifest)
    assert read_data_tokenizer(prefix) is None
    tokenized.check(data_of(prepared["gpt2"], prepared["sentencepiece"].tokenizer), [prefix])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_that_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path / "tokenizer", "huggingface", TEXTS)
    path = tmp_path / "tokenizer" / name
    path.unlink()
    os.mkfifo(path)
    assert read_training_tokenizer(tokenizer_of(tmp_path / "tokenizer", "huggingface")) is None


def test_copied_and_split_data_have_their_tokenizer(
    prepared: dict[str, TokenizedSet], tmp_path: Path
) -> None:
    """The manifest may have been written before the copy of the data, and names all splits."""
    source = prepared["gpt2"].prefix
    shutil.copy(f"{source}.manifest.json", tmp_path / "y.manifest.json")
    shutil.copy(f"{source}.bin", tmp_path / "y.bin")
    assert read_data_tokenizer(tmp_path / "y") == prepared["gpt2"].record
    split = TokenizedSet(tmp_path / "split", "gpt2", splits={"train": 0.8, "validation": 0.2})
    for name in ("train", "validation"):
        assert read_data_tokenizer(Path(f"{split.prefix}_{name}")) == prepared["gpt2"].record


def test_the_program_answers_with_the_standard_library_alone(prepared: dict[str, TokenizedSet]) -> None:
    names = {"gpt": str(prepared["gpt2"].prefix), "pieces": str(prepared["sentencepiece"].prefix)}
    tokenizer = prepared["sentencepiece"].tokenizer
    question = {
        "data": names,
        "tokenizer": {"library": "sentencepiece", "name": "", "model": str(tokenizer.model)},
        "ends_matter": True,
    }
    done = subprocess.run(
        [sys.executable, "-S", "-m", "slipway.trainer.data.tokenized"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    answer = json.loads(done.stdout)
    assert [(name, certain) for name, _, certain in answer["others"]] == [("gpt", True)]
    assert answer["accept"].startswith("tokenizer-") and answer["unknown"] == []
