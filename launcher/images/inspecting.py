"""Looking at an image: its file and configuration, whether it is complete, and its packages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape, explain_refusal
from launcher.images import squashfs, tools
from launcher.images.progress import SILENT, ImageProgress
from launcher.images.squashfs import Superblock, read_superblock, sha256_of
from launcher.images.store import ImageConfig, Sidecar, read_sidecar, sidecar_path
from launcher.images.tools import ToolError
from launcher.secrecy import MASK, is_secret_name, without_secrets

# Where Enroot writes an image's configuration (its src/docker.sh, docker::configure).
_ENVIRONMENT = "etc/environment"
_RC = "etc/rc"
# On most systems the first leads to the second.
_RELEASES = ("etc/os-release", "usr/lib/os-release")
_RELEASE_NAME = re.compile(r"^PRETTY_NAME=(.*)", re.MULTILINE)

_PROVENANCE = re.compile(r"# enroot-provenance: (.*)")
_LABEL = re.compile(r"# (\S+) (.*)")
_WORKDIR = re.compile(r"cd (.*?)( && unset OLDPWD.*)?")
_EXEC = re.compile(r"exec (.*)")
_ARGUMENTS = '"$@"'

_IMPORT_AGAIN = "make it again: slipway image import ... --force, or slipway image build ... --force"


@dataclass(frozen=True, slots=True)
class InspectedImage:
    """An image in a file; `release` is the system in it, such as ``Ubuntu 22.04.4 LTS``."""

    path: Path
    size: int
    block: Superblock
    record: Sidecar | None
    source: str | None
    config: ImageConfig
    release: str | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the same for programs, without secrets."""
        config, record = self.config, self.record
        return {
            "path": str(self.path),
            "size": self.size,
            "created": self.block.created.isoformat().replace("+00:00", "Z"),
            "compression": self.block.compression,
            "block_size": self.block.block_size,
            "source": self.source,
            **{name: getattr(record, name, None) for name in ("digest", "sha256", "made_by")},
            "recipe": asdict(record.recipe) if record and record.recipe else None,
            "release": self.release,
            "architecture": config.architecture or None,
            "labels": {name: without_secrets(value) for name, value in config.labels.items()},
            "entrypoint": list(config.entrypoint),
            "cmd": list(config.cmd),
            "workdir": config.workdir or None,
            "volumes": list(config.volumes),
            "env": printable_env(config.env),
            "notes": list(self.notes),
        }


def inspect(path: Path) -> InspectedImage:
    """Read an image's record, or the image itself if it has none; raise UserError if it is not a squashfs."""
    block = read_superblock(path)
    record = read_sidecar(path)
    texts: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    if tools.find_program("unsquashfs") is not None:
        texts = squashfs.read_texts(path, (_ENVIRONMENT, _RC, *_RELEASES))
    else:
        notes = (f"its files were not read: unsquashfs is missing; {tools.explain_install('unsquashfs')}",)
    source, config = _parse_start_files(texts.get(_RC, ""), texts.get(_ENVIRONMENT, ""))
    release = _RELEASE_NAME.search(next((texts[name] for name in _RELEASES if name in texts), ""))
    return InspectedImage(
        path=path,
        size=path.stat().st_size,
        block=block,
        record=record,
        source=record.source if record else source,
        config=record.config if record else config,
        release=" ".join(_split(release[1])) or None if release else None,
        notes=notes,
    )


def printable_env(env: Sequence[str]) -> dict[str, str]:
    """Return the variables of an image, with secrets masked."""
    pairs = [word.partition("=")[::2] for word in env]
    return {name: MASK if is_secret_name(name.upper()) else without_secrets(text) for name, text in pairs}


def _parse_start_files(rc: str, environment: str) -> tuple[str | None, ImageConfig]:
    """Return the origin and the configuration of an image, from the files that Enroot writes into it."""
    source: str | None = None
    labels: dict[str, str] = {}
    lines = iter(rc.splitlines())
    for line in lines:
        if match := _PROVENANCE.fullmatch(line):
            source = match[1] or None
        elif match := _LABEL.fullmatch(line):
            labels[match[1]] = match[2]
        else:
            break
    workdir, commands = "", []
    for line in map(str.strip, lines):
        if not workdir and (match := _WORKDIR.fullmatch(line)):
            workdir = " ".join(_split(match[1]))
        elif match := _EXEC.fullmatch(line):
            commands.append(match[1])
    # With arguments the entry point gets them; without, the command follows it.
    with_arguments = (line.removesuffix(_ARGUMENTS) for line in commands if line.endswith(_ARGUMENTS))
    without = (line for line in commands if not line.endswith(_ARGUMENTS))
    entrypoint = _split(next(with_arguments, ""))
    return source, ImageConfig(
        env=tuple(line for line in environment.splitlines() if "=" in line),
        workdir=workdir,
        entrypoint=entrypoint,
        cmd=_split(next(without, ""))[len(entrypoint) :],
        labels=labels,
    )


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:  # a script that somebody wrote
        return ()


@dataclass(slots=True)
class VerifiedImage:
    """The result of verifying an image."""

    path: Path
    checked: list[str] = field(default_factory=list)
    problem: UserError | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.problem is None


