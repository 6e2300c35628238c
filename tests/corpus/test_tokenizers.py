"""Tokenizers that are fetched, local or trained give the ids of the libraries that made them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.corpus import spec
from slipway.corpus.fetching import Policy
from slipway.corpus.sources import collect
from slipway.corpus.tokenizers import TokenizerFiles, describe, obtain, open_decoder, open_tokenizer
from tests.corpus.servers import FaultyServer, faulty_server

pytestmark = pytest.mark.trainer

QUICK = Policy(attempts=2, first_wait=0.01, longest_wait=0.02, timeout=5.0)
TEXTS = ["The first document.", "A second one,\n\n  with <|endoftext|> in it", "Ünïcödé, 日本語, 🙂", "x"]


def corpus_text() -> str:
    chance = random.Random(5)
    words = ["river", "stone", "the", "a", "of", "running", "Ünder", "and", "42", "light", "lighter"]
    random_words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(60)]
    return "\n".join(" ".join(chance.choices(words + random_words, k=20)) for _ in range(200))


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(corpus_text())
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return a vocabulary and merges in GPT-2's form."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [corpus_text(), "item 1234 " * 200], vocab_size=300, special_tokens=["<|endoftext|>"]
    )
    directory = tmp_path_factory.mktemp("gpt2")
    tokenizer.save_model(str(directory))
    return (directory / "vocab.json").read_bytes(), (directory / "merges.txt").read_bytes()


@pytest.fixture(scope="module")
def fast() -> bytes:
    """Return a `tokenizer.json` as Llama 3's: it has tokens of its own, one of which precedes each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([corpus_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    tokenizer.enable_truncation(4)
    return tokenizer.to_str().encode()


@pytest.fixture(scope="module")
def pieces() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus_text().splitlines()),
        model_writer=model,
        vocab_size=80,
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )
    return model.getvalue()


def preparation(tmp_path: Path, text: Path, **options: Any) -> spec.Preparation:
    places = {"output_prefix": str(tmp_path / "out/corpus"), "tokenizer_dir": str(tmp_path / "bpe")}
    return spec.read({"inputs": [str(text)], "vocab_size": 300, **places, **options})


def obtain_tokenizer(options: spec.Preparation) -> TokenizerFiles:
    return obtain(options, collect(options, QUICK), QUICK)


