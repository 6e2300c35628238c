"""The very small configuration of a T5, as changes of the GPT's."""

from __future__ import annotations

from typing import Any

from tests.trainer.conftest import REMOVED

_CALLBACK = "exp_manager.checkpoint_callback_params"
SEQ_LENGTH = 32
SEQ_LENGTH_DEC = 12


def both(**changes: Any) -> dict[str, Any]:
    """Return changes of both stacks."""
    stacks = ("encoder", "decoder")
    return {f"model.{stack}.{name}": value for stack in stacks for name, value in changes.items()}


_STACK = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation": "geglu",
}
T5: dict[str, Any] = {
    **{
        f"model.{name}": REMOVED
        for name in (
            "encoder_seq_length",
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "hidden_dropout",
            "attention_dropout",
        )
    },
    "model.mcore_t5": True,
    "model.seq_length": SEQ_LENGTH,
    "model.data.seq_length_dec": SEQ_LENGTH_DEC,
    **both(**_STACK),
    f"{_CALLBACK}.filename": "megatron_t5--{val_loss:.2f}-{step}-{consumed_samples}",
}
