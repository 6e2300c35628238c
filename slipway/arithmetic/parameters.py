"""Parameters of a model, counted from its configuration.

Sources: GPT and BERT, the parts of the models in Narayanan et al. 2021 (arXiv:2104.04473, section 5.1), whose
equation 2 is the sum for a GPT without options; grouped queries, Ainslie et al. 2023 (arXiv:2305.13245);
gated activations, Shazeer 2020 (arXiv:2002.05202); mixtures of experts, Jiang et al. 2024 (arXiv:2401.04088,
section 2.1); shared experts and multi-latent attention, DeepSeek-AI 2024 (arXiv:2405.04434, section 2 and
appendix C); T5, Raffel et al. 2020 (arXiv:1910.10683, section 2.1),
with Megatron's learned positions and the bias of its output; BERT's heads, Devlin et al. 2019
(arXiv:1810.04805, section 3.1). The tests compare with published models and with what megatron-core built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Node = Mapping[str, Any]

# Published sizes of the vocabularies of tokenizers that are named, but not at hand.
VOCABULARIES = {
    "GPT2BPETokenizer": 50_257,
    "BertWordPieceLowerCase": 30_522,
    "BertWordPieceCase": 28_996,
    "meta-llama/Meta-Llama-3": 128_256,
    "mistralai/Mixtral-8x": 32_000,
    "deepseek-ai/DeepSeek-V2": 102_400,
    "deepseek-ai/DeepSeek-V3": 129_280,
    "llama_tokenizer": 32_000,
    "mt5_tokenizer": 250_100,
}


@dataclass(frozen=True, slots=True)
class Size:
    """A number of parameters: `split` by tensor parallelism, and `whole` on each of its ranks.

    `routed` are those of the experts that a router chooses from: expert parallelism divides them, and expert
    tensor parallelism in turn.
    """

    split: int = 0
    whole: int = 0
    routed: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.split + other.split, self.whole + other.whole, self.routed + other.routed)

    def __mul__(self, times: int) -> Size:
        return Size(self.split * times, self.whole * times, self.routed * times)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.routed

    def on_rank(self, tensor: int) -> int:
        """Return the parameters of one of `tensor` tensor parallel ranks, routed experts apart."""
        return self.split // tensor + self.whole


class StackParameters(NamedTuple):
    """Parameters of a stack of layers: those of one layer, and of the norm behind the last.

    `sparse` is a layer whose MLP is a mixture of experts; `sparse_layers` counts such layers.
    """

    layers: int
    layer: Size
    norm: Size
    sparse: Size = Size()
    sparse_layers: int = 0

    @property
    def total(self) -> Size:
        dense = self.layers - self.sparse_layers
        return self.layer * dense + self.sparse * self.sparse_layers + self.norm


class Parts(NamedTuple):
    """Parts of a model.

    `embedding` is that of words, positions and token types; `words` the matrix in it that the output shares
    if it `is_tied`; `output` everything behind the last stack.
    """

    embedding: Size
    words: Size
    stacks: tuple[StackParameters, ...]
    output: Size
    is_tied: bool


_NOT_LEARNED = ("rope", "relative", "none", "alibi", "kerple", "sandwich")


def vocabulary_size(model: Node) -> int | None:
    """Return the size of a model's vocabulary, padded as Megatron pads it; None for an unknown tokenizer.

    Megatron pads to a multiple of `make_vocab_size_divisible_by` × the tensor parallel size.
    """
    tokenizer = model.get("tokenizer") or {}
    named = f"{tokenizer.get('type')} {tokenizer.get('model')}"
    override = model.get("override_vocab_size")
    size = override or next((size for name, size in VOCABULARIES.items() if name in named), None)
    if size is None:
        return None
    # A T5's sentinels, which replace spans taken out of a text, follow the tokenizer's own tokens.
    size = int(size) + (0 if override else int(tokenizer.get("num_sentinel_tokens") or 0))
    # As in NeMo, the model's own size is padded only to a multiple that the ranks share evenly.
    multiple = 1 if override else model.get("make_vocab_size_divisible_by") or 1
    return padded_vocabulary(size, multiple, model.get("tensor_model_parallel_size") or 1)


def padded_vocabulary(size: int, divisor: int, tensor: int) -> int:
    """Round a vocabulary's size up to a multiple of ``divisor * tensor``.

    NeMo and megatron/training/tokenizer (`_vocab_size_with_padding`).
    """
    multiple = divisor * tensor
    return -(-size // multiple) * multiple


def count_parameters(model: Node, vocabulary: int, model_type: str = "gpt") -> int:
    """Return the parameters of the whole, undivided model.

    Parameters
    ----------
    model
        NeMo's `model` node, with every value resolved.
    vocabulary
        Rows of the embedding.
    model_type
        ``gpt``, ``t5`` or ``bert``.
    """
    parts = parts_of(model, vocabulary, model_type)
    return parts.embedding.total + sum(stack.total.total for stack in parts.stacks) + parts.output.total


def parts_of(model: Node, vocabulary: int, model_type: str = "gpt") -> Parts:
    """Return the parameters by the parts that a pipeline deals out, split as Megatron splits them.

    Shoeybi et al. 2019 (arXiv:1909.08053, section 3): tensor parallelism divides the matrices, and the biases
    of those that are divided by rows; norms, positions, and biases behind a sum over the ranks are whole.
    """
    return {"gpt": _gpt, "t5": _t5, "bert": _bert}[model_type](model, vocabulary)


def _gpt(model: Node, vocabulary: int) -> Parts:
    words = Size(vocabulary * int(model["hidden_size"]))
    tied = bool(model.get("share_embeddings_and_output_weights", True))
    layers = int(model["num_layers"])
    stack = StackParameters(
        layers, _layer(model), _norm(model), _sparse(model), sparse_layers(model, 0, layers)
    )
    return Parts(words + _positions(model), words, (stack,), Size() if tied else words, tied)


def _t5(model: Node, vocabulary: int) -> Parts:
    """Count one embedding for both stacks and the output; each stack ends with a norm."""
    encoder, decoder = ({**model, **(model.get(stack) or {})} for stack in ("encoder", "decoder"))
    words = Size(vocabulary * int(encoder["hidden_size"]))
    # A tied output has a bias; an untied one has its own matrix and no bias.
    tied = bool(model.get("share_decoder_tokens_head_embeddings", True))
    output = (Size(vocabulary) if model.get("tokens_head_bias", True) else Size()) if tied else words
    # All layers of a stack share the biases of relative positions.
    buckets = encoder.get("relative_attention_num_buckets") or 32
    relative = buckets if encoder.get("position_embedding_type") == "relative" else 0
    stacks = tuple(
        StackParameters(
            int(stack["num_layers"]),
            _layer(stack, attentions),
            _norm(stack) + Size(0, relative * int(stack["num_attention_heads"])),
        )
        for stack, attentions in ((encoder, 1), (decoder, 2))
    )
    return Parts(words + _positions(encoder), words, stacks, output, tied)


def _bert(model: Node, vocabulary: int) -> Parts:
    hidden = int(model["hidden_size"])
    words = Size(vocabulary * hidden)
    # The language model's head: a dense layer, a norm and a bias for each token.
    heads = Size(vocabulary, hidden * hidden + hidden) + _norm(model)
    kinds = Size()
    if model.get("bert_binary_head", True):
        # The sentence that a token is in, the pooler, and the prediction of the next sentence.
        kinds = Size(0, 2 * hidden)
        heads += Size(0, hidden * hidden + hidden + 2 * hidden + 2)
    stack = StackParameters(int(model["num_layers"]), _layer(model), _norm(model))
    return Parts(words + _positions(model) + kinds, words, (stack,), heads, is_tied=True)


def _positions(model: Node) -> Size:
    if not has_learned_positions(model):
        return Size()
    return Size(0, int(model["max_position_embeddings"]) * int(model["hidden_size"]))


def has_learned_positions(model: Node) -> bool:
    """Return True if a model, or a stack, has a parameter for each position."""
    return model.get("position_embedding_type", "learned_absolute") not in _NOT_LEARNED


def _layer(model: Node, attentions: int = 1) -> Size:
    """Count one transformer layer: its attentions, the MLP, and a norm in front of each."""
    return _attention(model) * attentions + _mlp(model) + _norm(model) * (attentions + 1)


def _attention(model: Node) -> Size:
    if model.get("multi_latent_attention"):
        return _latent_attention(model)
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    width = (model.get("kv_channels") or hidden // heads) * heads
    # The queries of a group share keys and values.
    both = 2 * width * (model.get("num_query_groups") or heads) // heads
    count = hidden * (width + both) + width * hidden
    norms = _norm(model, width // heads) * 2 if model.get("qk_layernorm") else Size()
    if model.get("bias", True):
        return Size(int(count + width + both), int(hidden)) + norms
    # megatron-core's name, and NeMo's.
    has_bias = model.get("add_qkv_bias") or model.get("qkv_bias")
    return Size(int(count + width + both if has_bias else count)) + norms


def _latent_attention(model: Node) -> Size:
    """Count multi-latent attention: queries, keys and values are made from narrow vectors.

    The matrices into these vectors are whole on each rank, as in megatron-core from 0.13 on; 0.12 divides
    them.
    """
    hidden, heads = int(model["hidden_size"]), int(model["num_attention_heads"])
    rank, query_rank = int(model["kv_lora_rank"]), int(model.get("q_lora_rank") or 0)
    plain, rotated, value = (int(model[key]) for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    split = (query_rank or hidden) * heads * (plain + rotated) + rank * heads * (plain + value)
    whole = hidden * (query_rank + rank + rotated) + (hidden if model.get("bias", True) else 0)
    norms = _norm(model, query_rank + rank) if model.get("qk_layernorm") else Size()
    return Size(split + heads * value * hidden, whole) + norms


def _mlp(model: Node, inner: int | None = None) -> Size:
    hidden, inner = int(model["hidden_size"]), inner or int(model["ffn_hidden_size"])
    # Gated (GLU) activations have a second matrix on the way in.
    ways_in = 2 if str(model.get("activation", "gelu")).endswith("glu") else 1
    matrices = (ways_in + 1) * hidden * inner
    return Size(matrices + ways_in * inner, hidden) if model.get("bias", True) else Size(matrices)


def sparse_layers(model: Node, first: int, end: int) -> int:
    """Count the layers from `first` to before `end`, from 0, whose MLP is a mixture of experts.

    `moe_layer_freq` is a flag for each layer, or N for every N-th layer from the first on
    (megatron/core/transformer/transformer_config.py).
    """
    if not model.get("num_moe_experts"):
        return 0
    frequency = model.get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        return -(-end // frequency) + -first // frequency
    return sum(map(bool, frequency[first:end]))


def expert_width(model: Node) -> int:
    """Return the hidden units of one routed expert."""
    return int(model.get("moe_ffn_hidden_size") or model["ffn_hidden_size"])


def _sparse(model: Node) -> Size:
    """Count a layer with experts: attention, router, shared expert, all routed experts, and two norms."""
    experts = int(model.get("num_moe_experts") or 0)
    if not experts:
        return Size()
    hidden, shared = int(model["hidden_size"]), int(model.get("moe_shared_expert_intermediate_size") or 0)
    total = _attention(model) + _norm(model) * 2 + Size(0, experts * hidden)
    if shared:
        total += _mlp(model, shared)
        total += Size(0, hidden if model.get("moe_shared_expert_gate") else 0)
    return total + Size(routed=experts * _mlp(model, expert_width(model)).total)


def _norm(model: Node, width: int | None = None) -> Size:
    bias = str(model.get("normalization", "layernorm")).lower() != "rmsnorm"
    return Size(0, (2 if bias else 1) * (width or int(model["hidden_size"])))
