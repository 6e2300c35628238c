"""The probes of a node's health with stand-ins for the tools, and the judgement over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipway.common.node.settings import HealthSettings
from slipway.supervisor import gate, health
from slipway.supervisor.gate import judge
from slipway.supervisor.health import COUNT, SICK, WARNING, Finding
from tests.fakes.programs import prepend_to_path, write_programs

# What `--query-gpu` of driver 580.159 answers for an idle H200, with the fields that are asked.
HEALTHY = "{}, 0, 0, No, No, None, Not Active, Not Active"
UPTIME = float(Path("/proc/uptime").read_text().split()[0])


def gpus(*rows: str) -> str:
    """Return a stand-in for nvidia-smi that prints rows, one for each GPU."""
    return "[[ $1 == --query-gpu=* ]] || exit 0\n" + "\n".join(f"echo '{row}'" for row in rows)


def xid(number: int, words: str = "pid=1, name=x, words", hours_ago: float = 0.01) -> str:
    seconds = UPTIME - hours_ago * 3600
    return f"[{seconds:.6f}] NVRM: Xid (PCI:0000:c3:00): {number}, {words}"


def examine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], request: HealthSettings
) -> list[Finding]:
    quiet = {"nvidia-smi": "exit 0", "dmesg": "exit 0", "journalctl": "exit 1"}
    prepend_to_path(monkeypatch, write_programs(tmp_path / "programs", {**quiet, **programs}))
    return [finding for finding in health.examine(request) if finding.severity != COUNT]


OLD_DRIVER = """
[[ $1 == --query-gpu=* ]] || exit 0
for field in gpu_recovery_action remapped_rows.pending remapped_rows.failure; do
    [[ $1 != *$field* ]] || { echo "Field \\"$field\\" is not a valid field to query."; exit 2; }
