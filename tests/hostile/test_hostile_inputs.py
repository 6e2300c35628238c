"""Hostile sources and model directories: none is executed, hangs, takes 2 GB, or hides what is beside it.

Run directories: tests/monitor/test_hostile_runs.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from tokenizers import ByteLevelBPETokenizer

from slipway.arithmetic.indexed import manifest_path
from tests.corpus.preparing import check_whole, configuration, write_configuration, write_lines
from tests.hostile.contained import MEMORY, Outcome, run_contained
from tests.hostile.hostile_models import FORMS, HostileModel, hostile_models
from tests.hostile.hostile_sources import HostileSources, hostile_sources
from tests.trainer.conversion.checkpoints import write_checkpoint
from tests.trainer.conversion.test_weight_map import description
from tests.trainer.indexed_files import read
from tests.trainer.parity.test_parity import FAMILIES

pytestmark = [
    *(pytest.mark.trainer, pytest.mark.timeout(0)),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

# By hand: SLIPWAY_HOSTILE_EXAMPLES=2000 pytest tests/hostile
_EXAMPLES = int(os.environ.get("SLIPWAY_HOSTILE_EXAMPLES", "100"))
_settings = settings(
    max_examples=_EXAMPLES,
    derandomize=_EXAMPLES <= 100,  # the suite repeats its examples; the longer run draws new ones
    phases=[Phase.reuse, Phase.generate],  # to shrink what hangs takes an hour
    suppress_health_check=list(HealthCheck),
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]")
_PRIVATE = "the content of a private file"
_TEXTS = [f"healthy text {number}" for number in range(20)]
_RECORDED = Path(__file__).parents[1] / "trainer" / "conversion" / "recorded" / "deepspeed" / "zero2"


def _check(outcome: Outcome, allowed: set[int]) -> None:
    """Assert that a program ended by itself, in its words, within its memory."""
    assert not outcome.is_hung, outcome.output
    assert "Traceback" not in outcome.output, outcome.output
    assert outcome.code in allowed, outcome
    assert outcome.memory < MEMORY, outcome
    assert not _CONTROLS.search(outcome.output), outcome.output
    assert _PRIVATE not in outcome.output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tokenizer that is trained once."""
    directory = tmp_path_factory.mktemp("tokenizer")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(_TEXTS, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(directory))
    return directory


def test_no_source_costs_more_than_its_own_text(tmp_path: Path, tokenizer: Path) -> None:
    """A healthy file beside the hostile ones is written whole, or nothing is and the reason is named."""
    decoder = ByteLevelBPETokenizer(str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt"))

    @_settings
    @given(hostile_sources)
    def any_source(sources: HostileSources) -> None:
        directory = tmp_path / "case"
        try:
            inputs = directory / "in"
            inputs.mkdir(parents=True)
            write_lines(inputs / "a.jsonl", _TEXTS)
            sources.write(inputs)
            node = configuration(directory, inputs, tokenizer, **sources.keys)
            _check_preparation(node, directory, decoder, sources)
        finally:
            shutil.rmtree(directory)

    any_source()


def _check_preparation(
    node: dict[str, object], directory: Path, decoder: ByteLevelBPETokenizer, sources: HostileSources
) -> None:
    outcome = run_contained(
        "slipway.corpus.__main__", ["run", *write_configuration(directory, node)], directory
    )
    _check(outcome, {0, 1, 2})
    assert not list(directory.rglob("canary"))
    out = directory / "out"
    is_whole = out.is_dir() and check_whole(out)
    assert is_whole == (outcome.code == 0), outcome
    if outcome.code:
        assert outcome.output.splitlines()[-1].startswith("error: "), outcome.output
        return
    texts = [decoder.decode(document[0][:-1]) for document in read(out / "x").documents]
    keys = sources.keys
    if keys.get("text_key", "text") == "text" and keys.get("format", "auto") in ("auto", "jsonl"):
        assert set(_TEXTS) <= set(texts), outcome.output
    # What is neither taken, nor hidden, nor named is lost without a word.
    words = manifest_path(out / "x").read_text() + outcome.output
    for name, thing in sources.files.items():
        is_hidden = any(part.startswith((".", "_")) for part in Path(name).parts)
        if thing.kind == "bytes" and not is_hidden and (directory / "in" / name).is_file():
            last = Path(name).name
            forms = (last, json.dumps(last)[1:-1], ascii(last)[1:-1])
            assert any(form in words for form in forms), (name, words)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a sound directory of each form."""
    directory = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, **tokens)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory / "huggingface")
    checkpoint = write_checkpoint(directory / "checkpoints", description(FAMILIES["gpt2"])).path
    shutil.copytree(_RECORDED, directory / "deepspeed")
    return {
        "huggingface": directory / "huggingface",
        "slipway": checkpoint,
        "slipway files": checkpoint,
        "deepspeed": directory / "deepspeed",
    }


def _convert(model: HostileModel, models: dict[str, Path], directory: Path) -> Outcome:
    directory.mkdir()
    source, output, secret = directory / models[model.form].name, directory / "out", directory / "private.txt"
    secret.write_text(_PRIVATE)
    secret.chmod(0o600)
    model.write(models[model.form], source, secret)
    words = ["export", str(source), "--to", str(output), "--format", FORMS[model.form]]
    outcome = run_contained("slipway.trainer.conversion.__main__", words, directory)
    assert not list(Path().glob("canary"))
    for path in output.rglob("*") if output.is_dir() else []:
        assert not path.is_symlink(), f"{path} is a link"
        assert path.is_dir() or _PRIVATE.encode() not in path.read_bytes(), f"{path} has the private file"
    assert output.is_dir() == (outcome.code == 0), outcome
    return outcome


def test_no_model_directory_is_more_than_data(tmp_path: Path, models: dict[str, Path]) -> None:
    """A conversion of any directory writes a whole result, or nothing and names the reason."""

    @_settings
    @given(hostile_models)
    def any_model(model: HostileModel) -> None:
        directory = tmp_path / "case"
        try:
            outcome = _convert(model, models, directory)
            _check(outcome, {0, 2})
            assert outcome.code == 0 or "error: " in outcome.output
        finally:
            shutil.rmtree(directory)

    any_model()


@pytest.mark.parametrize("form", FORMS)
def test_sound_directories_are_converted(form: str, tmp_path: Path, models: dict[str, Path]) -> None:
    """The property must not try a form that is refused for a reason of its own."""
    outcome = _convert(HostileModel(form, {}), models, tmp_path / "case")
    assert (outcome.code, outcome.memory < MEMORY) == (0, True), outcome.output


def test_limits_are_those_of_the_program(tmp_path: Path) -> None:
    """The property must see a program that spins, waits, or takes memory."""
    program = "tests.hostile.misbehaving"
    assert run_contained(program, ["spin"], tmp_path, cpu=1).is_hung
    assert run_contained(program, ["wait"], tmp_path, wall=1).is_hung
    taken = run_contained(program, ["take", str(MEMORY // 8)], tmp_path).memory
    assert MEMORY // 9 < taken < MEMORY // 7
    assert "MemoryError" in run_contained(program, ["take", str(4 * MEMORY)], tmp_path).output
