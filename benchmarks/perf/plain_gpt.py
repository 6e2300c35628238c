"""The peers of `train_step.py`: GPT-2 by hand over PyTorch's own attention, and Hugging Face's.

Both are trained as PyTorch's documentation has it: fp32 weights, with bf16 under `torch.autocast`, `AdamW`
in its fused form, and gradients clipped by their norm. Weights that are themselves bf16 take less time, and
are another training: an update of less than a 256th of a weight is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A GPT-2: counts of layers, heads and tokens, and the hidden size; ffn is four times as wide."""

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int
    micro_batches: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.length * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, {self.length} tokens, "
            f"vocabulary {self.vocabulary:,}, batch {self.micro_batches} x {self.micro_batch}"
        )


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention and MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Any) -> Any:
        """Map ``[batch, length, hidden]`` to the same."""
        batch, length, hidden = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x)), approximate="tanh"))


class PlainGPT(nn.Module):  # type: ignore[misc]
    """Embeddings, layers, a norm, and the embedding's transpose."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.length, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Any) -> Any:
        """Return the logits, ``[batch, length, vocabulary]``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class HuggingFaceGPT(nn.Module):  # type: ignore[misc]
    """``GPT2LMHeadModel`` without dropout, over the same attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.length,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # The defaults lie outside of a smaller vocabulary.
            bos_token_id=shape.vocabulary - 1,
            eos_token_id=shape.vocabulary - 1,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Any) -> Any:
        """Return the logits, ``[batch, length, vocabulary]``."""
        return self.model(tokens).logits


class Peer:
    """A model and its optimizer; calling it does one step.

    Parameters
    ----------
    model
        A map from tokens to logits.
    device
        The device to train on.
    autocast
        True to multiply matrices in bf16, whatever the weights.
    weights
        The type of the weights.
    """

    def __init__(self, model: nn.Module, device: Any, autocast: bool, weights: Any = torch.float32) -> None:
        self.model, self._device, self._autocast = model.to(device, weights).train(), device, autocast
        self._parameters = list(model.parameters())
        groups = [
            {"params": [p for p in self._parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self._parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self._parameters)

    def __call__(self, batches: list[tuple[Any, Any]]) -> float:
        """Do a step with pairs of tokens and labels, ``[micro batch, length]``; return the loss."""
        total = torch.zeros((), device=self._device)
        for tokens, labels in batches:
            with self._precision()():
                logits = self.model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)

    def _precision(self) -> Callable[[], Any]:
        if not self._autocast:
            return contextlib.nullcontext
        return lambda: torch.autocast(self._device.type, torch.bfloat16)