done
echo '0, 4, 3, Not Active, Active'
"""


@pytest.mark.parametrize(
    ("body", "granted", "expected"),
    [
        (gpus(*(HEALTHY.format(index) for index in range(8))), 8, []),
        (gpus(*(HEALTHY.format(index) for index in range(8))), 4, []),  # a step may see more than its own
        (gpus(*(HEALTHY.format(index) for index in range(7))), 8, ["sick gpu_count 7"]),
        ("exit 0", 8, ["sick gpu_count 0"]),
        ("echo 'Unable to determine the device handle'; exit 15", 8, ["sick gpu_driver 15"]),
        (gpus("0, 70000, 0, No, No, None, Not Active, Not Active"), 1, ["sick gpu_memory 70000"]),
        (gpus("0, 1100, 0, No, No, None, Not Active, Not Active"), 1, []),
        (
            gpus("0, 0, 2, Yes, No, None, Not Active, Not Active"),
            1,
            ["sick gpu_ecc 2", "sick gpu_rows_failed"],
        ),
        (gpus("0, 0, 0, No, Yes, None, Not Active, Not Active"), 1, ["warning gpu_rows_pending"]),
        (gpus("0, 0, 0, No, No, Reset, Not Active, Not Active"), 1, ["sick gpu_recovery"]),
        (gpus("0, 0, 0, No, No, None, Active, Active"), 1, ["sick gpu_heat", "sick gpu_power"]),
        (gpus("0, [N/A], [N/A], [N/A], [N/A], N/A, [N/A], [Not Supported]"), 1, []),
        (OLD_DRIVER, 1, ["sick gpu_ecc 3", "sick gpu_power"]),
        ("[[ $1 != --query-gpu=* ]] || sleep 30", 1, ["sick no_answer:gpus 1"]),
    ],
)
def test_the_driver_names_the_faults_of_gpus(
    body: str, granted: int, expected: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PROBE_SECONDS", 1 if "sleep" in body else 20)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(granted))
    findings = examine(tmp_path, monkeypatch, {"nvidia-smi": body}, HealthSettings())
    words = [
        f"{each.severity} {each.id} {'' if each.value is None else f'{each.value:g}'}" for each in findings
    ]
    assert [text.strip() for text in words] == expected


@pytest.mark.parametrize(
    ("lines", "severities"),
    [
        ([xid(number) for number in (13, 31, 43, 45, 94)], []),  # of applications, or in their wake
        ([xid(79, "GPU has fallen off the bus.")], [SICK]),
        ([xid(79), xid(79), xid(79)], [SICK]),
        ([xid(48), xid(63)], [SICK, WARNING]),
        ([xid(79, hours_ago=25)], []),
        ([xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")], [SICK]),
        ([xid(154, "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)")], []),
        ([xid(145, "RLW_CTRL Fatal XC0 i0 Link 05 (0x1)"), xid(145, "RLW_CTRL Nonfatal XC0")], [SICK]),
        ([xid(145, "RLW_CTRL Nonfatal XC0 i0 Link 05 (0x1)")], [WARNING]),
    ],
)
@pytest.mark.parametrize("reader", ["dmesg", "journalctl"])
def test_recent_xids_of_hardware_are_faults(
    reader: str,
    lines: Sequence[str],
    severities: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = "\n".join(f"echo '{line}'" for line in lines)
    programs = {"dmesg": "echo 'dmesg: Operation not permitted'; exit 1", reader: body}
    findings = examine(tmp_path, monkeypatch, programs, HealthSettings())
    assert [finding.severity for finding in findings] == severities
    assert all(finding.id == "gpu_xid" and "PCI:0000:c3:00" in finding.why for finding in findings)


DCGM = """cat <<'END'
{"body": {"Overall Health": {"value": "%s"}, "GPU": {}}, "header": ["Health Monitor Report"]}
END"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("exit 0", []),
        ("echo loose cable; exit 1", ["warning site-tool: loose cable"]),
        ("echo GPU 3 is dead; exit 2", ["sick site-tool: GPU 3 is dead"]),
        ("exit 2", ["sick site-tool: it printed nothing"]),
        (
            "echo 'Traceback ...'; exit 77",
            ["warning site-tool: Traceback ..."],
        ),  # it knows nothing of the node
        (
            """echo '{"verdict": "sick", "reasons": ["fan 2", "fan 3"]}'""",
            ["sick site-tool: fan 2; fan 3"],
        ),
        ("""echo 'loading'; echo '{"verdict": "healthy"}'; exit 2""", []),
        ("""echo '{"verdict": "sick"}'""", ["sick site-tool: sick"]),
        ("""echo '{"verdict": ["sick"]}'; exit 1""", ["""warning site-tool: {"verdict": ["sick"]}"""]),
        ("""echo '{"overall_severity": "CRITICAL"}'; exit 1""", ["sick site-tool: CRITICAL"]),
        ("""echo '{"overall_severity": "UNKNOWN"}'; exit 1""", ["warning site-tool: UNKNOWN"]),
        (DCGM % "Healthy", []),
        (DCGM % "Warning", ["warning site-tool: Warning"]),
        (DCGM % "Failure", ["sick site-tool: Failure"]),
    ],
)
def test_the_sites_own_tool_has_a_contract(
    body: str, expected: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = HealthSettings(command=["site-tool", "--fast"])
    findings = examine(tmp_path, monkeypatch, {"site-tool": body}, request)
    assert [f"{finding.severity} {finding.why}" for finding in findings] == expected


def test_a_tool_that_is_not_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = HealthSettings(command=["no-such-tool"])
    assert [each.severity for each in examine(tmp_path, monkeypatch, {}, request)] == [WARNING]


def test_paths_and_own_disks_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "missing")
    request = HealthSettings(paths=[str(tmp_path), missing])
    assert [each.id for each in examine(tmp_path, monkeypatch, {}, request)] == ["path:" + missing]
    monkeypatch.setattr(health, "_LEAST_FREE", 1 << 80)
    monkeypatch.setattr(health, "_LEAST_SHM", 1 << 80)
    findings = examine(tmp_path, monkeypatch, {}, HealthSettings(paths=[str(tmp_path)]))
    assert {each.id for each in findings} == {"own_space", f"space:{tmp_path}", "shared_memory"}


