"""An image of a few megabytes, made of programs of this machine, and registries that hold it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

# Enough for a shell, and for the script that an imported image is started with.
_PROGRAMS = ("sh", "cat", "env", "ls", "mkdir", "sleep", "id")
_LIBRARY = re.compile(r"(/\S+)")

ENV = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "GREETING=good morning, $USER",
)
WORKDIR = "/opt/work place"
ENTRYPOINT = ("/bin/sh", "-c", 'echo "it\'s $GREETING"; exec "$@"', "entry")
COMMAND = ("env",)
LABELS = {"org.opencontainers.image.title": "tiny", "org.example.words": "two words"}

USER, PASSWORD = "reader", "sesame"
# The password's bcrypt hash: the registry takes no other kind.
_HTPASSWD = f"{USER}:$2b$04$abcdefghijklmnopqrstuuinwY/tkBVrn3xrxQI/TgnMHhkvl85RW\n"

_CONFIG = """\
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {directory}/registry}}
http:
  addr: 127.0.0.1:{port}
{auth}"""
_AUTH = "auth: {{htpasswd: {{realm: tests, path: {directory}/htpasswd}}}}\n"


def need(*programs: str) -> None:
    """Skip the test, and say why, where a program is missing."""
    lacking = [name for name in programs if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)} on PATH")


def run(*words: str | Path) -> str:
    """Return the output of a command, which must succeed."""
    done = subprocess.run(
        [str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert not done.returncode, f"{words}: {done.stderr}"
    return done.stdout


def make_rootfs(directory: Path) -> Path:
    """Make a root file system of programs of this machine and the libraries that they need."""
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "usr/share", "opt"):
        (directory / name).mkdir(parents=True)
    libraries: set[Path] = set()
    for name in _PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin")
        assert program
        shutil.copy(program, directory / "bin" / name)
        libraries |= {Path(path) for path in _LIBRARY.findall(run("ldd", program))}
    for library in libraries:
        (directory / library.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, directory / library.relative_to("/"))
    (directory / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    # Something that no compressor makes smaller by much, and something that all do.
    (directory / "usr/share/words").write_text("\n".join(f"{n * n} squared" for n in range(5000)))
    return directory


def make_layout(rootfs: Path, layout: Path, tag: str = "1") -> Path:
    """Make an OCI directory with one image, `tag`, of a root file system."""
    image = f"{layout}:{tag}"
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", image)
    layer = layout.parent / "layer.tar"
    with tarfile.open(layer, "w") as tar:
        tar.add(rootfs, arcname=".", filter=_owned_by_root)
    run("umoci", "raw", "add-layer", "--image", image, layer)
    layer.unlink()
    words = ["--config.workingdir", WORKDIR]
    for option, values in (("env", ENV), ("entrypoint", ENTRYPOINT), ("cmd", COMMAND)):
        words += [word for value in values for word in (f"--config.{option}", value)]
    words += [word for item in LABELS.items() for word in ("--config.label", "=".join(item))]
    run("umoci", "config", "--image", image, *words)
    return layout


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


class Registry(NamedTuple):
    """A registry on this machine, over plain HTTP."""

    port: int
    log: Path

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def push(
        self, layout: Path, name: str, tag: str = "1", *, credentials: str | None = None, oci: bool = False
    ) -> str:
        """Push an image of an OCI directory; return its reference, as docker writes it.

        The format is docker's, which Enroot gets from this old registry too, or OCI's.
        """
        login = ["--dest-creds", credentials] if credentials else []
        image = f"{self.host}/{name}:{tag}"
        form = ["--format", "oci" if oci else "v2s2"]
        run(
            "skopeo",
            "copy",
            "-q",
            "--dest-tls-verify=false",
            *form,
            *login,
            f"oci:{layout}:1",
            f"docker://{image}",
        )
        return image


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(directory: Path, *, guarded: bool = False) -> Iterator[Registry]:
    """Serve a registry during the context; a guarded one lets only `USER` in, with `PASSWORD`."""
    need("docker-registry", "skopeo")
    port = free_port()
    auth = _AUTH.format(directory=directory) if guarded else ""
    config = directory / "config.yml"
    config.write_text(_CONFIG.format(directory=directory, port=port, auth=auth))
    (directory / "htpasswd").write_text(_HTPASSWD)
    registry = Registry(port, directory / "registry.log")
    # The registry ends with the tests, however they end.
    command = ["setpriv", "--pdeathsig", "KILL", "--", "docker-registry", "serve", str(config)]
    with registry.log.open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_for(registry, process)
            yield registry
        finally:
            process.kill()
            process.wait()


def _wait_for(registry: Registry, process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            urllib.request.urlopen(f"http://{registry.host}/v2/").close()
            return
        except urllib.error.HTTPError as error:
            error.close()  # it runs, and asks for a login
            return
        except OSError:
            assert process.poll() is None, registry.log.read_text()
            time.sleep(0.05)
