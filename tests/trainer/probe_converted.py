"""A converted model in transformers alone; run by test_evaluation.py in a process of its own.

``probe_converted MODEL REQUEST``: the request is a JSON file with ``windows`` of tokens, of which the loss is
the mean over all targets, a ``text``, of which the bits per byte are printed as lm-eval defines them, and
``code``, Python of the documentation, whose output is printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


def main(arguments: list[str]) -> int:
    request = json.loads(Path(arguments[1]).read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments[0])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(request["code"], {})
    ids = tokenizer(request["text"])["input_ids"]
    nats = loss_sum(model, [[tokenizer.eos_token_id, *ids]])
    windows = request["windows"]
    targets = sum(len(window) - 1 for window in windows)
    print(
        json.dumps(
            {
                "loss": loss_sum(model, windows) / targets,
                "tokens": targets,
                "bits_per_byte": nats / math.log(2) / len(request["text"].encode()),
                "printed": output.getvalue(),
                "modules": [name for name in ("megatron", "trainer") if name in sys.modules],
            }
        )
    )
    return 0


def loss_sum(model: Any, windows: list[list[int]]) -> float:
    """Return the sum of the losses of all targets, in nats."""
    tokens = torch.tensor(windows)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
