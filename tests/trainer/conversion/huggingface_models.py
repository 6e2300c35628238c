"""Hugging Face's models, run by test_huggingface.py in a process without Slipway.

First the program saves models with random weights; then, after a line on stdin, it loads the converted ones
and writes their logits into a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

LENGTH, DECODER_LENGTH, SEQUENCES = 32, 12, 2
EPSILON = 1e-3


def gpt(size: int, **changes: Any) -> Any:
    plain = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=size, n_positions=LENGTH, **{**plain, **dropout, **changes})
    return transformers.GPT2LMHeadModel(config)


def llama(size: int, rope: dict[str, Any], **changes: Any) -> Any:
    plain: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    plain |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": EPSILON}
    plain |= {"max_position_embeddings": LENGTH, "rope_parameters": rope}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=size, **{**plain, **changes}))


def mistral(size: int, **changes: Any) -> Any:
    model = llama(size, {"rope_type": "default", "rope_theta": 5000.0}, **changes)
    options = {**model.config.to_dict(), "model_type": "mistral", "sliding_window": None}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**options))


def qwen2(size: int, **changes: Any) -> Any:
    model = llama(size, {"rope_type": "default", "rope_theta": 1e6}, **changes)
    config = transformers.Qwen2Config(**{**model.config.to_dict(), "model_type": "qwen2"})
    return transformers.Qwen2ForCausalLM(config)


def stablelm(size: int) -> Any:
    return transformers.StableLmForCausalLM(
        transformers.StableLmConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            layer_norm_eps=EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        )
    )


def t5(size: int, projection: str, tied: bool) -> Any:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=size,
            # Its root is no power of two.
            d_model=48,
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
            decoder_start_token_id=0,
        )
    )
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def models(size: int) -> dict[str, tuple[Any, float]]:
    """Return the models, and the deviation of their weights."""
    plain = {"rope_type": "default", "rope_theta": 5000.0}
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 80}
    return {
        "gpt2": (gpt(size), 0.3),
        "gpt3": (gpt(size, **sizes, layer_norm_epsilon=EPSILON, tie_word_embeddings=False), 0.3),
        "llama2": (llama(size, plain), 0.3),
        "llama3_1": (llama(size, SCALED, head_dim=64), 0.3),
        "mistral": (mistral(size, head_dim=16), 0.3),
        "qwen2": (qwen2(size), 0.3),
        "qwen2_tied": (qwen2(size, tie_word_embeddings=True), 0.3),
        "stablelm": (stablelm(size), 0.3),
        # Without 1 / sqrt(d) the scores of a T5 grow quickly.
        "t5": (t5(size, "relu", tied=True), 0.15),
        "t5_v1_1": (t5(size, "gated-gelu", tied=False), 0.1),
    }


def main() -> None:
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    inputs: dict[str, Any] = {}
    for name, (model, deviation) in models(size).items():
        for parameter in model.parameters():
            parameter.data.normal_(std=deviation)
            if parameter.dim() == 1:
                parameter.data += 1.0
        if name == "gpt2":
            # All logits are far below 0, as those of the published model.
            model.transformer.wte.weight.data += 0.5
            model.transformer.ln_f.bias.data -= 2.0
        model.save_pretrained(root / name / "source")
        inputs[name] = {"input_ids": torch.randint(size, (SEQUENCES, LENGTH))}
        if model.config.is_encoder_decoder:
            inputs[name]["decoder_input_ids"] = torch.randint(size, (SEQUENCES, DECODER_LENGTH))
        if name == "gpt2":
            loss = exact_loss(model, torch.load(root / "windows.pt"))
    torch.save(inputs, root / "inputs.pt")
    print(json.dumps({"loss": loss}), flush=True)
    sys.stdin.readline()
    torch.save({name: logits(root / name / "exported", inputs[name]) for name in inputs}, root / "logits.pt")
    modules = sorted({"launcher", "slipway", "tests"} & set(sys.modules))
    print(json.dumps({"imported": modules}), flush=True)


def exact_loss(model: Any, windows: Any) -> float:
    """Return the mean loss of windows ``[n, length + 1]``, in 64 bits."""
    with torch.no_grad():
        scores = model.double().eval()(windows[:, :-1], use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten()))


def logits(directory: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a converted model's logits in 32 bits and in 64."""
    seq2seq = "decoder_input_ids" in arguments
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return {
            "theirs": model(**arguments, use_cache=False).logits,
            "exact": model.double()(**arguments, use_cache=False).logits,
        }


if __name__ == "__main__":
    main()
