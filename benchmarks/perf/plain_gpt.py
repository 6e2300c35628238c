"""The peers of `train_step.py` and `gpu_step.py`: a GPT by hand over PyTorch's attention, and Hugging Face's.

All are trained as PyTorch's documentation has it: fp32 weights, with bf16 under `torch.autocast`, `AdamW`
in its fused form, and gradients clipped by their norm. On a GPU the GPT by hand and its loss are compiled as
a whole. Weights that are themselves bf16 take less time, and are another training: an update of less than a
256th of a weight is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from programs import Shape
from torch import nn

Compiler = Callable[..., Callable[..., Any]]


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention and MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, bias, self._shape = shape.hidden, not shape.is_llama, shape
        self.channels = hidden // shape.heads
        self.norms = nn.ModuleList([make_norm(shape), make_norm(shape)])
        self.qkv = nn.Linear(hidden, (shape.heads + 2 * shape.groups) * self.channels, bias)
        self.out = nn.Linear(hidden, hidden, bias)
        self.wide = nn.Linear(hidden, shape.ffn * (2 if shape.is_llama else 1), bias)
        self.narrow = nn.Linear(shape.ffn, hidden, bias)

    def forward(self, x: Any, angles: Any) -> Any:
        """Map ``[batch, length, hidden]`` to the same; `angles` are cosines and sines of rotary positions."""
        x = x + self._drop(self.out(self._attend(self.norms[0](x), angles)))
        wide = self.wide(self.norms[1](x))
        if self._shape.is_llama:
            gate, up = wide.chunk(2, -1)
            return x + self._drop(self.narrow(F.silu(gate) * up))
        return x + self._drop(self.narrow(F.gelu(wide, approximate="tanh")))

    def _attend(self, x: Any, angles: Any) -> Any:
        batch, length, hidden = x.shape
        shape = self._shape
        parts = self.qkv(x).view(batch, length, -1, self.channels).transpose(1, 2)
        query, key, value = parts.split((shape.heads, shape.groups, shape.groups), 1)
        if shape.is_llama:
            query, key = rotate(query, *angles), rotate(key, *angles)
        dropout = shape.dropout if self.training else 0.0
        grouped = shape.heads != shape.groups
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
        return attended.transpose(1, 2).reshape(batch, length, hidden)

    def _drop(self, x: Any) -> Any:
        return F.dropout(x, self._shape.dropout, self.training)


class PlainGPT(nn.Module):  # type: ignore[misc]
    """Embeddings, layers, a norm, and a head: for a GPT-2 the embedding's transpose."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = None if shape.is_llama else nn.Embedding(shape.length, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if not shape.is_llama:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        cosines, sines = rotary_angles(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens: Any) -> Any:
        """Return the logits, ``[batch, length, vocabulary]``."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        x = F.dropout(x, self._shape.dropout, self.training)
        for block in self.blocks:
            x = block(x, (self.cosines, self.sines))
        return self.head(self.norm(x))


def make_norm(shape: Shape) -> nn.Module:
    """Return the norm of a shape, over the last dimension."""
    return nn.RMSNorm(shape.hidden, eps=1e-5) if shape.is_llama else nn.LayerNorm(shape.hidden)


def rotary_angles(shape: Shape) -> tuple[Any, Any]:
    """Return cosines and sines of rotary positions (Su et al. 2021), ``[length, channels / 2]``."""
    channels = shape.hidden // shape.heads
    frequencies = shape.rotary_base ** -(torch.arange(0, channels, 2) / channels)
    angles = torch.arange(shape.length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Any, cosines: Any, sines: Any) -> Any:
    """Rotate the halves of the channels of ``[batch, heads, length, channels]`` by their positions."""
    first, second = x.float().chunk(2, -1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, -1).to(x.dtype)


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
    compiler
        ``torch.compile``, where the model and its loss are to be compiled.
    weights
        The type of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Any,
        autocast: bool,
        compiler: Compiler | None = None,
        weights: Any = torch.float32,
    ) -> None:
        self.model, self._device, self._autocast = model.to(device, weights).train(), device, autocast
        self._loss = compiler(self._mean_loss, dynamic=False) if compiler else self._mean_loss
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

    def __call__(self, batches: list[tuple[Any, Any]]) -> Any:
        """Do a step with pairs of tokens and labels, ``[micro batch, length]``.

        Returns the loss on the device, which may not have computed it yet.
        """
        total = torch.zeros((), device=self._device)
        for tokens, labels in batches:
            with self._precision()():
                loss = self._loss(tokens, labels) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _mean_loss(self, tokens: Any, labels: Any) -> Any:
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), labels.flatten())

    def _precision(self) -> Callable[[], Any]:
        if not self._autocast:
            return contextlib.nullcontext
        return lambda: torch.autocast(self._device.type, torch.bfloat16)
