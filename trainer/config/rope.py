"""What changes rotary positions (Su et al. 2021, arXiv 2104.09864) beyond their base and share of a head."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.values import Values
from trainer.errors import UserError


@dataclass(frozen=True)
class Rope:
    """Options of rotary positions.

    Attributes
    ----------
    interleaved
        Whether a pair of channels is two neighbours, rather than one of each half.
    interpolation
        What positions are divided by (Chen et al. 2023, arXiv 2306.15595); None for 1.
    scaling
        What the lowest frequencies are divided by, as in Llama 3.1 for a context grown from 8,192 tokens, by
        megatron-core's formula, which is NeMo's; None for 1.
    fusion
        Whether Transformer Engine's kernel is asked for.
    """

    interleaved: bool
    interpolation: float | None
    scaling: float | None
    fusion: bool


def read_rope(values: Values) -> Rope:
    """Read NeMo's keys.

    Raises
    ------
    UserError
        If a value is invalid, or a factor is given and nothing is to be scaled with it.
    """
    scaled = values.flag("model.scale_positional_embedding", False)
    key = "model.seq_len_interpolation_factor"
    if values.is_set("model.scale_factor") and not scaled:
        raise UserError(
            f"model.scale_factor={values.raw('model.scale_factor')!r}: only valid with "
            "model.scale_positional_embedding=True"
        )
    return Rope(
        interleaved=values.flag("model.rotary_interleaved", False),
        interpolation=values.number(key, minimum=1.0) if values.is_set(key) else None,
        scaling=values.number("model.scale_factor", 8.0, minimum=1.0) if scaled else None,
        fusion=values.flag("model.apply_rope_fusion", False),
    )
