"""The weight map loses nothing in either direction, and refuses what Hugging Face cannot express."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description, describe, description_from_json
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.conversion.families import config_of, description_of, generation_config_of, rows_of
from slipway.trainer.conversion.weight_map import Row
from slipway.trainer.data.vocabulary import Vocabulary
from tests.trainer.conftest import config_with
from tests.trainer.parity.test_parity import FAMILIES, both

pytestmark = pytest.mark.trainer

STABLELM = {**FAMILIES["llama"], "model.normalization": "layernorm1p", "model.rotary_percentage": 0.5}
QWEN2 = {**FAMILIES["llama"], "model.qkv_bias": True}
SIZE, PADDED = 301, 304
_BASE = {"exp_manager.explicit_log_dir": "/x", "model.data.data_impl": "mock"}


def description(changes: dict[str, Any]) -> Description:
    flat = flatten(config_with({**_BASE, **changes}))
    return describe(read_settings(flat), Vocabulary(SIZE, 0, "a test's"), PADDED)


def rows(changes: dict[str, Any]) -> dict[str | None, Row]:
    return {row.ours: row for row in rows_of(description(changes))}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Return the keys of a small model of any family."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    channels, groups, repeats = (draw(st.integers(1, 3)) for _ in range(3))
    heads = groups * repeats
    sizes: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 2)),
        "hidden_size": heads * channels * 2 if family == "llama" else heads * channels,
        "ffn_hidden_size": draw(st.integers(1, 5)),
        "num_attention_heads": heads,
        "num_query_groups": groups if family == "llama" else heads,
        "kv_channels": channels,
    }
    if family.startswith("t5"):
        changes = {key: value for name, size in sizes.items() for key, value in both(name, size).items()}
        return {**FAMILIES[family], **changes}
    changes = {f"model.{name}": size for name, size in sizes.items()}
    biases = {key: draw(st.booleans()) for key in ("model.bias", "model.qkv_bias")}
    return {**FAMILIES[family], **changes, **biases}


@settings(deadline=None, max_examples=20)
@given(models(), st.integers(0, 2**16))
def test_no_weight_changes_on_its_way_to_ours_and_back(changes: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    for row in rows_of(description(changes)):
        theirs = [torch.randn(shape) for shape in row.their_shapes]
        if row.ours is None:
            assert all(not part.any() for part in row.to_theirs(None, torch.float32))
            continue
        ours = row.to_ours(*theirs)
        assert tuple(ours.shape) == row.shape
        back = row.to_theirs(ours, torch.float32)
        assert [part.shape for part in back] == [torch.Size(shape) for shape in row.their_shapes]
        assert all(torch.equal(part, original) for part, original in zip(back, theirs, strict=True))


def test_each_name_occurs_once() -> None:
    for changes in (*FAMILIES.values(), QWEN2, STABLELM):
        table = list(rows_of(description(changes)))
        theirs = [name for row in table for name in row.theirs]
        ours = [(row.ours, row.layer) for row in table if row.ours is not None]
        assert len(set(theirs)) == len(theirs)
        assert len(set(ours)) == len(ours)


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    row = rows({})["embedding.word_embeddings.weight"]
    padded = torch.randn(PADDED, 32)
    (theirs,) = row.to_theirs(padded, torch.float32)
    assert torch.equal(theirs, padded[:SIZE])


def test_zero_centred_scales_are_folded() -> None:
    row = rows(STABLELM)["decoder.final_layernorm.weight"]
    (theirs,) = row.to_theirs(torch.full((32,), 0.25), torch.float32)
    assert torch.equal(theirs, torch.full((32,), 1.25))


def test_scores_do_not_change_with_interleaved_channels() -> None:
    changes = {**FAMILIES["llama"], "model.rotary_interleaved": True}
    row = rows(changes)["decoder.layers.self_attention.linear_qkv.weight"]
    torch.manual_seed(1)
    ours = torch.randn(row.shape)
    query, key, value = row.to_theirs(ours, torch.float32)
    plain = rows(FAMILIES["llama"])["decoder.layers.self_attention.linear_qkv.weight"]
    same_query, same_key, same_value = plain.to_theirs(ours, torch.float32)
    assert torch.equal(value, same_value)
    # Hugging Face turns channel 0 with 4 of a head of 8, and ours were 0 and 1.
    assert torch.equal(query[[0, 4]], same_query[[0, 1]])
    assert torch.equal(key[[1, 5]], same_key[[2, 3]])


def test_a_head_without_a_bias_needs_no_row() -> None:
    changes = {**FAMILIES["t5"], "model.tokens_head_bias": False}
    assert "lm_head.output_layer.bias" not in rows(changes)


def test_a_trained_bias_of_the_head_is_refused() -> None:
    row = rows(FAMILIES["t5"])["lm_head.output_layer.bias"]
    assert row.to_theirs(torch.zeros(PADDED), torch.float32) == ()
    with pytest.raises(
        UserError, match=r"lm_head\.output_layer\.bias is not zero .* 0\.5.*tokens_head_bias=False"
    ):
        row.to_theirs(torch.full((PADDED,), 0.5), torch.float32)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model.activation": "swiglu"}, "model.activation=swiglu"),
        ({"model.normalization": "rmsnorm"}, "model.normalization=RMSNorm"),
        ({"model.num_query_groups": 2}, "model.num_query_groups=2"),
        ({"model.position_embedding_type": "none"}, "model.position_embedding_type=none"),
        ({**FAMILIES["llama"], "model.rotary_percentage": 0.5}, "model.rotary_percentage=0.5"),
        ({**FAMILIES["llama"], "model.activation": "relu"}, "model.activation=relu"),
        ({**STABLELM, "model.bias": True}, "model.bias=True"),
        ({**QWEN2, "model.normalization": "layernorm"}, "model.normalization=LayerNorm"),
        (
            {**FAMILIES["t5"], "model.decoder.normalize_attention_scores": True},
            "model.decoder.normalize_attention_scores=True",
        ),
    ],
)
def test_options_that_hugging_face_lacks_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(key)}: .*; expected"):
        list(rows_of(description(changes)))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True: .*; expected False"),
        ("mistral", {"sliding_window": 8}, "sliding_window=8: .*; expected null"),
        ("mistral", {}, r"sliding_window=4096 \(also where the file lacks the key\): .*; expected null"),
        ("mistral", {"sliding_window": None, "hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_options_that_our_models_lack_are_refused(family: str, options: dict[str, Any], message: str) -> None:
    config = config_of(description(QWEN2), "float32") | {"model_type": family}
    with pytest.raises(UserError, match=message):
        description_of({**config, **options}, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "mistral"), ({"attention_bias": True, "mlp_bias": True}, "llama")],
)
def test_an_imported_model_keeps_a_family_that_computes_what_it_does(
    options: dict[str, Any], expected: str
) -> None:
    config = {**config_of(description(FAMILIES["llama"]), "float32"), "sliding_window": None, **options}
    model = description_of(config, True)
    assert config_of(model, "float32")["model_type"] == "llama"
    own = replace(model, imported={"family": "mistral"})
    assert config_of(description_from_json(own.to_json(), "it"), "float32")["model_type"] == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_description_is_read_as_it_was_written(family: str) -> None:
    expected = description({**FAMILIES[family], "model.tokenizer.vocab_file": "/data/vocab.json"})
    content = json.loads(json.dumps(expected.to_json()))
    assert description_from_json({**content, "later": 1}, "x") == expected


def test_incomplete_description_is_refused() -> None:
    content = description({}).to_json()
    del content["decoder"]["norm_epsilon"]
    with pytest.raises(UserError, match=r"/checkpoint does not describe its model .*norm_epsilon"):
        description_from_json(content, "/checkpoint")


@pytest.mark.parametrize("ends", [[1, 2], [5], 3])
def test_tokens_that_end_a_document_come_back(ends: Any) -> None:
    config = {**config_of(description(FAMILIES["llama"]), "float32"), "eos_token_id": ends}
    content = json.loads(json.dumps(description_of(config, True).to_json()))
    model = description_from_json(content, "it")
    assert config_of(model, "float32")["eos_token_id"] == ends
    assert generation_config_of(model)["eos_token_id"] == ends
