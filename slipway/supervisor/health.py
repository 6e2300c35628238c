"""The health of a node, found out on it in seconds: ``supervisor.pyz health REQUEST``.

Each probe runs in a process of its own, for what it looks at may hang: a process that a dead file server
holds cannot even be killed. The answer is one line of JSON.
"""

import glob
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from slipway.common.files import to_printable
from slipway.common.node.settings import HealthSettings
from slipway.supervisor.node_answers import print_answer

SICK, WARNING, COUNT = "sick", "warning", "count"
ANSWER = "slipway-health"
# The beginnings of the ids of findings about a path that is perhaps a file server's, and about a probe.
PATH, SPACE, NO_ANSWER = "path:", "space:", "no_answer:"
# For the site's own tool, and for each of the others: nvidia-smi takes as long without persistence mode.
TOOL_SECONDS, PROBE_SECONDS = 120, 20
# A file server that is busy answers within that.
_PATH_SECONDS = 10

_MOST_FINDINGS, _MOST_CHARS = 16, 200
_MIB = 1 << 20
_LEAST_SHM, _LEAST_FREE = 16 * _MIB, 100 * _MIB
# Xids are recent for as long as a run avoids a node, by default.
_XID_SECONDS = 86400
_XID = r"\[ *([0-9]+)\.[0-9]+\].*NVRM: Xid \(([^)]*)\): ([0-9]+),? *(.*)"
# Xids whose first remedy is a reset, a reboot or a look at the hardware, by NVIDIA's catalog
# (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, November 2026). Errors of applications are
# not among them: 13, 31, 43, 45, 94, ...
_XIDS = {
    46: "GPU stopped processing", 48: "double bit ECC error", 54: "auxiliary power is not connected",
    62: "internal micro-controller halt", 64: "GPU memory remapping failure", 74: "NVLink error",
    79: "GPU has fallen off the bus", 95: "uncontained memory error", 109: "context switch timeout",
    110: "security fault", 119: "GSP RPC timeout", 120: "GSP error", 136: "link training failed",
    140: "unrecovered ECC error", 143: "GPU initialization error", 158: "GPU fatal timeout",
}  # fmt: skip
_XIDS_TO_KNOW = {63: "GPU memory remapping event", 92: "high single-bit ECC error rate"}
# The recovery that a GPU needs has changed: the last one counts.
_RECOVERY, _NEEDS_ONE = 154, r" to \S+ \((?!None)"
_NVLINK5 = range(144, 151)  # fatal or not by their words


class Finding(NamedTuple):
    """A fact about a node.

    Attributes
    ----------
    id
        Name of the check.
    severity
        `SICK`; `WARNING`; or `COUNT`, of which only the comparison with other nodes tells.
    why
        A sentence; of a count its noun.
    value
        The number in it.
    """

    id: str
    severity: str
    why: str
    value: Optional[float] = None


Probe = Callable[[HealthSettings], Iterator[Finding]]


def answer(argument: str) -> int:
    """Answer a request; return the exit code."""
    findings = examine(HealthSettings(**json.loads(argument)))
    print_answer(ANSWER, {"time": time.time(), "findings": findings})
    return 0


def examine(request: HealthSettings) -> List[Finding]:
    """Return the findings of all probes, the sick ones first."""
    table: List[Tuple[str, str, Probe, int]] = [
        ("gpus", SICK, check_gpus, PROBE_SECONDS),
        ("xids", WARNING, check_xids, PROBE_SECONDS),
        ("links", WARNING, count_links, PROBE_SECONDS),
        ("shared_memory", WARNING, check_shared_memory, PROBE_SECONDS),
    ]
    temporary = os.environ.get("TMPDIR") or "/tmp"
    for path in (temporary, *request.paths):
        space = "own_space" if path == temporary else SPACE + path
        table.append((path, SICK, partial(check_path, path, space), _PATH_SECONDS))
    if request.command:
        table.append((os.path.basename(request.command[0]), SICK, run_tool, TOOL_SECONDS))
    findings = _run_all(table, request)
    findings.sort(key=lambda finding: (SICK, WARNING, COUNT).index(finding.severity))
    return [each._replace(why=to_printable(each.why)[:_MOST_CHARS]) for each in findings[:_MOST_FINDINGS]]


