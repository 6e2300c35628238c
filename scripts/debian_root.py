#!/usr/bin/env python3
"""Run a command in another Debian release, in a root file system that debootstrap makes once.

The command sees a copy of the working tree in /slipway, and the host name and /etc/hosts of a fresh install.
Its processes and mounts have namespaces of their own and end with it. `make test-slurm` uses this.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

REPOSITORY = Path(__file__).resolve().parents[1]

_EPILOG = """\
examples:
  scripts/debian_root.py trixie make .venv/test.done               set up the virtual environment of that root
  scripts/debian_root.py trixie .venv/bin/pytest tests/sandbox
  scripts/debian_root.py trixie --tree shared bash                 look around in what the last command left
  scripts/debian_root.py sid --refresh slurmctld -V                unstable of today

environment:
  DEBIAN_MIRROR   the mirror that debootstrap takes packages from (default: debootstrap's own)
  PIP_*           passed on; the local files and directories that they name are mounted, read-only
  http_proxy, https_proxy, no_proxy   passed on

exit code:
  that of COMMAND; 2 if there is no root file system to run it in
"""

# Wheels of megatron-core end at Python 3.13: newer releases build it from source.
_PACKAGES = (
    *("python3", "python3-venv", "python3-dev", "g++", "make", "git"),
    *("slurm-wlm", "munge", "slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server"),
    *("buildah", "netavark", "skopeo", "umoci", "squashfs-tools", "gettext-base"),
)
# Names the packages that a root file system was made with.
_STAMP = Path("etc/slipway-packages")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--propagation", "slave")
# Slurm resolves no name where 127.0.0.1 is the only address (getaddrinfo with AI_ADDRCONFIG).
_LOOPBACK = 'ip link set lo up && ip address add 127.0.0.2/8 dev lo && exec "$@"'
_NO_NETWORK = (*_NAMESPACES, "--net", "sh", "-c", _LOOPBACK, "sh")

# Debian's installer gives the host name an address of its own.
_INSTALLER_NAME = "debian"
_INSTALLER_HOSTS = f"""\
127.0.0.1\tlocalhost
127.0.1.1\t{_INSTALLER_NAME}

# The following lines are desirable for IPv6 capable hosts
::1     localhost ip6-localhost ip6-loopback
ff02::1 ip6-allnodes
ff02::2 ip6-allrouters
"""

# enter ROOT HOSTNAME PIP_CACHE PATHS COMMAND...: PATHS, one a line, are mounted read-only at the same place.
_ENTER = r"""
set -eu
root=$1 name=$2 cache=$3 paths=$4
shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mkdir -p "$root/slipway" "$root/var/cache/pip"
mount --bind "$cache" "$root/var/cache/pip"
while IFS= read -r path; do
    [[ -n $path ]] || continue
    mkdir -p "$root${path%/*}"
    [[ -e $root$path ]] || if [[ -d $path ]]; then mkdir "$root$path"; else touch "$root$path"; fi
    mount --bind -o ro "$path" "$root$path"
done <<<"$paths"
hostname "$name"
# This bash stays, as the init that reaps what daemons leave.
exec chroot "$root" /bin/bash -c 'cd /slipway; "$@"; exit $?' bash "$@"
"""


class RootError(Exception):
    """The error that there is no root file system to run a command in."""


def main(words: list[str]) -> int:
    """Return 2 with a message, or become the command."""
    options = _parse(words)
    try:
        _run(options)
    except (RootError, subprocess.CalledProcessError) as error:
        print(f"debian_root.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="debian_root.py",
        usage="%(prog)s SUITE [options] COMMAND ...",
        description="Run a command in another Debian release: SUITE is bookworm, trixie, sid, ...",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hosts",
        choices=("installer", "keep"),
        default="installer",
        help="host name and /etc/hosts: as Debian's installer leaves them, or those of this machine",
    )
    parser.add_argument(
        "--network",
        choices=("keep", "none"),
        default="keep",
        help="that of this machine, or a loopback interface of its own: commands side by side share no port",
    )
    parser.add_argument(
        "--tree",
        choices=("fresh", "shared"),
        default="fresh",
        help="/slipway: a new copy of the working tree, or the present one, which other commands may use too",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=REPOSITORY / ".cache" / "debian",
        metavar="DIR",
        help="where the root file systems are (default: .cache/debian)",
    )
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="make the root file system again if the suite has newer packages",
    )
    parser.add_argument("--remake", action="store_true", help="make the root file system again")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    # SUITE comes first, and argparse would hand the options behind a positional to the command.
    suites = words[:1] if words and not words[0].startswith("-") else []
    options = parser.parse_args(words[len(suites) :])
    if not suites or not options.command:
        parser.error("SUITE and COMMAND are needed")
    options.suite = suites[0]
    options.cache = options.cache.resolve()
    return options


def _run(options: argparse.Namespace) -> NoReturn:
    """Replace this process by the command."""
    if os.geteuid() != 0:
        raise RootError("root privileges are needed, to mount and to chroot")
    (options.cache / "pip").mkdir(parents=True, exist_ok=True)
    root = options.cache / options.suite
    is_stale = options.remake or not _is_current(root) or options.refresh
    with (options.cache / f"{options.suite}.lock").open("w") as lock:
        if is_stale or options.tree == "fresh":
            _lock(lock, fcntl.LOCK_EX, options.suite)
            if options.remake or not _is_current(root) or (options.refresh and _has_newer_packages(root)):
                _make(root)
            if options.tree == "fresh":
                _copy_tree(root / "slipway")
        _lock(lock, fcntl.LOCK_SH, options.suite)
        # The command holds the lock until its last process has ended.
        os.set_inheritable(lock.fileno(), True)
        is_kept = options.hosts == "keep"
        _copy_settings(root, Path("/etc/hosts").read_text() if is_kept else _INSTALLER_HOSTS)
        name = socket.gethostname() if is_kept else _INSTALLER_NAME
        sys.stdout.flush()
        namespaces = _NAMESPACES if options.network == "keep" else _NO_NETWORK
        command = _entering(root, name, *options.command, namespaces=namespaces)
        os.execvpe(command[0], command, _environment())


def _lock(lock: TextIO, kind: int, suite: str) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"Waiting for another command in {suite} to end", file=sys.stderr)
        fcntl.flock(lock, kind)


def _entering(root: Path, name: str, *command: str, namespaces: tuple[str, ...] = _NAMESPACES) -> list[str]:
    """Return the command line that runs a command in a root file system."""
    places = [str(root), name, str(root.parent / "pip"), "\n".join(_pip_paths())]
    return [*namespaces, "bash", "-c", _ENTER, "enter", *places, *command]


def _environment() -> dict[str, str]:
    """Return the command's environment: little of this one."""
    proxies = {"http_proxy", "https_proxy", "no_proxy"}
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower() in proxies or name == "TERM"
    }
    own = {"HOME": "/root", "PATH": _PATH, "LANG": "C.UTF-8", "PIP_CACHE_DIR": "/var/cache/pip"}
    return {"TERM": "dumb", **passed, **own}


