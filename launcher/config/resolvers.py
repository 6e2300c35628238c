"""OmegaConf resolvers that the configuration tree uses.

`multiply`, `divide_ceil` and `divide_floor` are the NeMo Megatron launcher's: users' own trees have them.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import OmegaConf

from launcher.sandbox import default_directory, is_sandbox, slurm_conf_path


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf; calling it again changes nothing."""
    OmegaConf.register_new_resolver("multiply", _multiply, replace=True)
    OmegaConf.register_new_resolver("divide_ceil", lambda a, b: -(-a // b), replace=True)
    OmegaConf.register_new_resolver("divide_floor", lambda a, b: a // b, replace=True)
    OmegaConf.register_new_resolver("sandbox_slurm_conf", _sandbox_slurm_conf, replace=True)


def _multiply(*factors: float) -> float:
    product: float = 1
    for factor in factors:
        product *= factor
    return product


def _sandbox_slurm_conf() -> str:
    """The sandbox that the shell points at, as `eval "$(slipway sandbox env)"` leaves it, or the default one.

    Never another Slurm: a site's profile may export SLURM_CONF.
    """
    named = os.environ.get("SLURM_CONF")
    if named and is_sandbox(Path(named).parent.parent):
        return named
    return str(slurm_conf_path(default_directory()))
