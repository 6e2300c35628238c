"""Asking the Python of an image what is installed there, with whatever starts an image on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from launcher.errors import UserError, one_line
from launcher.images import tools
from launcher.images.store import ImageConfig

# Of the image's variables those that decide which Python is found, and what it finds.
_TAKEN = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PYTHONS = ("python3", "python")

# Starts a command in an image: the words in front of it.
Starter = Callable[[Path], AbstractContextManager[list[str]]]


def installed(image: Path, config: ImageConfig) -> dict[str, str | None]:
    """The versions of Python and of what trains with it; ``None`` for what is not in the image.

    Raises
    ------
    UserError
        If nothing on this machine can start the image, or there is no Python in it; with what each said.
    """
    starters = [(name, start) for name, start in _STARTERS if _is_there(name)]
    if not starters:
        raise UserError(
            "nothing here can start an image: --deep needs squashfuse and unshare, or enroot, or apptainer",
            hint="on Debian and Ubuntu: apt-get install squashfuse",
        )
    said: list[str] = []
    for name, start in starters:
        try:
            return _asked(image, start, config)
        except UserError as error:
            said.append(f"with {name}: {error.message}")
    raise UserError("\n".join([f"{one_line(str(image))}: its Python could not be asked", *said]))


def _is_there(name: str) -> bool:
    return not tools.missing(*(("squashfuse", "unshare", "chroot") if name == "unshare" else (name,)))


def _asked(image: Path, start: Starter, config: ImageConfig) -> dict[str, str | None]:
    program = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    env = [word for word in config.env if word.partition("=")[0] in _TAKEN]
    if not any(word.startswith("PATH=") for word in env):
        env.append(_PATH)
    failed: UserError | None = None
    with start(image) as words:
        for python in _PYTHONS:
            argv = [*words, "env", "-i", *env, python, "-B", "-c", program]
            try:
                answer = tools.run(argv, doing=f"run {python} in it")
            except UserError as error:
                failed = failed or error
                continue
            return _read(answer)
    assert failed is not None
    raise failed


def _read(answer: str) -> dict[str, str | None]:
    try:
        found = json.loads(answer.strip().splitlines()[-1])
        return {str(name): value if value is None else str(value) for name, value in found.items()}
    except (ValueError, IndexError, AttributeError) as error:
        raise UserError(f"its Python did not answer with what was asked: {one_line(answer[:200])}") from error


@contextlib.contextmanager
def _unshared(image: Path) -> Iterator[list[str]]:
    """Mount it as this user, and go there in namespaces of its own."""
    with tempfile.TemporaryDirectory(prefix="slipway-probe-") as folder:
        tools.run(["squashfuse", "-o", "ro", image, folder], doing=f"mount {one_line(str(image))}")
        try:
            root = () if os.geteuid() == 0 else ("--map-root-user",)
            yield ["unshare", *root, "--mount", "--ipc", "--", "chroot", folder]
        finally:
            _unmount(folder)


def _unmount(folder: str) -> None:
    for words in (["fusermount3", "-u", "-z"], ["fusermount", "-u", "-z"], ["umount", "-l"]):
        if tools.which(words[0]) is not None:
            with contextlib.suppress(UserError):
                tools.run([*words, folder], doing="unmount it")
                return


@contextlib.contextmanager
def _enroot(image: Path) -> Iterator[list[str]]:
    # `--rc` with a script of nothing: the entry point of the image is not asked for.
    with tempfile.NamedTemporaryFile("w", prefix="slipway-rc-") as script:
        script.write('exec "$@"\n')
        script.flush()
        yield ["enroot", "start", "--rc", script.name, str(image)]


@contextlib.contextmanager
def _apptainer(image: Path) -> Iterator[list[str]]:
    yield ["apptainer", "--quiet", "exec", "--containall", str(image)]


_STARTERS: Sequence[tuple[str, Starter]] = (
    ("unshare", _unshared),
    ("enroot", _enroot),
    ("apptainer", _apptainer),
)
