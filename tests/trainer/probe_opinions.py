"""Run by test_lm_eval.py in a process forked from a warm one: models that always write one letter.

``probe_opinions TOKENIZER DIRECTORY LETTER...``: for each letter a GPT-2 in Hugging Face's format, in
``DIRECTORY/LETTER``. Whatever it reads, its last norm has the letter's embedding for output.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


def main(arguments: list[str]) -> int:
    files = Path(arguments[0])
    tokenizer = transformers.GPT2Tokenizer(
        str(files / "vocab.json"),
        str(files / "merges.txt"),
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    )
    torch.manual_seed(0)
    for letter in arguments[2:]:
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=32,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config)
        (token,) = tokenizer.encode(letter)
        final, embeddings = model.transformer.ln_f, model.transformer.wte.weight
        final.weight.data.zero_()
        final.bias.data.copy_(100 * embeddings[token] / embeddings[token].norm())
        for part in (model, tokenizer):
            part.save_pretrained(Path(arguments[1]) / letter)
    print(json.dumps(arguments[2:]))
    return 0
