"""Names of parameters without the prefixes that wrappers of a model put into them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipway.common.errors import UserError

# torch.compile, FSDP, activation checkpointing; anywhere in a name.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# DistributedDataParallel and DeepSpeed; in front of all names.
_OUTERMOST = "module."
_FLAT = "_flat_param"


def plain_names(names: Iterable[str], directory: Path) -> dict[str, str]:
    """Return each name's plain one.

    Raises
    ------
    UserError
        If two names become one, or a name is of FSDP's flat parameters, which do not tell what is in them.
    """
    plain = {}
    for name in names:
        if name.rpartition(".")[2] == _FLAT:
            raise UserError(
                f"{directory}: {name} is a flat parameter of FSDP's, whose parameters it does not name; "
                "save with StateDictType.SHARDED_STATE_DICT, or with get_model_state_dict"
            )
        plain[name] = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    while plain and all(name.startswith(_OUTERMOST) for name in plain.values()):
        plain = {name: short.removeprefix(_OUTERMOST) for name, short in plain.items()}
    owners: dict[str, str] = {}
    for name, short in plain.items():
        if short in owners:
            raise UserError(
                f"{directory}: {owners[short]} and {name} are both {short} without their wrappers"
            )
        owners[short] = name
    return plain
