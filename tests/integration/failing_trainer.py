"""The trainer, with a fault of `tests.trainer.faults` if the environment of the job names one."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Take ``-u -m slipway.trainer.pretrain ...``, as the interpreter that this stands for would."""
    from slipway.trainer import pretrain
    from tests.trainer import faults

    faults.inject()
    return pretrain.main(arguments[arguments.index("-m") + 2 :])
