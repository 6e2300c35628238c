"""Files that :func:`torch.save` wrote for other programs, read without executing anything of theirs.

Besides tensors they hold objects of the program's own classes, such as DeepSpeed's loss scaler or the
``argparse.Namespace`` of Megatron-LM's options. Such an object becomes an :class:`Unknown`, which keeps its
saved state. Nothing that a file names is imported or called.
"""

from __future__ import annotations

import contextlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slipway.common.errors import UserError, first_line
from slipway.trainer.checkpoint.files import resolve_inside

# Names of the standard library in the pickles of harmless values. Python 3.11 pickles the members of
# enumerations as calls of `getattr`, which is not called either.
_HARMLESS = {
    "argparse.Namespace",
    "builtins.getattr",
    "collections.defaultdict",
    "collections.deque",
    "datetime.datetime",
    "datetime.timedelta",
    "functools.partial",
    "pathlib.Path",
    "pathlib.PosixPath",
    "signal.Signals",
    "types.SimpleNamespace",
    "uuid.UUID",
}


class Unknown:
    """An object of a class that is not known here: the arguments of its creation, and its attributes."""

    def __new__(cls, *arguments: Any, **_: Any) -> Unknown:
        value = super().__new__(cls)
        value.__dict__["arguments"] = arguments
        return value

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def load(path: Path) -> Any:
    """Return the content of a file; its tensors are mapped from the file, not read.

    Raises
    ------
    UserError
        If the file is missing, damaged, or names a function of the standard library, as no checkpoint does.
    """
    if not resolve_inside(path).is_file():
        raise UserError(f"{path} is missing")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} cannot be read: it is not an archive of torch's, or only a part of one")
    try:
        with _allow_no_class():
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            for name in names:
                if name.partition(".")[0] in sys.stdlib_module_names and name not in _HARMLESS:
                    raise UserError(f"{path} names {name}, which nothing that a checkpoint holds needs")
            known: list[Any] = [(type("Unknown", (Unknown,), {}), name) for name in names]
            torch.serialization.add_safe_globals(known)
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        # A damaged archive may raise anything.
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None


@contextlib.contextmanager
def _allow_no_class() -> Iterator[None]:
    """Have torch allow no class in this block: megatron-core, once imported, allows its own."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