def test_a_trained_tokenizer_is_the_same_each_time_and_as_the_library_trains_it(
    tmp_path: Path, text: Path
) -> None:
    from tokenizers import ByteLevelBPETokenizer

    files = obtain_tokenizer(preparation(tmp_path, text))
    expected = ByteLevelBPETokenizer()
    expected.train_from_iterator(
        [text.read_text()], vocab_size=300, min_frequency=2, special_tokens=["<|endoftext|>"]
    )
    expected.save_model(str(tmp_path))
    # End-of-text in a document is text like any other when it is read, as in Megatron.
    expected = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ids = open_tokenizer(files)(TEXTS)
    assert ids == [expected.encode(sample).ids for sample in TEXTS]
    assert [expected.decode(token_ids) for token_ids in ids] == TEXTS
    assert (files.kind, files.vocabulary_size, files.end_of_document) == ("gpt2", 300, 0)
    assert sorted(path.name for path in (tmp_path / "bpe").iterdir()) == ["merges.txt", "vocab.json"]
    program = (
        "import sys; from pathlib import Path; from slipway.corpus import spec, sources, tokenizers\n"
        "places = {'output_prefix': sys.argv[2] + '/out', 'tokenizer_dir': sys.argv[2] + '/bpe'}\n"
        "options = spec.read({'inputs': [sys.argv[1]], 'vocab_size': 300, **places})\n"
        "print(tokenizers.obtain(options, sources.collect(options)).sha256)"
    )
    command = [sys.executable, "-c", program, str(text), str(tmp_path / "again")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == files.sha256


def test_a_tokenizer_that_is_there_is_used_and_not_trained_again(tmp_path: Path, text: Path) -> None:
    first = obtain_tokenizer(preparation(tmp_path, text))
    text.write_text("quite another text")
    # A run that is killed after its last file leaves this file.
    unfinished = first.paths[0].with_name(".unfinished-training")
    unfinished.touch()
    assert obtain_tokenizer(preparation(tmp_path, text)) == first
    assert not unfinished.exists()


def test_gpt2s_files_are_fetched_once(
    tmp_path: Path, text: Path, server: FaultyServer, gpt2: tuple[bytes, bytes]
) -> None:
    vocab, merges = gpt2
    tokenizer = {
        "vocab_url": server.put("encoder.json", vocab),
        "vocab_sha256": hashlib.sha256(vocab).hexdigest(),
        "merges_url": server.put("vocab.bpe", merges),
        "merges_sha256": hashlib.sha256(merges).hexdigest(),
    }
    options = preparation(tmp_path, text, tokenizer=tokenizer)
    files = obtain_tokenizer(options)
    assert [path.read_bytes() for path in files.paths] == [vocab, merges]
    assert [path.name for path in files.paths] == ["vocab.json", "merges.txt"]
    assert files.sha256 == hashlib.sha256(vocab + merges).hexdigest()
    assert files.vocabulary_size == 300
    server.files.clear()
    assert obtain_tokenizer(options) == files == describe(options)
    assert server.requests["/encoder.json"] == 1


def test_another_tokenizer_in_the_directory_is_neither_replaced_nor_used(
    tmp_path: Path, text: Path, server: FaultyServer, gpt2: tuple[bytes, bytes]
) -> None:
    obtain_tokenizer(preparation(tmp_path, text, vocab_size=280))
    before = (tmp_path / "bpe/vocab.json").read_bytes()
    tokenizer = {
        "vocab_url": server.put("encoder.json", gpt2[0]),
        "merges_url": server.put("vocab.bpe", gpt2[1]),
    }
    with pytest.raises(UserError, match=r"vocab\.json is there and is not that of http://.*encoder\.json"):
        obtain_tokenizer(preparation(tmp_path, text, tokenizer=tokenizer))
    assert (tmp_path / "bpe/vocab.json").read_bytes() == before


def test_a_fetched_tokenizer_of_another_sha256_is_refused(
    tmp_path: Path, text: Path, server: FaultyServer, fast: bytes
) -> None:
    tokenizer = {"url": server.put("tokenizer.json", fast), "sha256": "ab" * 32}
    with pytest.raises(UserError, match=r"tokenizer\.json: its sha256 is [0-9a-f]{64}, expected abab"):
        obtain_tokenizer(preparation(tmp_path, text, tokenizer=tokenizer))
    assert not (tmp_path / "bpe").exists()


@pytest.mark.parametrize("way", ["file", "url"])
def test_a_tokenizer_json_gives_the_ids_of_transformers(
    tmp_path: Path, text: Path, server: FaultyServer, fast: bytes, way: str
) -> None:
    """The token that begins a text is left out, and nothing is truncated although the file asks for it."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "published/tokenizer.json"
    path.parent.mkdir()
    path.write_bytes(fast)
    tokenizer = {"file": str(path)} if way == "file" else {"url": server.put("resolve/tokenizer.json", fast)}
    files = obtain_tokenizer(preparation(tmp_path, text, tokenizer=tokenizer))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path))
    expected = [reference(sample, add_special_tokens=False, truncation=False).input_ids for sample in TEXTS]
    assert open_tokenizer(files)(TEXTS) == expected
    assert (files.kind, files.vocabulary_size, files.end_of_document) == ("tokenizer.json", 300, 1)
    assert files.sha256 == hashlib.sha256(fast).hexdigest()


def test_the_trainer_reads_a_fetched_tokenizer_json_as_it_lies_there(
    tmp_path: Path, text: Path, server: FaultyServer, fast: bytes
) -> None:
    from slipway.trainer.config.tokenizer import Tokenizer
    from slipway.trainer.data.vocabulary import read_vocabulary

    url = server.put("tokenizer.json", fast)
    files = obtain_tokenizer(preparation(tmp_path, text, tokenizer={"url": url}))
    tokenizer = Tokenizer("huggingface", str(tmp_path / "bpe"), None, None, None, None)
    vocabulary = read_vocabulary(tokenizer, mock=False)
    assert (vocabulary.size, vocabulary.end_of_text) == (files.vocabulary_size, files.end_of_document)


def test_the_end_of_a_document_is_that_of_the_configuration_or_of_the_file_beside(
    tmp_path: Path, text: Path, fast: bytes
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(fast)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|begin_of_text|>"}}))
    assert describe(preparation(tmp_path, text, tokenizer={"file": str(path)})).end_of_document == 0
    named = {"file": str(path), "end_of_document": "<|end_of_text|>"}
    assert describe(preparation(tmp_path, text, tokenizer=named)).end_of_document == 1
    with pytest.raises(UserError, match="lacks the token <eot>, which is to end documents"):
        describe(preparation(tmp_path, text, tokenizer={**named, "end_of_document": "<eot>"}))


@pytest.mark.parametrize("way", ["file", "url", "directory"])
def test_a_sentencepiece_model_gives_the_ids_of_its_library(
    tmp_path: Path, text: Path, server: FaultyServer, pieces: bytes, way: str
) -> None:
    import sentencepiece

    path = tmp_path / ("bpe/tokenizer.model" if way == "directory" else "llama.model")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pieces)
    ways = {"file": {"file": str(path)}, "url": {"url": server.put("llama.model", pieces)}, "directory": {}}
    files = obtain_tokenizer(preparation(tmp_path, text, tokenizer=ways[way]))
    reference = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    assert open_tokenizer(files)(TEXTS) == [reference.encode_as_ids(sample) for sample in TEXTS]
    assert files.kind == "sentencepiece"
    assert (files.vocabulary_size, files.end_of_document) == (reference.get_piece_size(), reference.eos_id())
    named = {**ways[way], "end_of_document": "<s>"}
    assert describe(preparation(tmp_path, text, tokenizer=named)).end_of_document == reference.bos_id()
    with pytest.raises(UserError, match="lacks the piece <eot>"):
        describe(preparation(tmp_path, text, tokenizer={**named, "end_of_document": "<eot>"}))


def _changed(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return a ``tokenizer.json`` with one of the things that GPT-2's two files do not say."""
    changes: dict[str, dict[str, Any]] = {
        "digits": {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                ],
            }
        },
        "normalizer": {"normalizer": {"type": "NFKC"}},
        "prefix": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        "added": {
            "added_tokens": [
                {
                    "id": 300,
                    "content": "item",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ]
        },
    }
    return {**content, **changes[name]}