def _pip_paths() -> list[str]:
    """Return the local paths that pip's variables name, such as a folder of wheels."""
    words = [word for name, value in os.environ.items() if name.startswith("PIP_") for word in value.split()]
    paths = [word.removeprefix("file://") for word in words]
    return [path for path in paths if path.startswith("/") and Path(path).exists()]


def _is_current(root: Path) -> bool:
    stamp = root / _STAMP
    return stamp.is_file() and stamp.read_text().split() == list(_PACKAGES)


def _has_newer_packages(root: Path) -> bool:
    """Return whether the suite has newer packages than a root file system; False if no mirror answers."""
    command = "apt-get update --quiet=2 && apt-get dist-upgrade --simulate --quiet"
    done = subprocess.run(
        _entering(root, _INSTALLER_NAME, "sh", "-c", command),
        env=_environment(),
        capture_output=True,
        text=True,
    )
    return done.returncode == 0 and "\nInst " in done.stdout


def _make(root: Path) -> None:
    """Make a root file system under a temporary name, then put it in its place."""
    if not shutil.which("debootstrap", path=_PATH):
        raise RootError("debootstrap is missing (as root: apt-get install debootstrap)")
    log = root.with_name(f"{root.name}.log")
    print(f"Making {root} with debootstrap; this takes minutes (log: {log})", file=sys.stderr)
    draft = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    draft.chmod(0o755)
    try:
        with log.open("w") as output:
            _bootstrap(root.name, draft, output)
        (draft / _STAMP).write_text("\n".join(_PACKAGES) + "\n")
        if root.exists():
            root.rename(draft.with_name(f"{draft.name}-replaced"))
        draft.rename(root)
    finally:
        # Also what was left when an earlier attempt was killed: the lock is ours.
        _remove(*root.parent.glob(f".{root.name}-*"))


