"""The tokenizer written of a SentencePiece model gives its ids through transformers, or is refused."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.conversion.huggingface import write_model_files
from slipway.trainer.conversion.sentencepiece_tokenizer import PieceModel
from slipway.trainer.data.vocabulary import read_vocabulary
from tests.trainer.conversion.test_weight_map import description
from tests.trainer.parity.test_parity import FAMILIES

pytestmark = pytest.mark.trainer

SYMBOLS = ["<sym>", "①", "\t", "\n", "ab"]
BYTES, UNIGRAM, BPE = {"byte_fallback": True}, {"model_type": "unigram"}, {"model_type": "bpe"}
AS_THEY_ARE = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: Mapping[str, dict[str, Any]] = {
    "bpe": BPE,
    "unigram": UNIGRAM,
    "char": {"model_type": "char"},
    "llama": {**BPE, **BYTES, **AS_THEY_ARE, "split_digits": True, "allow_whitespace_only_pieces": True},
    "mistral": {**BPE, **BYTES, **AS_THEY_ARE, "control_symbols": ["[INST]", "[/INST]"]},
    "no-prefix": {**BPE, "add_dummy_prefix": False},
    "unigram-no-prefix": {**UNIGRAM, "add_dummy_prefix": False},
    "spaces": {**BPE, "remove_extra_whitespaces": False},
    "across-words": {**BPE, **BYTES, "split_by_whitespace": False},
    "folded": {**BPE, "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram-folded": {**UNIGRAM, "normalization_rule_name": "nfkc_cf", "remove_extra_whitespaces": False},
    "unigram-bytes": {**UNIGRAM, **BYTES, "normalization_rule_name": "nfkc", "split_digits": True},
    "symbols": {**BPE, **BYTES, "user_defined_symbols": SYMBOLS},
    "unigram-symbols": {**UNIGRAM, **BYTES, "user_defined_symbols": SYMBOLS},
    "symbols-no-prefix": {**BPE, "user_defined_symbols": ["<sym>", "ab"], "add_dummy_prefix": False},
    "other-ids": {**UNIGRAM, "unk_id": 3, "bos_id": 0, "eos_id": 1, "pad_id": 2, "unk_piece": "[UNK]"},
    # As T5's spiece.model.
    "t5": {**UNIGRAM, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
LINES = [
    "The train of größe and the 1234 alphabets at 2024, in all of them.",
    "한국어 각 문자 日本語 naïve Ángel été ガ fi 1 A",
    "def  f(x): return x + 1  # the    comment about the train",
]
TEXTS = [
    *(
        "",
        " ",
        "x    y = 1",
        " lead",
        "trail  ",
        "\t\ta\n\n b\r\n",
        "a <s> b",
        "<s>",
        "</s>",
        "<unk>",
        "▁",
        "▁ a▁",
    ),
    *(
        "a<sym>b",
        "<sym>",
        " <sym>  x",
        "<0x41>",
        "[INST] a",
        "① ab①\tab",
        "1234567",
        "Hello TRAIN",
        "\x01 a\x7f",
    ),
    *(
        "e\u0302\u0301",
        "q\u0307\u0323",
        "ｶﾞ",
        "①\u0301",
        "Ａ\u0301",
        "ŉ ﬁ ½ \u00a8",
        "한국어",
        "👩‍👧",
        "\U00016ebb'll",
    ),
    unicodedata.normalize("NFD", "한국어 été Ángel ồ ự ǭ ガ ொ"),
    "".join(map(chr, range(0x20, 0x500))),
    *LINES,
]


def train(directory: Path, options: Mapping[str, Any], lines: list[str] = LINES) -> Path:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_prefix=str(directory / "pieces"),
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return directory / "pieces.model"


def model_of(path: Path) -> Description:
    tokenizer = Tokenizer("sentencepiece", "", path)
    return replace(
        description(FAMILIES["llama"]), tokenizer=tokenizer, vocabulary=read_vocabulary(tokenizer, mock=False)
    )


def write(directory: Path, model: Description, tokenizer_dir: Path | None = None) -> Any:
    """Write a model's files but its weights; return its tokenizer as its users load it."""
    import torch
    from transformers import AutoTokenizer

    directory.mkdir()
    write_model_files(directory, model, torch.float32, tokenizer_dir, {})
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    path = train(tmp_path, KINDS[kind])
    tokenizer, model = write(tmp_path / "out", model_of(path)), PieceModel(path)
    for text in TEXTS:
        expected = model.processor.encode(text)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == expected or model.is_tie(expected, ids), text
        # What one library reads the other writes.
        if text in LINES:
            assert tokenizer.decode(ids) == model.processor.decode(expected)
    assert tokenizer.eos_token_id == model.processor.eos_id()
    end = [*model.processor.encode("train"), model.processor.eos_id()]
    assert tokenizer.decode(end, skip_special_tokens=True) == "train"


@pytest.mark.parametrize("options", [UNIGRAM, {**UNIGRAM, **BYTES}, {**UNIGRAM, "add_dummy_prefix": False}])
def test_control_pieces_in_a_text_are_text_where_no_piece_has_their_characters(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = train(tmp_path, options, ["the train of words without any signs", "s unk the other words of it"])
    tokenizer, processor = write(tmp_path / "out", model_of(path)), PieceModel(path).processor
    for text in ("a <s> b", "<s>", "</s><unk>", "the<s>train <0x41>"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == processor.encode(text)


def test_sentinels_of_a_t5_are_tokens_behind_the_models(tmp_path: Path) -> None:
    path = train(tmp_path, KINDS["t5"])
    model = model_of(path)
    model = replace(model, vocabulary=model.vocabulary.add_sentinels(3))
    tokenizer = write(tmp_path / "out", model)
    pieces = model.vocabulary.size - 3
    ids = tokenizer("the<extra_id_0> train<extra_id_2>", add_special_tokens=False)["input_ids"]
    assert [number for number in ids if number >= pieces] == [pieces, pieces + 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, "model_type=word, which no tokenizer.json expresses"),
        ({**BPE, "user_defined_symbols": ["  "]}, r"'.*' is \[.*\], and \[.*\] in the training"),
        ({**BPE, "normalization_rule_tsv": "rules.tsv"}, "user-defined normalization_rule_tsv"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.tsv").write_text("61 62\t63\n")
    model = model_of(train(tmp_path, options))
    with pytest.raises(UserError, match=message) as error:
        write(tmp_path / "out", model)
    assert "conversion.tokenizer_dir=/path" in str(error.value)
    # A directory with a tokenizer.json of one's own is the way out.
    other = train(tmp_path, BPE)
    write(tmp_path / "other", model_of(other))
    write(tmp_path / "third", model, tmp_path / "other")


def test_a_class_of_transformers_that_reads_a_tokenizer_otherwise_is_replaced(tmp_path: Path) -> None:
    """LlamaTokenizer, say, puts its own pre-tokenizer in place of the file's."""
    write(tmp_path / "source", model_of(train(tmp_path, BPE)))
    options = json.loads((tmp_path / "source/tokenizer_config.json").read_text())
    options |= {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(options))
    files = Tokenizer("huggingface", str(tmp_path / "source"))
    model = replace(model_of(tmp_path / "pieces.model"), tokenizer=files)
    tokenizer = write(tmp_path / "out", model)
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_file(str(tmp_path / "source/tokenizer.json"))
    assert tokenizer("x    y é", add_special_tokens=False)["input_ids"] == fast.encode("x    y é").ids
    options = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert options["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "auto_map" not in options
