"""How many parameters a model has, counted from its configuration.

Sources: GPT and BERT, the parts of the models in Narayanan et al. 2021 (arXiv:2104.04473, section 5.1), whose
equation 2 is the sum for a GPT without options; grouped queries, Ainslie et al. 2023 (arXiv:2305.13245);
gated activations, Shazeer 2020 (arXiv:2002.05202); T5, Raffel et al. 2020 (arXiv:1910.10683, section 2.1),
with Megatron's learned positions and the bias of its output; BERT's heads, Devlin et al. 2019
(arXiv:1810.04805, section 3.1). The tests compare with published models and with what megatron-core built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Node = Mapping[str, Any]

# What is known of a tokenizer that is named but not at hand: the published sizes of its vocabulary.
VOCABULARIES = {
    "GPT2BPETokenizer": 50_257,
    "BertWordPieceLowerCase": 30_522,
    "BertWordPieceCase": 28_996,
    "meta-llama/Meta-Llama-3": 128_256,
    "llama_tokenizer": 32_000,
    "mt5_tokenizer": 250_100,
}

_NOT_LEARNED = ("rope", "relative", "none", "alibi", "kerple", "sandwich")


def vocabulary_size(model: Node) -> int | None:
    """The size of a model's vocabulary, padded as Megatron pads it; ``None`` if its tokenizer is not known.

    Megatron pads to a multiple of `make_vocab_size_divisible_by` × the tensor parallel size.
    """
    tokenizer = model.get("tokenizer") or {}
    named = f"{tokenizer.get('type')} {tokenizer.get('model')}"
    override = model.get("override_vocab_size")
    size = override or next((size for name, size in VOCABULARIES.items() if name in named), None)
    if size is None:
        return None
    # Those of a T5, which stand for what was taken out of a text, follow the tokenizer's own.
    size = int(size) + (0 if override else int(tokenizer.get("num_sentinel_tokens") or 0))
    # A size that is given is the model's: as in NeMo it is not padded, but for what the ranks share evenly.
    multiple = 1 if override else model.get("make_vocab_size_divisible_by") or 1
    divisor = multiple * (model.get("tensor_model_parallel_size") or 1)
    return -(-size // divisor) * divisor


def count_parameters(model: Node, vocabulary: int, model_type: str = "gpt") -> int:
    """The parameters of the whole model, whatever it is divided among.

    Parameters
    ----------
    model
        NeMo's `model` node, with every value resolved.
    vocabulary
        Rows of the embedding.
    model_type
        ``gpt``, ``t5`` or ``bert``.
    """
    return {"gpt": _gpt, "t5": _t5, "bert": _bert}[model_type](model, vocabulary)


def _gpt(model: Node, vocabulary: int) -> int:
    hidden = model["hidden_size"]
    output = 0 if model.get("share_embeddings_and_output_weights", True) else vocabulary * hidden
    layers = model["num_layers"] * _layer(model)
    return int(_embeddings(model, vocabulary) + layers + _norm(model) + output)


def _t5(model: Node, vocabulary: int) -> int:
    """One embedding for both stacks and the output; each stack ends with a norm."""
    encoder, decoder = ({**model, **(model.get(stack) or {})} for stack in ("encoder", "decoder"))
    stacks = encoder["num_layers"] * _layer(encoder) + _norm(encoder)
    stacks += decoder["num_layers"] * _layer(decoder, attentions=2) + _norm(decoder)
    # A tied output has a bias; an untied one has none, and a matrix of its own.
    tied = model.get("share_decoder_tokens_head_embeddings", True)
    output = (
        (vocabulary if model.get("tokens_head_bias", True) else 0)
        if tied
        else vocabulary * encoder["hidden_size"]
    )
    if encoder.get("position_embedding_type") == "relative":
        buckets = encoder.get("relative_attention_num_buckets") or 32
        stacks += buckets * (encoder["num_attention_heads"] + decoder["num_attention_heads"])
    return int(_embeddings(encoder, vocabulary) + stacks + output)


def _bert(model: Node, vocabulary: int) -> int:
    hidden = model["hidden_size"]
    # The language model's head: a dense layer, a norm and a bias for each token.
    heads = hidden * hidden + hidden + _norm(model) + vocabulary
    kinds = 0
    if model.get("bert_binary_head", True):
        # Which of two sentences a token is in, the pooler, and whether the second follows the first.
        kinds = 2 * hidden
        heads += hidden * hidden + hidden + 2 * hidden + 2
    layers = model["num_layers"] * _layer(model)
    return int(_embeddings(model, vocabulary) + kinds + layers + _norm(model) + heads)


def _embeddings(model: Node, vocabulary: int) -> int:
    learned = model.get("position_embedding_type", "learned_absolute") not in _NOT_LEARNED
    return (vocabulary + (model["max_position_embeddings"] if learned else 0)) * int(model["hidden_size"])


def _layer(model: Node, attentions: int = 1) -> int:
    """One transformer layer: its attentions, the MLP, and a norm in front of each."""
    return attentions * _attention(model) + _mlp(model) + (attentions + 1) * _norm(model)


def _attention(model: Node) -> int:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    width = (model.get("kv_channels") or hidden // heads) * heads
    # Keys and values are shared by the queries of a group.
    both = 2 * width * (model.get("num_query_groups") or heads) // heads
    count = hidden * (width + both) + width * hidden
    if model.get("bias", True):
        return int(count + width + both + hidden)
    return int(count + width + both if model.get("add_qkv_bias") else count)


def _mlp(model: Node) -> int:
    hidden, inner = model["hidden_size"], model["ffn_hidden_size"]
    # Gated (GLU) activations have a second matrix on the way in.
    ways_in = 2 if str(model.get("activation", "gelu")).endswith("glu") else 1
    biases = ways_in * inner + hidden if model.get("bias", True) else 0
    return int((ways_in + 1) * hidden * inner + biases)


def _norm(model: Node) -> int:
    bias = str(model.get("normalization", "layernorm")).lower() != "rmsnorm"
    return (2 if bias else 1) * int(model["hidden_size"])
