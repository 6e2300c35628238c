"""Texts of a checkpoint's model: those that Hugging Face's model writes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from slipway.trainer.conversion.convert import convert
from slipway.trainer.generation import Request, _draw
from tests.trainer.conversion.checkpoints import write_checkpoint
from tests.trainer.conversion.test_export import conversion
from tests.trainer.conversion.test_weight_map import QWEN2, SIZE, STABLELM, description
from tests.trainer.parity.test_parity import FAMILIES

pytestmark = pytest.mark.trainer

PROMPTS = ("the train of", "", "Größe: ")
TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tokenizer with as many tokens as the models."""
    from tokenizers import ByteLevelBPETokenizer

    directory = tmp_path_factory.mktemp("bpe")
    bpe = ByteLevelBPETokenizer()
    texts = [
        "the train of alpha and beta, the train of gamma and delta; größer, am größten, alphabetisch"
    ] * 2
    bpe.train_from_iterator(texts, vocab_size=SIZE, special_tokens=["<|endoftext|>"])
    assert bpe.get_vocab_size() == SIZE
    bpe.save_model(str(directory))
    return directory


@pytest.mark.parametrize("changes", [FAMILIES["gpt2"], QWEN2, STABLELM], ids=["gpt2", "qwen2", "stablelm"])
def test_the_most_probable_tokens_are_those_of_the_converted_model(
    tmp_path: Path, tokenizer: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    import transformers

    checkpoints, model = tmp_path / "checkpoints", description(changes)
    write_checkpoint(checkpoints, model)
    (result,) = convert(conversion(checkpoints, tmp_path / "hf", tokenizer_dir=str(tokenizer)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(result.output, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(result.output)
    options = ("--temperature", "0", "--max-tokens", str(TOKENS), "--tokenizer", str(tokenizer), "--json")
    capfd.readouterr()
    assert main(["generate", str(checkpoints), *PROMPTS, *options]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["step"], answer["device"]) == (2, "cpu")
    window = model.decoder.seq_length
    for prompt, output in zip(PROMPTS, answer["outputs"], strict=True):
        ids = words(prompt)["input_ids"] or [0]
        length = min(TOKENS, window - len(ids))
        expected = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=length)[0].tolist()
        new = [token for token in expected[len(ids) :] if token != 0]
        whole, shown = (words.decode(part, skip_special_tokens=False) for part in (ids + new, ids))
        assert output["text"] == whole.removeprefix(shown)
        assert (output["tokens"], output["prompt_tokens"]) == (len(new), len(ids))
        is_full, has_ended = length < TOKENS, 0 in expected[len(ids) :]
        assert output["end"] == ("end_of_text" if has_ended else "window" if is_full else "max_tokens")


def test_t5_is_refused(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "checkpoints", description(FAMILIES["t5"]))
    arguments = ["generate", str(tmp_path / "checkpoints"), "a", "--tokenizer", str(tokenizer)]
    assert main(arguments) == 2
    assert "is a T5, which fills gaps in a text, and cannot continue one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no source and no prompt"),
        (["somewhere"], 'no prompt\n  slipway generate RUN "a text to continue"'),
        (["nowhere", "a"], "there is no run 'nowhere'"),
        ([".", "a", "--python", "/nowhere/python"], "cannot run /nowhere/python: no such file"),
        ([".", "\udcff"], "is not UTF-8"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--temperature=-1", "--temperature=nan", "--top-p=0", "--top-p=1.1"])
def test_numbers_outside_their_range_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "run", "a", option])
    assert "is not a number " in capsys.readouterr().err


def test_draws_are_of_the_most_probable_tokens_and_follow_the_seed() -> None:
    import torch

    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])

    def draws(temperature: float, top_p: float, seed: int = 1) -> list[int]:
        request = Request({}, [], 1, temperature, top_p, seed, None)
        generator = torch.Generator().manual_seed(seed)
        return [_draw(logits, request, generator) for _ in range(200)]

    assert set(draws(0, 1)) == {1}
    assert set(draws(1e-40, 1)) == {1}
    # Their probabilities are 0.64, 0.24, 0.09 and 0.03.
    assert set(draws(1, 0.6)) == {1}
    assert set(draws(1, 0.7)) == {1, 3}
    assert set(draws(5, 1)) == {0, 1, 2, 3}
    assert draws(1, 1) == draws(1, 1) != draws(1, 1, seed=2)
