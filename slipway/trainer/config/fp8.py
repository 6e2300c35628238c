"""Matrices multiplied in FP8 by Transformer Engine, by NeMo's ``model.fp8*`` keys, and their shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import Architecture
from slipway.trainer.config.parallel import Parallel
from slipway.trainer.config.rows import COUNT, ON, SIZE, Reader, Row, read_rows
from slipway.trainer.config.t5 import DECODER, ENCODER
from slipway.trainer.config.values import Values

Format = Literal["e4m3", "hybrid"]
Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]

_KEY = "model.fp8"
_RECIPE = "model.fp8_recipe"
NO_FP8 = "FP8 is Transformer Engine's, which needs CUDA: bf16 here"
_ALGORITHM: Reader = partial(Values.choice, valid=("most_recent", "max"), default="most_recent")
_LENGTHS = {
    "model": "model.encoder_seq_length",
    ENCODER: "model.seq_length",
    DECODER: "model.data.seq_length_dec",
}


class Needs(NamedTuple):
    """The needs of a recipe: CUDA's compute capability, and the multiple that each side of a matrix is.

    Transformer Engine's `assert_dim_for_fp8_exec` (pytorch/utils.py) asks for 8 rows and 16 columns, and the
    backward pass multiplies the transposes; MXFP8 has blocks of 32 in both directions.
    """

    capability: tuple[int, int]
    multiple: int


NEEDS: dict[str, Needs] = {
    "delayed": Needs((8, 9), 16),
    "tensorwise": Needs((8, 9), 16),
    "blockwise": Needs((9, 0), 16),
    "mxfp8": Needs((10, 0), 32),
}


@dataclass(frozen=True)
class Fp8:
    """The format, and how tensors are scaled into it.

    Attributes
    ----------
    format
        ``hybrid`` has E4M3 forward and E5M2 backward (Micikevicius et al. 2022, arXiv 2209.05433).
    recipe
        ``delayed`` scales by the largest values of earlier steps, ``tensorwise`` by that of the tensor
        itself, ``blockwise`` and ``mxfp8`` each block by its own.
    margin, history, algorithm
        Of delayed scaling: bits below the largest value, steps that are remembered, and which of them count.
    wgrad
        Whether gradients of weights are multiplied in FP8 too.
    """

    format: Format
    recipe: Annotated[
        Recipe, Row(_RECIPE, partial(Values.choice, valid=tuple(NEEDS), default="delayed"), on_cpu=NO_FP8)
    ]
    margin: Annotated[int, Row("model.fp8_margin", COUNT, on_cpu=NO_FP8)]
    history: Annotated[int, Row("model.fp8_amax_history_len", partial(SIZE, default=1), on_cpu=NO_FP8)]
    algorithm: Annotated[
        Literal["most_recent", "max"], Row("model.fp8_amax_compute_algo", _ALGORITHM, on_cpu=NO_FP8)
    ]
    wgrad: Annotated[bool, Row("model.fp8_wgrad", ON, on_cpu=NO_FP8)]


def read_fp8(values: Values, precision: str) -> Fp8 | None:
    """Read NeMo's keys, and ours for the recipe, with megatron-core's defaults; None if FP8 is off.

    Raises
    ------
    UserError
        If a value is invalid, or FP8 has no format, no bf16 or no Transformer Engine.
    """
    if not values.flag(_KEY, False):
        return None
    if precision != "bf16":
        values.fail(_KEY, "False, or trainer.precision=bf16: weights stay in 16 bits")
    if not values.flag("model.transformer_engine", False):
        values.fail(_KEY, "False, or model.transformer_engine=True: nothing else multiplies in FP8")
    hybrid, e4m3 = (values.flag(f"{_KEY}_{name}", False) for name in ("hybrid", "e4m3"))
    if hybrid == e4m3:
        values.fail(
            _KEY, f"one of {_KEY}_hybrid and {_KEY}_e4m3 to be True, not {'both' if hybrid else 'none'}"
        )
    return read_rows(Fp8, values, format="hybrid" if hybrid else "e4m3")


def check_shapes(fp8: Fp8, node: str, shape: Architecture, micro_batch: int, parallel: Parallel) -> None:
    """Check that the matrices of a stack of layers have sides that FP8 takes.

    Raises
    ------
    UserError
        Naming the key, and the nearest value that does.
    """
    multiple, tensor = NEEDS[fp8.recipe].multiple, parallel.tensor
    _check(fp8, f"{node}.hidden_size", shape.hidden_size, multiple, "")
    _check(
        fp8,
        f"{node}.ffn_hidden_size",
        shape.ffn_hidden_size,
        multiple * tensor,
        f" / {tensor} tensor ranks" * (tensor > 1),
    )
    heads = shape.num_attention_heads + 2 * shape.num_query_groups
    # The input of the projection, and the queries, keys and values together.
    step = max(
        multiple // math.gcd(multiple, count // tensor) for count in (shape.num_attention_heads, heads)
    )
    _check(fp8, f"{node}.kv_channels", shape.kv_channels, step, " x heads of a rank")
    ranks = parallel.context * (tensor if parallel.sequence else 1)
    step = multiple * ranks // math.gcd(multiple * ranks, micro_batch)
    _check(fp8, _LENGTHS[node], shape.seq_length, step, f" x micro batch {micro_batch} / {ranks} ranks")


def _check(fp8: Fp8, key: str, value: int, multiple: int, others: str) -> None:
    if value % multiple == 0:
        return
    below = value // multiple * multiple
    nearest = below if below and value - below <= below + multiple - value else below + multiple
    raise UserError(
        f"{key}={value}: with {_KEY}=True and {_RECIPE}={fp8.recipe} the sides of matrices are multiples of "
        f"{NEEDS[fp8.recipe].multiple}, here {key.rpartition('.')[2]}{others}; expected a multiple of "
        f"{multiple}, such as {nearest}"
    )
