"""Hugging Face's models, made from a configuration; run by test_parity.py in a process of its own.

Their weights are random, and large: where all is nearly zero, a wrong activation looks like a right one. Each
model's weights, tokens, logits and gradients go into one file, in 32 bits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

# No row pads this vocabulary: Megatron's softmax sees such rows too, which changes gradients.
VOCABULARY, LENGTH, DECODER_LENGTH, SEQUENCES = 304, 32, 24, 2
# Far from what norms default to, so that it would be seen if it were not passed on.
EPSILON = 1e-3


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=4,
            layer_norm_epsilon=EPSILON,
            bos_token_id=0,
            eos_token_id=0,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            attn_implementation="eager",
        )
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            rms_norm_eps=EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )


def qwen2() -> Any:
    config = transformers.Qwen2Config(**{**llama().config.to_dict(), "model_type": "qwen2"})
    config._attn_implementation = "eager"
    return transformers.Qwen2ForCausalLM(config)


def t5(projection: str = "relu", tied: bool = True) -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=8,
            d_ff=80,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            dropout_rate=0.0,
            layer_norm_epsilon=EPSILON,
            feed_forward_proj=projection,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )


def t5_v1_1() -> Any:
    model = t5("gated-gelu", tied=False)
    # transformers 5 leaves the factor of a tied head away then, but ties it all the same.
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def inputs_of(model: Any) -> dict[str, Any]:
    """Return the arguments of both models, by Hugging Face's names, and the labels."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1))
    if not model.config.is_encoder_decoder:
        return {"arguments": {"input_ids": tokens[:, :-1]}, "labels": tokens[:, 1:]}
    decoder_tokens = torch.randint(VOCABULARY, (SEQUENCES, DECODER_LENGTH + 1))
    arguments = {"input_ids": tokens, "decoder_input_ids": decoder_tokens[:, :-1]}
    return {"arguments": arguments, "labels": decoder_tokens[:, 1:]}


def reference(model: Any, deviation: float) -> dict[str, Any]:
    """Return the numbers that ours are compared with; the loss is the mean over all tokens, in nats."""
    for parameter in model.parameters():
        parameter.data.normal_(std=deviation)
        if parameter.dim() == 1:
            parameter.data += 1.0
    model.train()
    inputs = inputs_of(model)
    logits = model(**inputs["arguments"], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten()).backward()
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.named_parameters()},
        "gradients": {name: tensor.grad.clone() for name, tensor in model.named_parameters()},
        **inputs,
        "logits": logits.detach(),
        "exact": exact_logits(model, inputs["arguments"]),
    }


def exact_logits(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the logits in 64 bits, except for some norms, which Hugging Face computes in 32 all the same."""
    with torch.no_grad():
        return model.double()(**arguments, use_cache=False).logits


def main() -> None:
    torch.manual_seed(1)
    # Without 1 / sqrt(d) the scores of a T5 grow quickly, and its attention would look at one token alone.
    makers = ((gpt2, 0.3), (llama, 0.3), (qwen2, 0.3), (t5, 0.15), (t5_v1_1, 0.1))
    references = {make.__name__: reference(make(), deviation) for make, deviation in makers}
    torch.save(references, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
