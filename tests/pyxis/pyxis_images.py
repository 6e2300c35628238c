"""Images for the tests with a real Pyxis, made of what this machine has: programs, Python, packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

_PROGRAMS = ("bash", "cat", "env", "hostname", "id", "ls", "mkdir", "mv", "sleep", "touch", "tr")
# The path that follows a name, or that of the loader, which stands alone.
_LIBRARY = re.compile(r"(?:=> |^\s+)(/\S+) \(0x", re.MULTILINE)
# Files that no training reads.
_IGNORED = shutil.ignore_patterns("__pycache__", "*-packages", "test", "idlelib", "config-*")
_USELESS = re.compile(r"(^|/)(__pycache__|include|tests?)/|\.a$")
# The script that Enroot starts a container with: it goes to the image's working directory, and runs its entry
# point when Pyxis lets it.
_RC = """\
mkdir -p "{workdir}" 2> /dev/null
cd "{workdir}" && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi
export CAME_THROUGH=entrypoint
exec "$@"
"""


def rootfs_with_programs(root: Path, workdir: str = "/opt/of the image", **environment: str) -> Path:
    """Make a root file system with a shell, the programs that tasks call, and an environment."""
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "usr/bin", "root", workdir.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    programs = [Path(str(shutil.which(name, path="/usr/bin:/bin"))) for name in _PROGRAMS]
    for program in programs:
        shutil.copy(program, root / "bin" / program.name)
    (root / "bin/sh").symlink_to("bash")
    _add_libraries(root, programs)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/rc").write_text(_RC.format(workdir=workdir))
    values = {"PATH": "/usr/bin:/bin"} | environment
    (root / "etc/environment").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return root


def add_trainer(root: Path, repository: Path, *requirements: str) -> Path:
    """Add this Python, the packages that `requirements` need, and our trainer; return the root."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    interpreter = Path(os.path.realpath(sys.executable))
    shutil.copytree(stdlib, root / stdlib.relative_to("/"), ignore=_IGNORED, symlinks=True)
    (root / interpreter.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(interpreter, root / interpreter.relative_to("/"))
    (root / "usr/bin/python3").symlink_to(interpreter)
    packages = root / "opt/packages"
    for source, name in _files(_closure(requirements)):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, packages / name)
        except OSError:  # on another file system
            shutil.copy(source, packages / name)
    libraries = [*stdlib.rglob("*.so"), *packages.rglob("*.so"), *packages.rglob("*.so.*")]
    _add_libraries(root, [interpreter, *libraries])
    shutil.copytree(repository / "slipway", root / "opt/slipway/slipway", ignore=_IGNORED)
    return root


def squash(root: Path, image: Path) -> Path:
    """Pack a root file system, quickly."""
    command = ["mksquashfs", root, image, "-comp", "lz4", "-all-root", "-no-progress", "-quiet"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return image


def _closure(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the needed distributions by name; those that are not installed are for other platforms."""
    distributions: dict[str, metadata.Distribution] = {}
    pending = list(requirements)
    while pending:
        words = re.match(r"[A-Za-z0-9._-]+", pending.pop())
        assert words
        name = re.sub("[-_.]+", "-", words.group()).lower()
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        pending += [text for text in distributions[name].requires or () if "extra ==" not in text]
    return distributions


def _files(distributions: dict[str, metadata.Distribution]) -> Iterator[tuple[Path, str]]:
    for distribution in distributions.values():
        for file in distribution.files or ():
            if not str(file).startswith("..") and not _USELESS.search(str(file)):
                yield Path(str(distribution.locate_file(file))), str(file)


def _add_libraries(root: Path, binaries: list[Path]) -> None:
    """Add the libraries of binaries, unless they are in the root already."""
    # ldd ends with 1 when one of the files is not dynamic.
    listing = subprocess.run(
        ["ldd", *binaries], stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stdout
    for path in {Path(match) for match in _LIBRARY.findall(listing)}:
        target = root / path.relative_to("/")
        if not path.is_relative_to(root) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
