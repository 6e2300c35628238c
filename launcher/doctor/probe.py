"""Probe a machine for containers and trainings: read only, and print JSON.

`slipway doctor --nodes` runs only this file on compute nodes, with any Python from 3.6 on: it imports the
standard library alone.
"""

import base64
import contextlib
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

# The beginning of each line of a node's answer; the tasks' lines may be mixed.
MARK = "slipway-doctor"
_CHUNK = 240  # of one line: srun may cut longer ones apart

_PATIENCE_SECONDS = 10.0
_MOST_BYTES = 1 << 20  # of a file that is read
_MOST_FILES = 100  # of a configuration

# As in the script of a job, templates/supervisor.sh.j2.
_JOB_PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python", "python3")

# The programs to ask for their versions; those of squashfs take another option.
_VERSIONED = [
    *["docker", "podman", "buildah", "skopeo", "umoci", "squashfuse"],
    *["apptainer", "singularity", "nvidia-container-cli"],
]
_SQUASHFS = ["mksquashfs", "unsquashfs"]
# The programs that Enroot calls: its `checkcmd`s of 3.4 to 4.1.
_ENROOT_CALLS = ["awk", "curl", "find", "flock", "grep", "jq", "parallel", "sed", "tar", "zstd"]
_SYSCTLS = [
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
    "user/max_user_namespaces",
    "user/max_mnt_namespaces",
]
_COMPRESSORS = re.compile(r"^\s+(gzip|lzma|lzo|lz4|xz|zstd)(?:\s+\(default\))?\s*$", re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d[\w.+~-]*")
_OCTAL = re.compile(r"\\([0-7]{3})")

# The settings of enroot.conf that matter to a job; the others are not reported.
_REPORTED = "MOUNT_HOME NATIVE_OVERLAYFS REMAP_ROOT RESTRICT_DEV ROOTFS_WRITABLE SQUASH_OPTIONS"
_PLACES = ("RUNTIME", "DATA", "CACHE", "TEMP")
# As Enroot reads its configuration, expansions and all, but without making its directories.
_READ_ENROOT = r"""
for file in "$1" "$1.d"/*.conf; do
    [ -e "$file" ] || continue
    while IFS=$' \t=' read -r key value; do
        [[ $key =~ ^ENROOT_[[:upper:]_]+$ ]] && export "$key=${!key:-$(eval echo "$value")}"
    done <"$file"
done
env -0
"""


TYPE_CHECKING = False
if TYPE_CHECKING:
    Tools = dict[str, dict[str, str | None]]  # by name: `path` and `version`


def gather(request: "dict[str, dict[str, str]]", environment: "dict[str, str]") -> "dict[str, object]":
    """Return the facts of this machine; the environment is that of the programs that it runs.

    In a request `files` are paths, to report their sizes, and `places` further directories by their purpose.
    """
    path = environment.get("PATH", os.defpath)
    tools = _tools(path, environment)
    enroot, of_enroot = _enroot(tools, environment)
    places = dict(request.get("places", {}))
    places.update(of_enroot)
    places.setdefault("temporary", environment.get("TMPDIR") or "/tmp")
    return {
        "host": environment.get("SLURMD_NODENAME") or platform.node(),
        "uid": os.getuid(),
        "python": platform.python_version(),
        "job_python": _job_python(path, environment),
        "tools": {name: tools[name]["version"] for name in tools},
        "docker_daemon": _docker_daemon(tools, environment),
        "compressors": _compressors(tools, environment),
        "sysctls": _sysctls(),
        "file_systems": [line.split()[-1] for line in _read("/proc/filesystems").splitlines() if line],
        "no_namespaces": _find_namespace_error(path, environment),
        "fuse": os.access("/dev/fuse", os.R_OK | os.W_OK),
        "subordinate_ids": _has_subordinate_ids(),
        "mqueue": any(mount[1] == "/dev/mqueue" for mount in _mounts()),
        "places": {name: _place(places[name]) for name in sorted(places)},
        "files": {name: _size(name) for name in sorted(request.get("files", {}).values())},
        "enroot": enroot,
        "gpus": _gpus(path, environment),
        "plugstack": _plugstack(list(request.get("plugstack", {}).values()), environment),
    }


def _say(command: "list[str]", environment: "dict[str, str]") -> "tuple[int, str, str]":
    """Return a program's exit code (-1: it does not run, -2: it does not answer), stdout and stderr."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        return -1, "", error.strerror or str(error)
    with process:
        try:
            out, err = process.communicate(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return -2, "", f"no answer within {_PATIENCE_SECONDS:g} s"
    return process.returncode, out, err


def _job_python(path: str, environment: "dict[str, str]") -> "str | None":
    """Return version and path of the Python that supervises jobs, as job scripts find it."""
    for name in _JOB_PYTHONS:
        program = shutil.which(name, path=path)
        if program is not None:
            version = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
            _, out, _ = _say([program, "-IS", "-c", version], environment)
            return (out.split() or ["0"])[0] + " " + program
    return None


def _tools(path: str, environment: "dict[str, str]") -> "Tools":
    tools = {}  # type: Tools
    others = ["enroot", "bash", "pigz", "gzip", "newuidmap", "fuse-overlayfs", *_ENROOT_CALLS]
    for name in [*_VERSIONED, *_SQUASHFS, *others]:
        program = shutil.which(name, path=path)
        if program is None:
            continue
        version = None
        if name not in others:
            code, out, err = _say([program, "-version" if name in _SQUASHFS else "--version"], environment)
            # unsquashfs exits with 1 after telling its version.
            number = _NUMBER.search(out + err) if code >= 0 else None
            version = number.group() if number else None
        tools[name] = {"path": program, "version": version}
    return tools


def _docker_daemon(tools: "Tools", environment: "dict[str, str]") -> "str | None":
    """Return the version of the daemon that answers, or its error after a ``!``."""
    if "docker" not in tools:
        return None
    command = [tools["docker"]["path"] or "", "version", "--format", "{{.Server.Version}}"]
    code, out, err = _say(command, environment)
    if code == 0 and out.strip():
        return out.strip()
    return "!" + " ".join(err.split())


def _compressors(tools: "Tools", environment: "dict[str, str]") -> "list[str]":
    if "mksquashfs" not in tools:
        return []
    # 4.7 has them under a topic of the help; older ones answer with all of it.
    program = tools["mksquashfs"]["path"] or ""
    for words in (["-help"], ["-help-section", "compressors"], ["-help-all"]):
        _, out, err = _say([program, *words], environment)
        names = sorted(set(_COMPRESSORS.findall(out + err)))
        if names:
            return names
    return []


def _sysctls() -> "dict[str, int]":
    texts = {path.split("/")[1]: _read("/proc/sys/" + path).strip() for path in _SYSCTLS}
    return {name: int(text) for name, text in texts.items() if text.isdigit()}


def _read(path: "str | Path") -> str:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_MOST_BYTES)
    except OSError:
        return ""


def _list_directory(directory: "str | Path", pattern: str) -> "list[Path]":
    try:
        return sorted(Path(directory).glob(pattern))
    except OSError:
        return []


def _find_namespace_error(path: str, environment: "dict[str, str]") -> "str | None":
    """Return why the user may not have namespaces; None if they may, or it cannot be tried."""
    program = shutil.which("unshare", path=path)
    if program is None:
        return None
    code, _, err = _say([program, "--user", "--map-root-user", "--mount", program, "--version"], environment)
    return " ".join(err.split()) or "unshare fails" if code != 0 else None


def _has_subordinate_ids() -> bool:
    """Return True if the user has ids for the other users of an image; root needs none."""
    if os.getuid() == 0:
        return True
    names = [str(os.getuid())]
    with contextlib.suppress(KeyError):  # a user id without a name
        # Not $USER, which su and cron leave as they like.
        names.append(pwd.getpwuid(os.getuid()).pw_name)
    return all(
        any(line.split(":")[0] in names for line in _read(file).splitlines())
        for file in ("/etc/subuid", "/etc/subgid")
    )


def _mounts() -> "list[tuple[str, str, str]]":
    """Return type, point and source of each mount: proc_pid_mountinfo(5)."""
    mounts = []
    for line in _read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) > 4 and len(kind) > 1:
            point, source = (
                _OCTAL.sub(lambda code: chr(int(code.group(1), 8)), t) for t in (place[4], kind[1])
            )
            mounts.append((kind[0], point, source))
    return mounts


def _place(path: str) -> "dict[str, object]":
    """Return the file system of a directory, which may not exist yet."""
    there = os.path.realpath(path)
    while not _is_directory(there) and there != "/":
        there = str(Path(there).parent)
    kind, point, source = "", "/", ""
    for kind_of, point_of, source_of in _mounts():
        if f"{there}/".startswith(point_of.rstrip("/") + "/") and len(point_of) >= len(point):
            kind, point, source = kind_of, point_of, source_of
    free = None
    with contextlib.suppress(OSError):
        room = os.statvfs(there)
        free = room.f_bavail * room.f_frsize
    mount = {"path": path, "there": there, "kind": kind, "point": point, "source": source}
    return {**mount, "free": free, "writable": os.access(there, os.W_OK | os.X_OK)}


def _is_directory(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def _size(path: str) -> "int | None":
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _enroot(
    tools: "Tools", environment: "dict[str, str]"
) -> "tuple[dict[str, object] | None, dict[str, str]]":
    """Return Enroot's configuration, as the user's jobs meet it, and its directories."""
    if "enroot" not in tools:
        return None, {}
    script = _read(tools["enroot"]["path"] or "")
    version = re.search(r'ENROOT_VERSION="([^"]+)"', script)
    conf = re.search(r'config::init "([^"]+)"', script)
    file = conf.group(1) if conf else "/etc/enroot/enroot.conf"
    settings, trouble = _settings(tools, file, environment)
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - home may be unknown
    defaults = {
        "RUNTIME": (environment.get("XDG_RUNTIME_DIR") or "/run") + "/enroot",
        "DATA": (environment.get("XDG_DATA_HOME") or home + "/.local/share") + "/enroot",
        "CACHE": (environment.get("XDG_CACHE_HOME") or home + "/.cache") + "/enroot",
        "CONFIG": (environment.get("XDG_CONFIG_HOME") or home + "/.config") + "/enroot",
        "SYSCONF": str(Path(file).parent),
        "TEMP": environment.get("TMPDIR") or "/tmp",
    }
    paths = {name: settings.get(f"ENROOT_{name}_PATH") or path for name, path in defaults.items()}
    both = (paths["SYSCONF"], paths["CONFIG"])
    fstabs = [_read(file) for place in both for file in _list_directory(f"{place}/mounts.d", "*.fstab")]
    lines = [line.split() for text in fstabs for line in text.splitlines()]
    reported = [f"ENROOT_{name}" for name in _REPORTED.split()]
    facts = {
        "version": version.group(1) if version else None,
        "conf": file if _size(file) is not None else None,
        "trouble": trouble,
        "settings": {name: settings[name] for name in reported if settings.get(name)},
        "hooks": sorted(
            {file.name for place in both for file in _list_directory(f"{place}/hooks.d", "*.sh")}
        ),
        # Enroot 3 binds it into every container, and fails where it is not mounted.
        "binds_mqueue": any(
            line[:1] == ["/dev/mqueue"] and "nofail" not in " ".join(line[3:]) for line in lines
        ),
    }
    return facts, {f"enroot {name.lower()}": paths[name] for name in _PLACES}


def _settings(
    tools: "Tools", file: str, environment: "dict[str, str]"
) -> "tuple[dict[str, str], str | None]":
    if "bash" not in tools:
        return {}, "enroot.conf cannot be read: bash is not there"
    code, out, err = _say([tools["bash"]["path"] or "", "-c", _READ_ENROOT, "bash", file], environment)
    if code != 0:
        return {}, file + " cannot be read: " + " ".join(err.split())
    pairs = (word.partition("=") for word in out.split("\0"))
    return {name: value for name, sign, value in pairs if sign and name.startswith("ENROOT_")}, None


def _gpus(path: str, environment: "dict[str, str]") -> "dict[str, object] | None":
    """Return the report of nvidia-smi; None without it."""
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return None
    code, out, err = _say([program, "--query-gpu=driver_version,name", "--format=csv,noheader"], environment)
    rows = [line.partition(", ") for line in out.splitlines() if ", " in line]
    # The newest CUDA that the driver has itself is in the heading alone.
    _, heading, _ = _say([program], environment) if code == 0 else (0, "", "")
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", heading)
    return {
        "driver": rows[0][0].strip() if rows else None,
        "names": [name.strip() for _, _, name in rows],
        "cuda": cuda.group(1) if cuda else None,
        "trouble": " ".join((err or out).split()) or None if code != 0 or not rows else None,
    }


def _plugstack(files: "list[str]", environment: "dict[str, str]") -> "dict[str, object]":
    """Return the line of Pyxis in plugstack.conf and in the files that it includes; spank(8)."""
    conf = environment.get("SLURM_CONF") or "/etc/slurm/slurm.conf"
    waiting = [*files, str(Path(conf).parent / "plugstack.conf"), "/run/slurm/conf/plugstack.conf"]
    seen = set()  # type: set[str]
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for number, line in enumerate(_read(file).splitlines(), 1):
            words = line.partition("#")[0].split()
            if words[:1] == ["include"] and len(words) > 1:
                included = Path(file).parent / words[1]  # with wildcards in its last part, mostly
                waiting[:0] = map(str, _list_directory(included.parent, included.name))
            elif len(words) > 1 and "pyxis" in Path(words[1]).name:
                options = dict(word.partition("=")[::2] for word in words[2:])
                there = _size(words[1]) is not None if words[1].startswith("/") else None
                return {"at": f"{file}:{number}", "plugin": words[1], "there": there, "options": options}
    return {"at": None, "plugin": None, "there": None, "options": {}}


def answer_lines(content: "dict[str, object]") -> "list[str]":
    """Return an answer as lines that may mix with those of other tasks: name, number, total, part."""
    packed = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
    parts = [packed[start : start + _CHUNK] for start in range(0, len(packed), _CHUNK)]
    host = str(content["host"])
    return [" ".join((MARK, host, str(i), str(len(parts)), part)) for i, part in enumerate(parts)]


if __name__ == "__main__":
    requested = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    print("\n".join(answer_lines(gather(requested, dict(os.environ)))))
