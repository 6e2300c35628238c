"""Tokenizers are written so that transformers loads them and encodes as the training's did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.conversion.importing import import_weights
from slipway.trainer.conversion.spec import Conversion
from slipway.trainer.conversion.tokenizer_files import check_tokenizer, write_tokenizer
from slipway.trainer.data.identity import identify, input_files
from slipway.trainer.data.vocabulary import Vocabulary, read_pieces, read_vocabulary
from tests.trainer.conftest import Tokenized
from tests.trainer.conversion.test_weight_map import description

pytestmark = pytest.mark.trainer
TEXT = "the train of größe 日本  alpha\n"


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_gpt2s_two_files_become_a_tokenizer(tokenized: Tokenized, tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    files = Tokenizer(
        vocab_file=tokenized.tokenizer / "vocab.json", merge_file=tokenized.tokenizer / "merges.txt"
    )
    words = read_vocabulary(files, mock=False)
    model = replace(description({}), tokenizer=files, vocabulary=words)
    names = write_tokenizer(tmp_path, model, None)
    tokenizer = load_tokenizer(tmp_path)
    expected = ByteLevelBPETokenizer(str(files.vocab_file), str(files.merge_file)).encode(TEXT).ids
    assert tokenizer(TEXT)["input_ids"] == expected
    assert tokenizer.decode(expected) == TEXT
    assert tokenizer.eos_token_id == words.end_of_text
    assert tokenizer.decode([words.end_of_text, *expected], skip_special_tokens=True) == TEXT
    assert {"tokenizer.json", "vocab.json", "merges.txt"} <= set(names)


def test_written_pair_is_compared_with_the_trainings(tokenized: Tokenized, tmp_path: Path) -> None:
    files = Tokenizer(
        vocab_file=tokenized.tokenizer / "vocab.json", merge_file=tokenized.tokenizer / "merges.txt"
    )
    model = replace(description({}), tokenizer=files, vocabulary=read_vocabulary(files, mock=False))
    write_tokenizer(tmp_path, model, None)
    check_tokenizer(tmp_path, model, None)
    # In the data the name of a special token was text.
    assert len(load_tokenizer(tmp_path)("<|endoftext|>")["input_ids"]) > 1
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][::2]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"'.*' is \[.*\], and \[.*\] in the training"):
        check_tokenizer(tmp_path, model, None)


def test_a_directory_of_hugging_faces_is_copied(tokenized: Tokenized, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    files = Tokenizer(
        vocab_file=tokenized.tokenizer / "vocab.json", merge_file=tokenized.tokenizer / "merges.txt"
    )
    model = replace(description({}), tokenizer=files, vocabulary=read_vocabulary(files, mock=False))
    write_tokenizer(tmp_path / "source", model, None)
    again = replace(model, tokenizer=Tokenizer("huggingface", str(tmp_path / "source")))
    names = write_tokenizer(tmp_path / "target", again, None)
    assert {name: (tmp_path / "target" / name).read_bytes() for name in names} == {
        path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()
    }


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("spiece.model",)])
def test_options_beside_a_vocabulary_are_copied(tmp_path: Path, names: tuple[str, ...]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in names:
        (source / name).write_text("{}")
    options = {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ messages }}", "add_bos_token": True}
    (source / "tokenizer_config.json").write_text(json.dumps(options))
    assert set(write_tokenizer(target, description({}), source)) == {*names, "tokenizer_config.json"}
    assert json.loads((target / "tokenizer_config.json").read_text()) == options


def test_tokenizer_that_changed_since_the_training_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    data = identify(input_files([], {"model.tokenizer.type": source}))
    model = replace(
        description({}),
        tokenizer=Tokenizer("huggingface", str(source)),
        checksums={file.name: file.checksum for file in data},
    )
    assert write_tokenizer(target, model, None) == ["tokenizer.json", "tokenizer_config.json"]
    (source / "tokenizer.json").write_text('{"model": 1}')
    (target / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json changed since .*: sha256:\w+ then, sha256:\w+ now"):
        write_tokenizer(target, model, None)
    assert not (target / "tokenizer.json").exists()
    assert "tokenizer.json" in write_tokenizer(target, model, source)


def test_tokenizer_directory_without_its_file_is_refused_by_an_import(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    conversion = Conversion(tmp_path, "slipway", tmp_path / "out", tokenizer_dir=tmp_path)
    with pytest.raises(UserError, match=r"conversion\.tokenizer_dir=.*: it has no tokenizer\.json"):
        import_weights(conversion, tmp_path)


def test_word_pieces_have_the_sentinels_of_a_t5_behind_them(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "train", "##s"]
    path = tmp_path / "bert.txt"
    path.write_text("\n".join(tokens) + "\n")
    files = Tokenizer(name="BertWordPieceLowerCase", vocab_file=path)
    words = read_vocabulary(files, mock=False).add_sentinels(3)
    model = replace(description({}), tokenizer=files, vocabulary=words)
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", model, None)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer("The trains<extra_id_0>", add_special_tokens=False)["input_ids"] == [5, 6, 7, 8]
    assert len(tokenizer) == words.size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (3, 0, 2)


def test_a_sentencepiece_model_encodes_as_before(corpus: Path, tmp_path: Path) -> None:
    import sentencepiece

    lines = [line for path in sorted(corpus.glob("part*/*.txt")) for line in path.read_text().splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    path = tmp_path / "pieces.model"
    size, end = read_pieces(path)
    assert end is not None
    model = replace(
        description({}), tokenizer=Tokenizer("sentencepiece", "", path), vocabulary=Vocabulary(size, end, "")
    )
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", model, None)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode("the train of alpha größe")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer("the train of alpha größe")["input_ids"] == expected
    assert tokenizer.eos_token_id == end


def test_another_tokenizer_than_the_trainings_is_refused(tokenized: Tokenized, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another tokenizer than the training's"):
        write_tokenizer(
            tmp_path, replace(description({}), vocabulary=Vocabulary(200, 0, "")), tokenized.tokenizer
        )


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"it has no tokenizer; expected tokenizer\.json"):
        write_tokenizer(tmp_path, description({}), tmp_path)


def test_mock_data_write_no_tokenizer(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path, description({}), None) == []