def _bootstrap(suite: str, draft: Path, output: TextIO) -> None:
    """Install Debian and the packages of the tests in an empty directory."""
    mirror = os.environ.get("DEBIAN_MIRROR", "").split()
    base = ["debootstrap", "--variant=minbase", "--include=ca-certificates", suite, str(draft), *mirror]
    _logged([*_NAMESPACES, *base], output)
    # No daemon starts when its package is installed.
    _update(draft / "usr/sbin/policy-rc.d", b"#!/bin/sh\nexit 101\n")
    (draft / "usr/sbin/policy-rc.d").chmod(0o755)
    # The index of unstable expires within a week, and mirrors lag.
    _update(draft / "etc/apt/apt.conf.d/90lagging-mirror", b'Acquire::Check-Valid-Until "no";\n')
    _copy_settings(draft, _INSTALLER_HOSTS)
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "--yes", "--no-install-recommends", *_PACKAGES],
        ["apt-get", "clean"],
    ):
        _logged(_entering(draft, _INSTALLER_NAME, "env", "DEBIAN_FRONTEND=noninteractive", *command), output)


def _logged(command: list[str], output: TextIO) -> None:
    """Run a step of making a root file system; show the end of the log if it fails."""
    done = subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    if done.returncode:
        tail = "\n".join(Path(output.name).read_text(errors="replace").splitlines()[-12:])
        raise RootError(f"the root file system could not be made; {output.name} ends in:\n{tail}")


def _copy_settings(root: Path, hosts: str) -> None:
    """Give a root file system a hosts file, and what it takes to reach package servers from this machine."""
    _update(root / "etc/hosts", hosts.encode())
    # A site may have a name server and certificate authorities of its own.
    for name in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        if Path("/", name).is_file():
            _update(root / name, Path("/", name).read_bytes())


def _update(path: Path, content: bytes) -> None:
    """Write a file unless it has that content: other commands may be reading it."""
    if not path.is_file() or path.read_bytes() != content:
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def _copy_tree(target: Path) -> None:
    """Copy the files of the checkout that git does not ignore, as a repository; `target/.venv` stays."""
    target.mkdir(exist_ok=True)
    _remove(*(path for path in target.iterdir() if path.name != ".venv"))
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in names.rstrip("\0").split("\0"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        # What was deleted and not committed is still listed.
        with suppress(FileNotFoundError):
            shutil.copy2(REPOSITORY / name, target / name, follow_symlinks=False)
    author = ("-c", "user.name=slipway", "-c", "user.email=slipway@localhost")
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        [*author, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message=working tree"],
    ):
        subprocess.run(["git", *command], cwd=target, check=True, stderr=subprocess.PIPE)


def _remove(*paths: Path) -> None:
    """Delete trees, but nothing that is mounted in them."""
    subprocess.run(["rm", "-rf", "--one-file-system", "--", *paths], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
