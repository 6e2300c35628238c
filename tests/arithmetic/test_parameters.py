"""Counts of parameters: published ones, and those that megatron-core built."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.arithmetic.parameters import count_parameters, padded_vocabulary, vocabulary_size

GPT2 = {
    "max_position_embeddings": 1024,
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
}
GPT2_XL = GPT2 | {
    "num_layers": 48,
    "hidden_size": 1600,
    "ffn_hidden_size": 6400,
    "num_attention_heads": 25,
}
LLAMA2 = {
    "max_position_embeddings": 4096,
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "normalization": "rmsnorm",
    "activation": "fast-swiglu",
    "bias": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}
LLAMA2_70B = LLAMA2 | {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
}
LLAMA3_8B = LLAMA2 | {"ffn_hidden_size": 14336, "num_query_groups": 8}
BERT_BASE = GPT2 | {"max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("model", "vocabulary", "published"),
    [
        (GPT2, 50_257, 124_439_808),
        (GPT2_XL, 50_257, 1_557_611_200),
        (LLAMA2, 32_000, 6_738_415_616),
        (LLAMA2_70B, 32_000, 68_976_648_192),
        (LLAMA3_8B, 128_256, 8_030_261_248),
    ],
    ids=["gpt2", "gpt2-xl", "llama2-7b", "llama2-70b", "llama3-8b"],
)
def test_parameters_of_published_models_are_counted(
    model: dict[str, Any], vocabulary: int, published: int
) -> None:
    assert count_parameters(model, vocabulary) == published


def test_parameters_are_those_that_megatron_core_built() -> None:
    """The trainer's tests assert the same sum of the model that they build."""
    tiny = {
        "max_position_embeddings": 32,
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
    }
    expected = 304 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert count_parameters(tiny, 304) == expected


@pytest.mark.parametrize("bias", [True, False])
def test_biases_of_queries_have_two_names(bias: bool) -> None:
    """Count megatron-core's `add_qkv_bias` and NeMo's `qkv_bias` alike, which mean nothing beside `bias`."""
    shape = {**LLAMA3_8B, "bias": bias}
    plain, *named = (
        count_parameters({**shape, **names}, 512)
        for names in ({}, {"add_qkv_bias": True}, {"qkv_bias": True})
    )
    assert named[0] == named[1]
    assert (named[0] == plain) is bias


def test_parameters_of_bert_base_are_counted() -> None:
    """The published model has as many: its norm after the embeddings is Megatron's after the last layer."""
    # bert-base-uncased with the heads of its pretraining.
    assert count_parameters(BERT_BASE, 30_522, "bert") == 110_106_428


def test_t5_has_two_stacks_and_attention_across_them() -> None:
    """T5 1.1's published count, without its relative positions and with what Megatron adds."""
    h, f, layers, width = 768, 2048, 12, 12 * 64
    stack = {"num_layers": layers, "hidden_size": h, "ffn_hidden_size": f, "num_attention_heads": 12}
    stack |= {"kv_channels": 64, "activation": "geglu", "normalization": "rmsnorm", "bias": False}
    model = {"encoder": stack, "decoder": stack, "max_position_embeddings": 512, "tokens_head_bias": False}
    # t5-v1_1-base has an output of its own (32128 x 768) and relative positions (2 x 32 x 12).
    published = 247_577_856 - 32_128 * 768 - 2 * 32 * 12
    assert count_parameters(model, 32_128, "t5") == published + 512 * h
    own = {"share_decoder_tokens_head_embeddings": False}
    relative = {name: stack | {"position_embedding_type": "relative"} for name in ("encoder", "decoder")}
    assert count_parameters(model | own | relative, 32_128, "t5") == 247_577_856
    biased = model | {"tokens_head_bias": True}
    biased |= {name: stack | {"bias": True} for name in ("encoder", "decoder")}
    attention, mlp = 3 * width + h, 2 * f + h
    more = 32_128 + layers * (attention + mlp) + layers * (2 * attention + mlp)
    assert count_parameters(biased, 32_128, "t5") == published + 512 * h + more


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ({"tokenizer": {"type": "GPT2BPETokenizer"}, "make_vocab_size_divisible_by": 128}, 50_304),
        (
            {
                "tokenizer": {"type": "GPT2BPETokenizer"},
                "make_vocab_size_divisible_by": 128,
                "tensor_model_parallel_size": 8,
            },
            51_200,
        ),
        ({"tokenizer": {"type": "BertWordPieceCase", "num_sentinel_tokens": 100}}, 29_096),
        ({"tokenizer": {"type": None, "model": "/d/llama/llama_tokenizer.model"}}, 32_000),
        ({"tokenizer": {"type": "meta-llama/Meta-Llama-3-8B"}}, 128_256),
        (
            {
                "tokenizer": {"type": "GPT2BPETokenizer"},
                "override_vocab_size": 1001,
                "make_vocab_size_divisible_by": 128,
                "tensor_model_parallel_size": 2,
            },
            1002,
        ),
        ({"tokenizer": {"type": "ours"}}, None),
        ({}, None),
    ],
)
def test_vocabulary_of_a_model_is_padded(model: dict[str, Any], size: int | None) -> None:
    assert vocabulary_size(model) == size


def test_vocabulary_is_padded_for_the_ranks_that_share_it() -> None:
    # GPT-2's vocabulary with NeMo's default divisor: 50,304, and 51,200 with tensor parallel 8.
    assert padded_vocabulary(50257, 128, 1) == 50304
    assert padded_vocabulary(50257, 128, 8) == 51200
