"""The programs that images are made with: finding, running and ending them, explaining their failures."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from launcher.errors import UserError, end_of, escape
from launcher.secrecy import without_secrets

# The first that works builds: who has a docker that works has layers in its cache.
BUILDERS = ("docker", "podman", "buildah")

# The packages of Debian and Ubuntu that have them.
_PACKAGES = {name: name for name in ("podman", "buildah", "skopeo", "umoci")}
_PACKAGES |= {"docker": "docker.io", "mksquashfs": "squashfs-tools", "unsquashfs": "squashfs-tools"}
_ELSEWHERE = {
    "enroot": "Enroot is at https://github.com/NVIDIA/enroot/blob/master/doc/installation.md",
    "apptainer": "Apptainer is at https://apptainer.org/docs/admin/main/installation.html",
}

_VERSION_FLAGS = {"mksquashfs": "-version", "enroot": "version"}
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_VERSION_PATIENCE_SECONDS = 10

_TICK_SECONDS = 0.5
# From SIGTERM to SIGKILL.
_GRACE_SECONDS = 5.0
_KEPT_LINES = 40
_LINE_END = re.compile(rb"[\r\n]")

# Slurm ends a job's processes with the first, a lost connection with the second.
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def find_program(name: str) -> Path | None:
    """Return the path of a program on PATH."""
    path = shutil.which(name)
    return Path(path) if path else None


def name_and_version(name: str) -> str:
    """Return a program's name with its version, if it says one."""
    try:
        result = subprocess.run(
            [name, _VERSION_FLAGS.get(name, "--version")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return name
    match = _VERSION.search(result.stdout.decode(errors="replace"))
    return f"{name} {match[0]}" if match else name


def list_missing(*names: str) -> tuple[str, ...]:
    """Return those of some programs that are not on PATH."""
    return tuple(name for name in names if find_program(name) is None)


def explain_install(*names: str) -> str:
    """Return how to install programs."""
    packages = dict.fromkeys(_PACKAGES[name] for name in names if name in _PACKAGES)
    steps = [f"on Debian and Ubuntu: apt-get install {' '.join(packages)}"] if packages else []
    return "\n".join(steps + [text for name, text in _ELSEWHERE.items() if name in names])


def require(*names: str, why: str, or_else: str = "", also: Sequence[str] = ()) -> None:
    """Raise UserError if programs are missing, naming them and how to install them.

    `why` is such as ``to write a squashfs``; `also` are programs that would help as well.
    """
    lacking = list_missing(*names)
    if lacking:
        are = "is" if len(lacking) == 1 else "are"
        raise UserError(
            f"{' and '.join(lacking)} {are} needed {why}, and not on PATH",
            hint="\n".join(filter(None, [explain_install(*lacking, *also), or_else])),
        )


def run(
    argv: Sequence[str | Path],
    *,
    doing: str,
    program: str | None = None,
    names: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    on_tick: Callable[[int], None] | None = None,
    keep: Sequence[int] = (),
) -> str:
    r"""Run a program to its end in a new process group, and return what it wrote to stdout.

    Any exception here ends the program and all that it started; so does the end of this process, if
    ``setpriv`` (util-linux) is installed. Raise ToolError if it fails: ``cannot DOING``, with its last lines
    and what can be done about it.

    `program` is its name in messages, if not its first word; `names` fill in the hints (`explain_failure`).
    It gets the further variables `env`, and inherits the descriptors `keep`, such as a lock to last as long
    as it runs. `on_line` is called with each line of both outputs (``\r`` ends a line too), and nothing is
    returned then; `on_tick` is called with the process id twice a second.
    """
    command = [os.fspath(part) for part in argv]
    setpriv = find_program("setpriv")
    with_parent = [str(setpriv), "--pdeathsig", "TERM", "--"] if setpriv else []
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        process = subprocess.Popen(
            [*with_parent, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            pass_fds=tuple(keep),
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"cannot {doing}: {error.strerror or error}: {command[0]}") from error
    with process:
        try:
            output = _read_outputs(process, tail, on_line, on_tick)
            code = process.wait()
        except BaseException:
            _end_group(process)
            raise
    if code:
        lines = list(tail) or output.splitlines()[-_KEPT_LINES:]
        plain_http = any(word.endswith("tls-verify=false") for word in command)
        raise explain_failure(doing, program or command[0], code, lines, names, plain_http)
    return output


def _read_outputs(
    process: subprocess.Popen[bytes],
    tail: deque[str],
    on_line: Callable[[str], None] | None,
    on_tick: Callable[[int], None] | None,
) -> str:
    """Read both outputs to their ends; the lines of stderr, or of both, go to `tail`."""
    assert process.stdout
    assert process.stderr
    kept: list[bytes] = []
    partial: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for stream in partial:
            selector.register(stream, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(_TICK_SECONDS)
            if on_tick:
                on_tick(process.pid)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                if key.data is process.stdout and on_line is None:
                    kept.append(data)
                    continue
                *lines, partial[key.data] = _LINE_END.split(partial[key.data] + data + b"\n" * (not data))
                for line in filter(None, (raw.decode(errors="replace").strip() for raw in lines)):
                    tail.append(line)
                    if on_line:
                        on_line(line)
    return b"".join(kept).decode(errors="replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        # The group is signalled even after the program's own end: others of it may be left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def bytes_moved(pid: int, counter: str) -> int:
    """Return how many bytes a process has read (``rchar``) or written (``wchar``) so far (proc_pid_io(5))."""
    return proc_number(Path(f"/proc/{pid}/io"), counter)


def proc_number(path: Path, name: str) -> int:
    """Return a number of a file of /proc whose lines are ``NAME: NUMBER``; 0 if it is unknown."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit` meanwhile, so that unfinished work is cleaned up first."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive elsewhere
        return
    # A signal that is ignored, as by `nohup`, stays so.
    handled = [number for number in _END_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _exit_on_signal)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    # A second signal must not interrupt the cleaning up.
    for other in _END_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


# --- the failures of programs

_QUOTED_LINES = 3
_LISTING = re.compile(": `skopeo list-tags [^`]*`")

# Decoration that their logs put around the words.
_LOG = re.compile(r'(?:time="[^"]*" )?level=\w+ msg="(.*)"')
_LEVEL = re.compile(r"(?:\[(?:ERROR|WARN|INFO)\]|(?:FATA|ERRO|WARN|INFO)\[\d+\]) +")
# Lines that repeat that a command failed, and lines that say why. BuildKit begins the lines of an instruction
# with a number and a time.
_STATUS = re.compile(r"^(?:subprocess exited with|exit) status \d+$|^(?:-+|={3,})$")
_CAUSE = re.compile(
    r"(?:#\d+ )?(?:\d+\.\d+ )?(?:E: |fatal|error\b|\S*error: |\w*(?:Error|Exception): |"
    r".*: (?:(?:fatal )?error: |not found$|No such file|command not found))",
    re.IGNORECASE,
)
_PROGRESS_BAR = re.compile(r"^\[[=\-\\|/ ]*\] *\d+/\d+ +\d+%")

CREDENTIALS = """\
log in: `skopeo login REGISTRY`, or `docker login REGISTRY`, or write
`machine HOSTNAME login USER password KEY` to ~/.config/enroot/.credentials (chmod 600);
the user of nvcr.io is $oauthtoken, and its password your NGC key"""

REFUSED = "the registry refuses access"
NO_SPACE = "no space is left"
NO_IMAGE = "there is no such image"


class ToolError(UserError):
    """A program's failure; `why` is a short cause, the same words for the same cause."""

    def __init__(self, doing: str, why: str, quoted: Sequence[str], hint: str) -> None:
        super().__init__("\n".join([f"cannot {doing}: {why}", *quoted]), hint=hint or None)
        self.why = why


# The first match decides: a full disk hides behind many other messages, and so do missing permissions.
_RULES = (
    (
        r"no space left on device|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b",
        NO_SPACE,
        "make room (`df -h`, `df -i`, `quota`), or choose other directories: --temp-dir DIR, images_dir=DIR",
    ),
    (
        r"cannot connect to the docker daemon|docker daemon.*running",
        "the docker daemon does not answer",
        "start it, or use what needs none: podman://NAME:TAG, a registry, oci-archive:FILE",
    ),
    (
        r"server gave HTTP response to HTTPS client",
        "the registry speaks plain HTTP",
        "if you trust the network on the way to it: --plain-http",
    ),
    (
        r"x509|certificate signed by unknown|certificate verify failed|self.signed certificate",
        "this machine does not trust the registry's certificate",
        "have its authority added to the system's certificates; in a network you trust: --plain-http",
    ),
    (
        r"unauthorized|authentication required|invalid username/password|code:? 40[13]|40[13] \(?forbidden|"
        r"access to the (resource|requested resource).*denied|\bdenied: ",
        REFUSED,
        f"{CREDENTIALS}\n"
        "or check the name: registries refuse a repository that they do not have in the same words",
    ),
    (
        r"no such host|could not resolve|name or service not known|connection refused|network is unreachable|"
        r"no route to host|i/o timeout|timed? ?out|connection reset|failed to connect|couldn't connect|"
        r"TLS handshake|\bEOF$",
        "the registry cannot be reached",
        "check that this machine can reach it: `curl -I https://REGISTRY/v2/` (by proxy: set https_proxy);\n"
        "compute nodes often cannot, the login node can: import there",
    ),
    (
        r"manifest unknown|name unknown|repository name not known|error: 404|code:? 404|404 \(?not found|"
        r"(manifest|image|tag|reference|repository)\b.* not found|no such (image|manifest)|image not known|"
        r"does not resolve to an image|no descriptor found for reference|"
        r"parsing image name.*no such file or directory",
        NO_IMAGE,
        "check its name and its tag: `skopeo list-tags docker://REGISTRY/NAME`",
    ),
    (
        r"no image found in manifest list|no image found in image index|no matching manifest",
        "the image is not made for this machine's architecture",
        "choose a tag that is",
    ),
    (
        r"exec format error",
        "a program in the image is for another architecture",
        "build it on a machine of that architecture, or choose another base",
    ),
    (
        r"cannot clone: |user namespaces|newuidmap|newgidmap|no subuid ranges|supplemental groups|"
        r"unshare.*operation not permitted",
        "this machine does not let you use user namespaces",
        "have lines for you written into /etc/subuid and /etc/subgid, or do it on another machine",
    ),
    (r"\bpermission denied\b|operation not permitted", "permission is denied", ""),
)


def explain_failure(
    doing: str,
    program: str,
    code: int,
    output: Sequence[str],
    names: Mapping[str, str] | None = None,
    plain_http: bool = False,
) -> ToolError:
    """Return the error for a program that failed: its cause, the lines that show it, and what to do next.

    `names` has REGISTRY, HOSTNAME (without a port) and NAME, so that the hint can be pasted; it is empty for
    an image of no registry. `plain_http` is True if the registry was asked without TLS.
    """
    name = Path(program).name
    lines = [line for line in output if not _PROGRESS_BAR.match(line)]
    match = next(
        (
            (why, hint, line)
            for pattern, why, hint in _RULES
            for line in reversed(lines)
            if re.search(pattern, line, re.IGNORECASE)
        ),
        None,
    )
    if match is not None:
        why, hint, *quoted = match
    else:
        why = f"{name} was ended by signal {-code}" if code < 0 else f"{name} failed with exit code {code}"
        hint, quoted = "", _causes(lines)
    if names == {}:  # an image of no registry has no list of tags
        hint = _LISTING.sub("", hint)
    if plain_http or any("http://" in line for line in lines):
        hint = hint.replace("https://REGISTRY", "http://REGISTRY")
        hint = hint.replace("list-tags docker", "list-tags --tls-verify=false docker")
    words = [f"{name}: {end_of(escape(without_secrets(strip_log(line))))}" for line in quoted]
    return ToolError(doing, why, words, fill_names(hint, names or {}))


def fill_names(hint: str, names: Mapping[str, str]) -> str:
    """Return a hint with the names of an image filled in, so that it can be pasted."""
    for word, value in names.items():
        hint = hint.replace(word, escape(value))
    return hint


def _causes(lines: Sequence[str]) -> list[str]:
    """Return the lines that say why, and the last one; if none does, the last lines."""
    candidates = [line for line in dict.fromkeys(lines) if not _STATUS.search(line)] or list(lines)
    causes = [line for line in candidates if _CAUSE.match(line)][-_QUOTED_LINES + 1 :]
    if not causes:
        return candidates[-_QUOTED_LINES:]
    return list(dict.fromkeys([*causes, candidates[-1]]))


def strip_log(line: str) -> str:
    """Return the message of a line of a log, in one line and without the log's quotes."""
    log = _LOG.fullmatch(line)
    return log[1].replace(r"\n", " ").replace(r"\"", '"').strip() if log else _LEVEL.sub("", line, count=1)