@pytest.mark.parametrize("change", ["digits", "normalizer", "prefix", "added"])
@pytest.mark.parametrize("pieces_too", [False, True])
def test_a_tokenizer_json_is_taken_before_the_files_beside_it(
    tmp_path: Path, text: Path, gpt2: tuple[bytes, bytes], pieces: bytes, change: str, pieces_too: bool
) -> None:
    """The trainer, the decoder and Hugging Face read such a directory of a published model alike."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    from slipway.trainer.config.tokenizer import Tokenizer as Configured
    from slipway.trainer.data.vocabulary import read_vocabulary

    directory = tmp_path / "bpe"
    directory.mkdir()
    pair = [directory / "vocab.json", directory / "merges.txt"]
    for path, content in zip(pair, gpt2, strict=True):
        path.write_bytes(content)
    if pieces_too:
        (directory / "tokenizer.model").write_bytes(pieces)
    whole = json.loads(ByteLevelBPETokenizer(*map(str, pair)).to_str())
    (directory / "tokenizer.json").write_text(json.dumps(_changed(change, whole)))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    files = obtain_tokenizer(preparation(tmp_path, text))
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = ["the year 2024 and item 1234 ＦＵＬＬ ﬁ", *TEXTS]
    ids = open_tokenizer(files)(texts)
    assert ids == [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    assert ids[0] != ByteLevelBPETokenizer(*map(str, pair)).encode(texts[0]).ids
    assert files.kind == "tokenizer.json"
    vocabulary = read_vocabulary(Configured("huggingface", str(directory)), mock=False)
    assert (vocabulary.size, vocabulary.end_of_text) == (files.vocabulary_size, files.end_of_document)
    decoder = open_decoder([directory])
    assert decoder.size == files.vocabulary_size
    assert decoder.decode(ids[0]) == reference.decode(ids[0], skip_special_tokens=False)
    # Half a pair is no mistake beside a whole tokenizer.
    pair[1].unlink()
    assert describe(preparation(tmp_path, text)) == files


def test_gpt2s_files_that_are_named_by_url_are_taken_before_a_tokenizer_json(
    tmp_path: Path, text: Path, server: FaultyServer, gpt2: tuple[bytes, bytes], fast: bytes
) -> None:
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe/tokenizer.json").write_bytes(fast)
    urls = {
        "vocab_url": server.put("encoder.json", gpt2[0]),
        "merges_url": server.put("vocab.bpe", gpt2[1]),
    }
    assert obtain_tokenizer(preparation(tmp_path, text, tokenizer=urls)).kind == "gpt2"


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "llama", "small.json", "pieces.json"])
def test_one_file_is_known_by_its_content_where_it_is_encoded_and_decoded(
    tmp_path: Path, text: Path, fast: bytes, pieces: bytes, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(fast if name == "small.json" else pieces)
    files = obtain_tokenizer(preparation(tmp_path, text, tokenizer={"file": str(path)}))
    decoder = open_decoder([path])
    assert decoder.size == files.vocabulary_size
    assert decoder.decode(open_tokenizer(files)(["the river light"])[0]).strip() == "the river light"


BAD: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "nothing": ({}, {}, "no tokenizer is there; run fetch"),
    "half a pair": ({"bpe/vocab.json": "{}"}, {}, "vocab.json is there without merges.txt"),
    "a vocabulary without the token": (
        {"bpe/vocab.json": '{"a": 0}', "bpe/merges.txt": ""},
        {},
        "lacks the token <|endoftext|>; tokenizer.end_of_document names another",
    ),
    "a vocabulary with gaps": (
        {"bpe/vocab.json": '{"a": 7}', "bpe/merges.txt": ""},
        {},
        "expected tokens with ids from 0",
    ),
    "a list": ({"bpe/vocab.json": "[1]", "bpe/merges.txt": ""}, {}, "not a GPT-2 vocabulary"),
    "no JSON": ({"bpe/vocab.json": "<html>", "bpe/merges.txt": ""}, {}, "not a GPT-2 vocabulary"),
    "no tokenizer.json": ({"t.json": '{"a": 1}'}, {"file": "t.json"}, "t.json: not a tokenizer.json"),
    "no model": (
        {"t.model": "some text"},
        {"file": "t.model"},
        "neither a tokenizer.json of Hugging Face nor",
    ),
    "an empty model": ({"t.model": ""}, {"file": "t.model"}, "t.model: empty file"),
    "no file": ({}, {"file": "absent.model"}, "absent.model: No such file or directory"),
    "another sha256": ({"t": "{}"}, {"file": "t", "sha256": "ab" * 32}, "its sha256 is 44136fa355b3678a11"),
}


@pytest.mark.parametrize("case", BAD)
def test_tokenizers_that_are_none_are_named(tmp_path: Path, text: Path, case: str) -> None:
    files, tokenizer, message = BAD[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    if "file" in tokenizer:
        tokenizer = {**tokenizer, "file": str(tmp_path / tokenizer["file"])}
    with pytest.raises(UserError) as raised:
        describe(preparation(tmp_path, text, tokenizer=tokenizer))
    assert message in str(raised.value)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_no_tokenizer_is_trained_on_sources_without_text(tmp_path: Path, on_error: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "some text"}\n')
    preparation = spec.read(
        {
            "inputs": [str(tmp_path / "a.jsonl")],
            "output_prefix": str(tmp_path / "out"),
            "tokenizer_dir": str(tmp_path / "bpe"),
            "text_key": "contents",
            "on_error": on_error,
        }
    )
    with pytest.raises(
        UserError, match=r"a\.jsonl, byte 0: no key 'contents' among content; did you mean 'content'"
    ):
        obtain(preparation, collect(preparation))
    assert not (tmp_path / "bpe").exists()