def _run_all(table: Sequence[Tuple[str, str, Probe, int]], request: HealthSettings) -> List[Finding]:
    """Run probes at once; one that gives no answer in its time is itself a finding."""
    begin = time.monotonic()
    findings: List[Finding] = []
    waiting: Dict[int, Tuple[int, str, str, int]] = {}
    for name, severity, probe, seconds in table:
        process, descriptor = _start(probe, request)
        waiting[descriptor] = process, name, severity, seconds
    answers = dict.fromkeys(waiting, b"")
    while waiting:
        for descriptor in select.select(list(waiting), [], [], 0.1)[0]:
            chunk = os.read(descriptor, 1 << 16)
            answers[descriptor] += chunk
            if not chunk:
                _, name, _, _ = waiting.pop(descriptor)
                findings += _read(name, answers[descriptor])
        for descriptor, (process, name, severity, seconds) in list(waiting.items()):
            if time.monotonic() - begin > seconds:
                del waiting[descriptor]
                os.killpg(process, signal.SIGKILL)
                why = f"{name}: no answer within {seconds} seconds"
                findings.append(Finding(NO_ANSWER + name, severity, why, seconds))
    return findings


def _start(probe: Probe, request: HealthSettings) -> Tuple[int, int]:
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    try:
        os.setpgid(0, 0)
        os.close(reader)
        os.write(writer, json.dumps(list(probe(request))[:_MOST_FINDINGS]).encode("utf-8"))
    except Exception as error:
        finding = Finding("probe_failed", WARNING, repr(error)[:_MOST_CHARS])
        os.write(writer, json.dumps([finding]).encode("utf-8"))
    finally:
        os._exit(0)


def _read(name: str, answer: bytes) -> List[Finding]:
    try:
        return [Finding(*fields) for fields in json.loads(answer.decode("utf-8"))]
    except (ValueError, TypeError):
        return [Finding("probe_failed", WARNING, f"{name}: its process ended without an answer")]


# --- GPUs

# Fields of nvidia-smi's `--query-gpu`, each with the values that are a fault. A driver that does not know one
# of them refuses the query, and is asked again without it. (`hw_slowdown` is also active where an idle GPU
# changes its clocks. An idle one has a few MiB in use, or 1 GiB that an older driver keeps for itself.)
_SLOWDOWN = "clocks_throttle_reasons.hw_{}_slowdown".format
_GPU_FIELDS: Tuple[Tuple[str, str, str, str, str], ...] = (
    (
        "memory.used",
        "gpu_memory",
        SICK,
        "[0-9]{5,}|[2-9][0-9]{3}",
        "{} MiB are in use before the tasks start",
    ),
    ("ecc.errors.uncorrected.volatile.total", "gpu_ecc", SICK, "[1-9][0-9]*", "{} uncorrected memory errors"),
    ("remapped_rows.failure", "gpu_rows_failed", SICK, "Yes", "memory rows could not be remapped"),
    ("remapped_rows.pending", "gpu_rows_pending", WARNING, "Yes", "memory rows wait for its next reset"),
    ("gpu_recovery_action", "gpu_recovery", SICK, "(?!None$|N/A$)[A-Z].*", "its driver asks for: {}"),
    (_SLOWDOWN("thermal"), "gpu_heat", SICK, "Active", "its heat slows it down"),
    (_SLOWDOWN("power_brake"), "gpu_power", SICK, "Active", "its power brake slows it down"),
)
_INVALID_FIELD = r'Field "([^"]*)" is not a valid field'


def check_gpus(request: HealthSettings) -> Iterator[Finding]:
    """Yield what NVIDIA's driver says of the GPUs, and how many there are; nothing without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return
    fields = [field for field, *_ in _GPU_FIELDS]
    code, output = 1, ""
    for _ in range(len(fields)):
        query = "--query-gpu=" + ",".join(["index", *fields])
        code, output = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
        unknown = re.search(_INVALID_FIELD, output)
        if not unknown or unknown.group(1) not in fields:
            break
        fields.remove(unknown.group(1))
    if code:
        yield Finding("gpu_driver", SICK, f"nvidia-smi failed: {_last_line(output)}", code)
        return
    rows = [line.split(", ") for line in output.splitlines() if re.match(r"[0-9]+, ", line)]
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    needed = int(granted) if granted.isdigit() else request.gpus
    if len(rows) < needed:
        yield Finding("gpu_count", SICK, f"{len(rows)} of {needed} GPUs are there", len(rows))
    for index, *row in rows:
        values = dict(zip(fields, row))
        for field, name, severity, fault, words in _GPU_FIELDS:
            value = values.get(field, "")
            if re.fullmatch(fault, value):
                number = int(value) if value.isdigit() else None
                yield Finding(name, severity, f"GPU {index}: {words.format(value)}", number)


def check_xids(request: HealthSettings) -> Iterator[Finding]:
    """Yield recent errors of the driver in the kernel's log; nothing where users may not read that."""
    code, output = _run(["dmesg"])
    if code:
        journal = ["journalctl", "--dmesg", "--since=-24h", "--output=short-monotonic", "--no-pager"]
        code, output = _run(journal)
    with open("/proc/uptime") as stream:
        uptime = float(stream.read().split()[0])
    last: Dict[Tuple[str, str], Optional[Finding]] = {}
    for seconds, gpu, text, rest in re.findall(_XID, output) if code == 0 else ():
        before, finding = last.get((gpu, text)), _judge_xid(gpu, int(text), rest)
        is_worse = before is None or before.severity != SICK or int(text) == _RECOVERY
        if uptime - int(seconds) < _XID_SECONDS and is_worse:
            last[gpu, text] = finding
    yield from filter(None, last.values())