def test_a_probe_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: HealthSettings) -> list[Finding]:
        raise KeyError("x")

    monkeypatch.setattr(health, "check_xids", fail)
    (finding,) = examine(tmp_path, monkeypatch, {}, HealthSettings())
    assert (finding.severity, finding.why) == (WARNING, "KeyError('x')")


# --- the judgement over nodes


def ports(number: int) -> Finding:
    return Finding("rdma_ports", COUNT, "RDMA ports are active", number)


ECC = Finding("gpu_ecc", SICK, "GPU 3: 2 uncorrected memory errors", 2)
GONE = Finding("path:/data", SICK, "/data: No such file or directory")
HUNG = Finding("no_answer:/data", SICK, "/data: no answer within 10 seconds", 10)
SILENT = Finding("silent", SICK, "it does not answer")


@pytest.mark.parametrize(
    ("findings", "sick"),
    [
        ([[], [], [], []], []),
        ([[], [ECC], [], []], ["n1"]),
        ([[ECC]], ["n0"]),
        ([[ECC], [ECC]], []),  # it is rather the measurement that is wrong
        ([[GONE]], []),
        ([[GONE], []], ["n0"]),
        ([[GONE], [GONE, ECC]], ["n1"]),
        ([[HUNG]], []),  # nobody knows if it is the node's fault, or the server's
        ([[HUNG], []], ["n0"]),
        ([[GONE], [SILENT], [GONE]], ["n1"]),
        ([[ECC, GONE], [SILENT]], ["n0", "n1"]),
        ([[GONE], [SILENT]], ["n1"]),
        ([[ports(8)], [ports(8)], [ports(7)], [ports(8)]], ["n2"]),
        ([[ports(8)], [ports(9)], [ports(8)], [ports(8)]], []),
        ([[ports(8)], [ports(7)]], []),  # who knows which of the two is right
        ([[ports(0)], [ports(0)]], []),
        ([[ports(8)], [ports(8)], [], [ports(8)]], []),
    ],
)
def test_nodes_are_compared_with_each_other(findings: list[list[Finding]], sick: list[str]) -> None:
    by_host = {f"n{index}": list(own) for index, own in enumerate(findings)}
    assert list(judge(by_host)) == sick


def test_a_fault_of_all_nodes_and_a_smaller_number_are_warnings() -> None:
    findings = {"n0": [GONE, ports(8)], "n1": [GONE, ports(7)]}
    assert judge(findings) == {}
    warnings = [
        (host, each.why) for host, own in findings.items() for each in own if each.severity == WARNING
    ]
    assert warnings == [
        ("n0", GONE.why),
        ("n1", GONE.why),
        ("n1", "7 RDMA ports are active, and 8 on some other nodes"),
    ]


# --- questions to the nodes


def test_nodes_that_srun_has_ended_are_asked_without_the_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[list[str]] = []
    dead = "Task launch for StepId=17.0 failed on node n3: Communication connection failure"

    def ask(job: Any, hosts: Sequence[str], *_: object) -> tuple[dict[str, list[Finding]], list[str]]:
        rounds.append(list(hosts))
        if "n3" not in hosts:
            return {host: [] for host in hosts}, []
        return {"n1": []}, [dead, "n2: task 1: Terminated", "n4: task 3: Terminated"]

    monkeypatch.setattr(gate, "_ask", ask)
    unused: Any = None
    findings = gate._ask_all(unused, ["n1", "n2", "n3", "n4"], HealthSettings(), unused)
    assert rounds == [["n1", "n2", "n3", "n4"], ["n2", "n4"]]
    assert gate.judge(findings) == {"n3": f"it does not answer: {dead}"}
