"""The table for a T5: what it shares with a GPT's, and its own keys in place of those of one stack."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config.keys import KEYS, Implemented, Irrelevant, Refused, Status
from trainer.config.t5 import DECODER, ENCODER

_IMPLEMENTED = Implemented()
_SPANS = Irrelevant("spans are the paper's: of random lengths whose mean is mean_ngram_size, 3 if it is null")
_T5_ALONE = "megatron-core 0.16's T5Model has none"
_ONE_CHUNK = "the embeddings and the head are where both stacks are"

# The keys of one stack: model.<name> of a GPT, model.encoder.<name> and model.decoder.<name> of a T5.
_OF_A_STACK = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "init_method_std",
    "use_scaled_init_method",
    "hidden_dropout",
    "attention_dropout",
    "ffn_dropout",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "normalization",
    "activation",
    "openai_gelu",
    "bias",
    "position_embedding_type",
    "rotary_percentage",
    "rotary_base",
    "transformer_block_type",
    "normalize_attention_scores",
    "headscale",
    "apply_query_key_layer_scaling",
    "fp32_residual_connection",
    "persist_layer_norm",
    "bias_activation_fusion",
    "bias_dropout_add_fusion",
    "masked_softmax_fusion",
    "onnx_safe",
    "grad_div_ar_fusion",
    "activations_checkpoint_granularity",
    "activations_checkpoint_method",
    "activations_checkpoint_num_layers",
)
_OF_A_GPT = (
    *(f"model.{name}" for name in _OF_A_STACK),
    "model.mcore_gpt",
    "model.encoder_seq_length",
    "model.share_embeddings_and_output_weights",
    "model.attention_type",
    "model.num_micro_batches_with_partial_activation_checkpoints",
    "model.activations_checkpoint_layers_per_pipeline",
    "model.data.eod_mask_loss",
    "model.data.reset_position_ids",
    "model.data.reset_attention_mask",
)
_OF_A_T5_STACK: dict[str, Status] = {
    **{name: KEYS[f"model.{name}"] for name in _OF_A_STACK},
    "arch": Refused(("transformer", None), _T5_ALONE),
    "relative_attention_num_buckets": _IMPLEMENTED,
    "relative_attention_max_distance": _IMPLEMENTED,
    "relative_position_bias_self_attention_only": Refused((True, None), _T5_ALONE),
}

T5_KEYS: dict[str, Status] = {
    **{key: status for key, status in KEYS.items() if key not in _OF_A_GPT},
    **{f"{node}.{name}": status for node in (ENCODER, DECODER) for name, status in _OF_A_T5_STACK.items()},
    "model.mcore_t5": Refused((True, None), "the model is megatron-core's"),
    "model.seq_length": _IMPLEMENTED,
    "model.share_token_embeddings": Refused((True, None), _T5_ALONE),
    "model.share_decoder_tokens_head_embeddings": _IMPLEMENTED,
    "model.pre_process": Refused((True, None), _ONE_CHUNK),
    "model.post_process": Refused((True, None), _ONE_CHUNK),
    # model: parallelism
    "model.pipeline_model_parallel_size": Refused(
        (1, None), "megatron-core 0.16 has no pipeline for a T5, whose encoder and decoder would share it"
    ),
    "model.pipeline_model_parallel_split_rank": Refused((0, None), "there is one pipeline stage"),
    "model.virtual_pipeline_model_parallel_size": Refused((1, None), "there is one pipeline stage"),
    "model.context_parallel_size": Refused((1, None), "a T5's targets are too short to be cut"),
    # model: tokenizer and data
    "model.tokenizer.num_sentinel_tokens": _IMPLEMENTED,
    "model.override_vocab_size": Refused((None,), "the sentinels follow the tokenizer's own tokens"),
    "model.data.seq_length_dec": _IMPLEMENTED,
    "model.data.masked_lm_prob": _IMPLEMENTED,
    "model.data.mean_ngram_size": _IMPLEMENTED,
    "model.data.dataset_type": Refused(("t5", None), "only T5's span corruption is in this version"),
    "model.data.geometric_dist": _SPANS,
    "model.data.max_ngram_size": _SPANS,
    "model.data.whole_word_masking": Irrelevant("spans are of tokens, as in the paper"),
    "model.data.short_seq_prob": Refused(
        (0, 0.0, None), "all sequences have the same length, as in the paper"
    ),
    "model.data.favor_longer_ngrams": Refused((False, None), _SPANS.reason),
    "model.data.permutation": Refused((False, None), "spans stay in their order, as in the paper"),
    "model.data.respect_document_boundaries": Irrelevant(
        "sequences are cut out of packed documents, as in the paper, and may span some"
    ),
}


def misplaced(key: str, table: Mapping[str, Status]) -> str:
    """Say of which other kind of model a key is; an empty string if of none."""
    name = key.rsplit(".", 1)[-1]
    if table is T5_KEYS and key in KEYS:
        both = f": {ENCODER}.{name} and {DECODER}.{name}" if name in _OF_A_T5_STACK else ""
        return f"a GPT's key, but model.encoder and model.decoder make this a T5{both}"
    if table is KEYS and key in T5_KEYS:
        return "a T5's key, but without model.encoder and model.decoder this is a GPT"
    return ""