def _judge_xid(gpu: str, number: int, rest: str) -> Optional[Finding]:
    words = _XIDS.get(number) or _XIDS_TO_KNOW.get(number)
    severity = WARNING if number in _XIDS_TO_KNOW else SICK
    if number == _RECOVERY and re.search(_NEEDS_ONE, rest):
        words = rest
    if number in _NVLINK5:
        words, severity = f"NVLink error: {rest}", SICK if re.search(r"\bFatal", rest) else WARNING
    return Finding("gpu_xid", severity, f"GPU {gpu}: Xid {number}: {words}", number) if words else None


# --- links, memory and files


def count_links(request: HealthSettings) -> Iterator[Finding]:
    """Yield the numbers of links that are up: how many there should be, other nodes tell."""
    # RoCE, and the EFA of AWS, have ports there too.
    ports = [_first_line(path) for path in glob.glob("/sys/class/infiniband/*/ports/*/state")]
    yield Finding("rdma_ports", COUNT, "RDMA ports are active", sum("ACTIVE" in state for state in ports))
    devices = glob.glob("/sys/class/net/*/device")  # of hardware: others come and go with containers
    states = [_first_line(os.path.dirname(path) + "/operstate") for path in devices]
    yield Finding("interfaces", COUNT, "network interfaces are up", states.count("up"))
    if shutil.which("nvidia-smi"):
        code, output = _run(["nvidia-smi", "nvlink", "--status"])
        if code == 0:
            links = re.findall(r"(?m)^\s*Link [0-9]+: [0-9.]+ GB/s", output)
            yield Finding("nvlinks", COUNT, "NVLinks are active", len(links))


def check_shared_memory(request: HealthSettings) -> Iterator[Finding]:
    """Yield a fault of ``/dev/shm``, which NCCL and data loaders need."""
    try:
        free = _free_bytes("/dev/shm")
    except OSError as error:
        yield Finding("shared_memory", SICK, f"/dev/shm: {error.strerror}")
        return
    if free < _LEAST_SHM:
        yield Finding("shared_memory", SICK, f"/dev/shm has {free // _MIB} MiB free", free)


def check_path(path: str, space: str, request: HealthSettings) -> Iterator[Finding]:
    """Yield a fault of a path that the tasks need; a file server that is gone never answers."""
    try:
        os.stat(path)
        free = _free_bytes(path)
    except OSError as error:
        yield Finding(PATH + path, SICK, f"{path}: {error.strerror}")
        return
    if free < _LEAST_FREE:
        yield Finding(space, SICK, f"{path} has {free // _MIB} MiB free", free)


def _free_bytes(path: str) -> int:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


# --- the site's own tool

# Words of a verdict: this contract's own, those of `dcgmi health`, and of NVIDIA's health validation.
_WORDS = {
    **dict.fromkeys(("healthy", "pass", "info"), None),
    **dict.fromkeys(("warning", "unknown"), WARNING),
    **dict.fromkeys(("sick", "failure", "critical"), SICK),
}
_BY_CODE = {0: None, 1: WARNING, 2: SICK}


def run_tool(request: HealthSettings) -> Iterator[Finding]:
    """Yield the verdict of the site's own tool: of its JSON, else of its exit code."""
    name = os.path.basename(request.command[0])
    try:
        code, output = _run(request.command)
    except OSError as error:
        yield Finding("tool", WARNING, f"{name} could not be run: {error.strerror}")
        return
    severity = _BY_CODE.get(code, WARNING)
    reasons: Sequence[Any] = [_last_line(output)]
    try:
        content = json.loads(output[output.index("{") :])
        word, given = _find_verdict(content)
        severity = _WORDS[word.lower()]
        reasons = given or [word]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    if severity:
        yield Finding("tool", severity, f"{name}: {'; '.join(map(str, reasons)) or 'no reason'}", code)


def _find_verdict(content: Dict[str, Any]) -> Tuple[str, Sequence[Any]]:
    if "verdict" in content:
        return content["verdict"], content.get("reasons", [])
    if "overall_severity" in content:
        return content["overall_severity"], []
    return content["body"]["Overall Health"]["value"], []


def _run(command: Sequence[str]) -> Tuple[int, str]:
    """Run a command; return its exit code, and all that it printed."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    done = subprocess.run(list(command), stdin=null, stdout=pipe, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _first_line(path: str) -> str:
    try:
        with open(path) as stream:
            return stream.readline().strip()
    except OSError:
        return ""
