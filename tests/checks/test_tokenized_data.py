"""Data of another tokenizer than the training's are refused before anything is submitted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.corpus.tokenized import OTHER_TEXTS, TokenizedSet
from tests.forked_slipway import run_forked

pytestmark = pytest.mark.trainer

DATA, TOKENIZER = "training.model.data.data_prefix", "training.model.tokenizer"
JOB = ("training=gpt3/tiny", "cluster=local", "cluster.python=/bin/true", "training.run.name=mine")
KINDS = ("gpt2", "huggingface", "sentencepiece")
ENGINES = ("megatron", "megatron_lm", "nemo")
ENDS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizedSet]:
    directory = tmp_path_factory.mktemp("data")
    sets = {kind: TokenizedSet(directory / kind, kind) for kind in KINDS}
    others = {f"other {kind}": TokenizedSet(directory / f"other-{kind}", kind, OTHER_TEXTS) for kind in KINDS}
    end = TokenizedSet(directory / "end", "huggingface", tokenizer={"end_of_document": "<|im_end|>"})
    return {**sets, **others, "end": end}


def tokenizer(data: TokenizedSet) -> list[str]:
    """Return the overrides that name the tokenizer of data."""
    files = data.tokenizer
    if files.library == "huggingface":
        return [f"{TOKENIZER}.library=huggingface", f"{TOKENIZER}.type={files.name}"]
    if files.library == "sentencepiece":
        return [f"{TOKENIZER}.library=sentencepiece", f"{TOKENIZER}.model={files.model}"]
    return [f"{TOKENIZER}.vocab_file={files.vocab_file}", f"{TOKENIZER}.merge_file={files.merge_file}"]


def findings(cwd: Path, *overrides: str) -> list[dict[str, str]]:
    """Return what `check` finds of the tokenizer of the data."""
    done = run_forked(["check", "--json", *JOB, *overrides], cwd=cwd, env=dict(os.environ), timeout=100)
    results = [item for item in json.loads(done.stdout)["findings"] if item["id"] == "data.tokenizer"]
    assert done.returncode == 2 or not any(item["severity"] == "error" for item in results)
    return results


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_tokenizer_are_an_error_of_the_first_launch(
    tmp_path: Path, data: dict[str, TokenizedSet], kind: str, engine: str
) -> None:
    own, other = data[kind], data[f"other {kind}"]
    job = [f"engine={engine}", *tokenizer(own)]
    assert findings(tmp_path, *job, f"{DATA}=[{own.prefix}]") == []
    (finding,) = findings(tmp_path, *job, f"{DATA}=[0.5,{own.prefix},0.5,{other.prefix}]")
    assert finding["severity"] == "error" and finding["key"] == DATA
    assert f"'{other.prefix}': its manifest says that tokenizer" in finding["message"].replace(
        "vocab", "tokenizer"
    )
    for record in (own.record, other.record):
        assert str(record.sha256)[:12] in finding["message"]
    accept = finding["fix"].rpartition("training.resume.accept_data=")[2]
    # What was accepted before is accepted still.
    (finding,) = findings(
        tmp_path, *job, f"{DATA}=[{other.prefix}]", "training.resume.accept_data=data-0123456789ab"
    )
    accept = f"data-0123456789ab+{accept}"
    assert finding["fix"].endswith(f"training.resume.accept_data={accept}")
    (accepted,) = findings(
        tmp_path, *job, f"{DATA}=[{other.prefix}]", f"training.resume.accept_data={accept}"
    )
    assert accepted["severity"] == "warning"


def test_a_launch_writes_nothing_for_data_of_another_tokenizer(
    tmp_path: Path, data: dict[str, TokenizedSet]
) -> None:
    splits = {"train": data["gpt2"].prefix, "validation": data["other gpt2"].prefix}
    named = [f"+{DATA}.{split}=[{prefix}]" for split, prefix in splits.items()]
    overrides = [*JOB, *tokenizer(data["gpt2"]), f"~{DATA}", *named]
    done = run_forked(["launch", *overrides], cwd=tmp_path, env=dict(os.environ), timeout=100)
    assert done.returncode == 2 and "[data.tokenizer]" in done.stderr, done.stderr
    assert f"{DATA}.validation=" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_another_end_of_documents_is_an_error_where_it_is_used(
    tmp_path: Path, data: dict[str, TokenizedSet], engine: str, name: str
) -> None:
    job = [f"engine={engine}", *tokenizer(data["end"]), f"{DATA}=[{data['end'].prefix}]"]
    (finding,) = findings(tmp_path, *job, f"training.model.data.{name}=True")
    assert finding["severity"] == "error"
    assert "documents end with the token 1, and the training takes 0" in finding["message"]


def test_what_cannot_be_compared_is_a_warning_or_skipped(
    tmp_path: Path, data: dict[str, TokenizedSet]
) -> None:
    (finding,) = findings(tmp_path, *tokenizer(data["huggingface"]), f"{DATA}=[{data['gpt2'].prefix}]")
    assert finding["severity"] == "warning" and "is the same tokenizer is not known" in finding["message"]
    for suffix in ("bin", "idx"):
        shutil.copy(f"{data['gpt2'].prefix}.{suffix}", tmp_path / f"x.{suffix}")
    (finding,) = findings(tmp_path, *tokenizer(data["gpt2"]), f"{DATA}=[{tmp_path}/x]")
    assert finding["severity"] == "skipped" and "no manifest" in finding["message"]


def test_an_evaluation_on_data_of_another_tokenizer_is_refused(
    tmp_path: Path, data: dict[str, TokenizedSet]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = run_forked(list(arguments), cwd=tmp_path, env=dict(os.environ), timeout=100)
        return done.returncode, done.stderr

    own, other = data["sentencepiece"].prefix, data["other sentencepiece"].prefix
    code, message = run("launch", *JOB, *tokenizer(data["sentencepiece"]), f"{DATA}=[{own}]")
    assert code == 0, message
    checkpoint = tmp_path / "results/mine/checkpoints/step=1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text(json.dumps({"step": 1, "serial": 1, "files": {}}))
    key = "evaluation.perplexity.data_prefix"
    code, message = run("evaluate", "mine", f"{key}=[{own},{other}]", "cluster.python=/bin/true")
    assert code == 2 and f"{key}='{other}': its manifest says that" in message, message
    assert "[data.tokenizer]" in message
    assert "data.tokenizer" not in run("evaluate", "mine", f"{key}=[{own}]", "cluster.python=/bin/true")[1]