def verify(path: Path, *, deep: bool = False, progress: ImageProgress = SILENT) -> VerifiedImage:
    """Check as much of an image as is possible without writing; `deep` decompresses every file of it, too."""
    image = VerifiedImage(path)
    try:
        _verify(image, deep, progress)
    except UserError as error:
        image.problem = UserError(error.message, hint=error.hint or _IMPORT_AGAIN)
    except OSError as error:
        # An error of the disk itself has no explanation.
        unexplained = UserError(f"{escape(str(path))}: {error.strerror or error}")
        image.problem = explain_refusal(error) or unexplained
    return image


def _verify(image: VerifiedImage, deep: bool, progress: ImageProgress) -> None:
    path, name = image.path, escape(str(image.path))
    block, record = read_superblock(path), read_sidecar(path)
    image.checked.append(f"{path.stat().st_size:,} bytes of squashfs, {block.compression}")
    if record is not None:
        progress.step(f"sha256 of {path.name}", record.size)
        checksum, short = sha256_of(path, progress), record.sha256[:12]
        if checksum != record.sha256:
            raise UserError(
                f"{name}: its sha256 is {checksum[:12]}..., and was {short}... when it was made: "
                "its bytes have changed"
            )
        image.checked.append(f"sha256 {short}... as when it was made")
    elif sidecar_path(path).exists():
        raise UserError(
            f"{name}: {sidecar_path(path).name} is not the record of this file",
            hint=f"{_IMPORT_AGAIN}; or remove the record, if the image is yours",
        )
    else:
        image.notes.append("its checksum: it has no record")
    if not deep and tools.find_program("unsquashfs") is None:
        image.notes.append("its tables: there is no unsquashfs on PATH")
        return
    count, total = squashfs.count_files(path)
    image.checked.append(f"its tables: {count:,} files of {block.inodes:,} entries")
    if deep:
        progress.step(f"reading the files of {path.name}", total)
        squashfs.decompress_all(path, progress)
        image.checked.append(f"every file: {total:,} bytes")


# --- inspect --deep

# The variables of the image that decide which Python and which packages are found.
_PROBE_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PYTHONS = ("python3", "python")


def installed_versions(image: Path, config: ImageConfig) -> dict[str, str | None]:
    """Return the versions of Python and of training packages in an image; ``None`` for absent ones.

    The image's own Python is started, with any tool that can start an image on this machine.
    """
    starters = [(needs[0], start) for needs, start in _STARTERS if not tools.list_missing(*needs)]
    if not starters:
        raise UserError(
            "nothing here can start an image: --deep needs squashfuse and unshare, or enroot, or apptainer",
            hint="on Debian and Ubuntu: apt-get install squashfuse",
        )
    failures: list[str] = []
    for name, start in starters:
        try:
            with start(image) as words:
                return _probe(words, config)
        except UserError as error:
            failures.append(f"with {name}: {error.message}")
    raise UserError("\n".join([f"{escape(str(image))}: its Python could not be started", *failures]))


def _probe(words: list[str], config: ImageConfig) -> dict[str, str | None]:
    program = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    env = [word for word in config.env if word.partition("=")[0] in _PROBE_VARIABLES]
    if not any(word.startswith("PATH=") for word in env):
        env.append(_DEFAULT_PATH)
    failure: UserError | None = None
    for python in _PYTHONS:
        argv = [*words, "env", "-i", *env, python, "-B", "-c", program]
        try:
            return _parse_answer(tools.run(argv, doing=f"run {python} in it"))
        except ToolError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _parse_answer(answer: str) -> dict[str, str | None]:
    try:
        versions = json.loads(answer.strip().splitlines()[-1])
        return {str(name): value if value is None else str(value) for name, value in versions.items()}
    except (ValueError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f"its Python gave another answer: {escape(answer[:200])}") from error


@contextlib.contextmanager
def _start_by_unshare(image: Path) -> Iterator[list[str]]:
    """Mount an image as this user, and enter it in new namespaces."""
    with tempfile.TemporaryDirectory(prefix="slipway-probe-") as folder:
        tools.run(["squashfuse", "-o", "ro", image, folder], doing=f"mount {escape(str(image))}")
        try:
            root = () if os.geteuid() == 0 else ("--map-root-user",)
            yield ["unshare", *root, "--mount", "--ipc", "--", "chroot", folder]
        finally:
            _unmount(folder)


def _unmount(folder: str) -> None:
    for words in (["fusermount3", "-u", "-z"], ["fusermount", "-u", "-z"], ["umount", "-l"]):
        if tools.find_program(words[0]) is not None:
            with contextlib.suppress(UserError):
                tools.run([*words, folder], doing="unmount it")
                return


@contextlib.contextmanager
def _start_by_enroot(image: Path) -> Iterator[list[str]]:
    # `--rc` with a script that only runs the command, in place of the image's entry point.
    with tempfile.NamedTemporaryFile("w", prefix="slipway-rc-") as script:
        script.write('exec "$@"\n')
        script.flush()
        yield ["enroot", "start", "--rc", script.name, str(image)]


def _start_by_apptainer(image: Path) -> AbstractContextManager[list[str]]:
    return contextlib.nullcontext(["apptainer", "--quiet", "exec", "--containall", str(image)])


# The programs that each needs, and the words that start a command in an image.
_STARTERS: Sequence[tuple[tuple[str, ...], Callable[[Path], AbstractContextManager[list[str]]]]] = (
    (("unshare", "squashfuse", "chroot"), _start_by_unshare),
    (("enroot",), _start_by_enroot),
    (("apptainer",), _start_by_apptainer),
)
