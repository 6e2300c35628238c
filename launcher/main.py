"""Entry points: the command `slipway`, and NeMo Megatron launcher's ``python launcher/main.py OVERRIDES``.

The latter is the same as ``slipway launch`` with these arguments. While modules are imported Ctrl-C ends the
process at once: an exception would print a traceback.
"""

import atexit
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

# WATCHING_ENDED and MISTAKE of launcher.errors, which is not imported yet.
_INTERRUPTED, _MISTAKE = 130, 2
_IMPORTED = ("hydra", "omegaconf", "jinja2", "pydantic", "submitit", "rich")


def _refuse_interpreter(root: str) -> None:
    """End with one line if this Python, 3.6 or newer, cannot run the launcher."""
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    is_old = sys.version_info[:2] < (3, 11)
    if not is_old and not missing:
        return
    why = "is older than 3.11" if is_old else f"lacks {', '.join(missing)}"
    way = f"activate {root}/.venv (source {root}/.venv/bin/activate), which `make setup` makes"
    sys.stderr.write(f"slipway: {sys.executable}, Python {sys.version.split()[0]}, {why}: {way}\n")
    sys.exit(_MISTAKE)


def _leave(number: int, frame: "FrameType | None") -> None:
    os._exit(_INTERRUPTED)


def _replace_handler(old: object, new: object) -> None:
    # The parent process may have set Ctrl-C to be ignored.
    if signal.getsignal(signal.SIGINT) == old:
        signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]  # one of those that Python knows


_replace_handler(signal.default_int_handler, _leave)
if __name__ == "__main__":
    # Python put this folder there; from it, `plan`, `config` and others would shadow other modules.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120
    _refuse_interpreter(sys.path[0])
# Modules live as long as the process. To search them for garbage, again and again while they are imported and
# once more at the end, would take a quarter of the time of a short command.
gc.set_threshold(100_000)
atexit.register(gc.freeze)


def _start() -> None:
    """Leave the imported modules out of searches for garbage, and Ctrl-C to the verb."""
    gc.freeze()
    _replace_handler(_leave, signal.default_int_handler)


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run one command line; return the exit code."""
    from launcher.cli.app import main as run

    try:
        return run(arguments, _start)
    finally:
        # Interpreter shutdown is slow; let Ctrl-C end it at once.
        _replace_handler(signal.default_int_handler, _leave)


if __name__ == "__main__":
    from launcher.cli.app import use_utf8

    use_utf8()
    sys.exit(main(["launch", *sys.argv[1:]]))
