"""Hugging Face's models, and gradients of a plain loss; run by test_distillation.py as a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
import transformers

LENGTH, SEQUENCES = 32, 2
# The weights of the cross entropy, the divergence and the cosine, and the temperature.
CASES = {"both": (0.5, 0.5, 0.0, 2.0), "all": (0.2, 5.0, 1.0, 3.0), "soft": (0.0, 1.0, 0.0, 1.0)}


def gpt(layers: int, size: int) -> Any:
    config = transformers.GPT2Config(
        vocab_size=size,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = transformers.GPT2LMHeadModel(config).train()
    with torch.no_grad():
        # Random and large: where all is nearly zero, a wrong term of the loss looks like a right one.
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def loss_of(student: Any, teacher: Any, tokens: Any, labels: Any, case: tuple[float, ...]) -> Any:
    """Return the loss of Hinton et al. 2015 and Sanh et al. 2019."""
    entropy, divergence, cosine, temperature = case
    own = student(tokens, output_hidden_states=True)
    with torch.no_grad():
        known = teacher(tokens, output_hidden_states=True)
    soft = F.kl_div(
        F.log_softmax(own.logits / temperature, dim=-1).flatten(0, 1),
        F.softmax(known.logits / temperature, dim=-1).flatten(0, 1),
        reduction="batchmean",
    )
    states = own.hidden_states[-1].flatten(0, 1), known.hidden_states[-1].flatten(0, 1)
    return (
        entropy * F.cross_entropy(own.logits.flatten(0, 1), labels.flatten())
        + divergence * temperature**2 * soft
        + cosine * F.cosine_embedding_loss(*states, torch.ones(len(states[0])))
    )


def main(root: Path, size: int) -> None:
    torch.manual_seed(1)
    teacher, student = gpt(4, size), gpt(2, size)
    teacher.save_pretrained(root / "teacher")
    student.save_pretrained(root / "student")
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    t5 = transformers.T5Config(vocab_size=size, **sizes)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(root / "t5")
    tokens = torch.randint(size, (SEQUENCES, LENGTH + 1))
    result: dict[str, Any] = {"tokens": tokens}
    for name, case in CASES.items():
        student.zero_grad()
        loss = loss_of(student, teacher, tokens[:, :-1], tokens[:, 1:], case)
        loss.backward()
        gradients = {key: value.grad.clone() for key, value in student.named_parameters()}
        result[name] = {"loss": loss.item(), "gradients": gradients}
    torch.save(result, root / "reference.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
