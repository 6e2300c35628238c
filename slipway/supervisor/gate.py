"""The gate before the tasks: all nodes are asked for their health at once, and the sick ones are left out."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Dict, List, Sequence, Tuple

from slipway.common.files import to_printable
from slipway.common.node import marks
from slipway.common.node.settings import HealthSettings
from slipway.supervisor import health as node_health
from slipway.supervisor.health import COUNT, SICK, WARNING, Finding
from slipway.supervisor.hooks import Verdict
from slipway.supervisor.job import Job
from slipway.supervisor.later_links import LaterLinks
from slipway.supervisor.node_answers import NodeAnswers, build_question, question_environment
from slipway.supervisor.nodes import Nodes, SickNodes
from slipway.supervisor.tasks import Signals

RULE = "sick_node"
HEALTH = "health"
# For srun and Python to start on a node, and for the end of srun.
_START_SECONDS, _END_SECONDS = 15, 2
# Nodes that a line of the log names.
_MOST_NAMED = 8
# Clocks that are further apart confuse those who compare logs.
_SKEW_SECONDS = 5
# Links of which a node may have fewer than others: sites plug cables into some nodes alone.
_MAY_DIFFER = "interfaces"
# The id of a finding about a node without an answer.
_SILENT = "silent"
# The beginnings of the ids of findings that may be a file server's fault.
_OF_SERVERS = (node_health.PATH, node_health.SPACE, node_health.NO_ANSWER + "/")

# srun's word for a node on which it cannot start a task.
_NOT_STARTED = re.compile(r"Task launch for \S+ failed on node ([^ :]+): ")

Findings = Dict[str, List[Finding]]


def pass_gate(job: Job, nodes: Nodes, health: HealthSettings, later: LaterLinks, signals: Signals) -> None:
    """Leave the sick nodes out, and let later links avoid them.

    Raises
    ------
    SickNodes
        If the tasks cannot run on the others.
    Signalled
        If the job was signalled meanwhile.
    """
    begin = time.monotonic()
    asked = nodes.list_usable()
    findings: Findings = {}
    try:
        findings = _ask_all(job, asked, health, signals)
    except OSError as error:  # no srun
        job.say(f"the nodes' health is not known: {error}", sys.stderr)
    if not findings:
        return
    sick = judge(findings)
    seconds = time.monotonic() - begin
    kept = {host: [each for each in own if each.severity != COUNT] for host, own in findings.items()}
    name = f"{HEALTH}-{job.restarts}" if job.restarts else HEALTH
    job.leave(name, {"seconds": round(seconds, 3), "findings": kept}, sync=False)
    for why, hosts in _find_warnings(findings).items():
        job.say(f"{', '.join(hosts[:_MOST_NAMED])}{', ...' if hosts[_MOST_NAMED:] else ''}: {why}")
    count = f"{len(asked)} node{'' if len(asked) == 1 else 's'}"
    job.say(f"health of {count} in {seconds:.1f} s: {len(sick)} sick")
    if not sick:
        return
    for host, reason in sick.items():
        nodes.leave_out(host, reason)
    why = marks.quote("; ".join(f"{host} is sick: {reason}" for host, reason in sick.items()))
    is_own = os.environ.get("SLURMD_NODENAME") in sick
    if nodes.has_enough() and not is_own:
        job.say(f"goes on without {nodes.describe_left_out()}")
        later.exclude(list(sick), why, job.claimant)
        return
    row = _count_gates(job) + 1
    if job.settings.chain.links > 1 and row > job.settings.chain.max_failures:
        later.exclude(list(sick), why, job.claimant)
        raise SickNodes(nodes.hosts, Verdict(RULE, f"{row} links in a row found sick nodes: {why}"))
    raise SickNodes(nodes.hosts, Verdict(RULE, why, continues=True, nodes=tuple(sick)))


def _count_gates(job: Job) -> int:
    """Return how many links directly before this one left because of sick nodes."""
    rules = {
        attempt.link: attempt.rule
        for attempt in marks.read_attempts(job.directory, tags=(job.settings.tag,))
        if attempt.link < job.link
    }
    number = 0
    while rules.get(job.link - 1 - number) == RULE:
        number += 1
    return number


def _find_warnings(findings: Findings) -> Dict[str, List[str]]:
    """Return the hosts of each warning."""
    warnings: Dict[str, List[str]] = {}
    for host, own in findings.items():
        for finding in own:
            if finding.severity == WARNING:
                warnings.setdefault(finding.why, []).append(host)
    return warnings


def judge(findings: Findings) -> Dict[str, str]:
    """Return the sick nodes, each with the reason; what is compared becomes a finding.

    A fault that all nodes share which answer is about none of them, as is that of a file server where one
    node answers: it becomes a warning. Excluding all nodes would help nobody.
    """
    for name in {each.id for own in findings.values() for each in own if each.severity == COUNT}:
        _compare(findings, name)
    faults = [{each.id for each in own if each.severity == SICK} for own in findings.values()]
    answered = [ids for ids in faults if _SILENT not in ids]
    shared = set.intersection(*answered) if answered else set()
    sick = {}
    for host, own in findings.items():
        for index, finding in enumerate(own):
            is_of_server = finding.id.startswith(_OF_SERVERS)
            if finding.id in shared and (len(answered) > 1 or is_of_server):
                own[index] = finding._replace(severity=WARNING)
        reasons = [finding.why for finding in own if finding.severity == SICK]
        if reasons:
            sick[host] = reasons[0] + (f" (and {len(reasons) - 1} more)" if reasons[1:] else "")
    return sick


def _compare(findings: Findings, name: str) -> None:
    """Find nodes that have less of something than most others."""
    counts = {host: each for host, own in findings.items() for each in own if each.id == name}
    value, number = Counter(each.value or 0 for each in counts.values()).most_common(1)[0]
    highest = max(each.value or 0 for each in counts.values())
    is_usual = number * 2 > len(counts)
    for host, each in counts.items():
        usual = value if is_usual else highest
        if (each.value or 0) < usual:
            severity = SICK if is_usual and name != _MAY_DIFFER else WARNING
            why = f"{each.value:g} {each.why}, and {usual:g} on {'most' if is_usual else 'some'} other nodes"
            findings[host].append(Finding(name, severity, why, each.value))


# --- asking


def _ask_all(job: Job, hosts: Sequence[str], health: HealthSettings, signals: Signals) -> Findings:
    """Return the findings of each node; of one that gives no answer that it gave none.

    Where srun cannot start on one node, it ends all: the others without an answer are asked once more. If no
    node answers, nothing is known: the tasks start.
    """
    answers, said = _ask(job, hosts, health, signals)
    silent = [host for host in hosts if host not in answers]
    # With a node on which it cannot start it would end the others again.
    refused = [match.group(1) for match in map(_NOT_STARTED.search, said) if match]
    others = [host for host in silent if host not in refused]
    if len(silent) > 1 and others:
        more, last_said = _ask(job, others, health, signals)
        answers.update(more)
        said += last_said
    if not answers:
        job.say(f"the nodes' health is not known: {said[-1] if said else 'no answer'}", sys.stderr)
    for host in hosts if answers else ():
        if host not in answers:
            # srun names the node in its message.
            why = next((line for line in said if re.search(rf"\b{re.escape(host)}\b", line)), "")
            answers[host] = [Finding(_SILENT, SICK, f"it does not answer{why and ': '}{why}")]
    return {host: answers[host] for host in hosts if host in answers}


def _ask(
    job: Job, hosts: Sequence[str], health: HealthSettings, signals: Signals
) -> Tuple[Findings, List[str]]:
    """Run one srun on hosts; return the answers, and all other lines."""
    began, buffer = time.time(), b""
    answers: Findings = {}
    lines_of_nodes = NodeAnswers(node_health.ANSWER)
    said: List[str] = []
    seconds = node_health.TOOL_SECONDS if health.command else node_health.PROBE_SECONDS
    deadline = time.monotonic() + seconds + _START_SECONDS
    process = _start(job, hosts, health, signals)
    assert process.stdout
    try:
        while len(answers) < len(hosts) and time.monotonic() < deadline:
            signals.check()
            if not select.select([process.stdout], [], [], 0.1)[0]:
                continue
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace")
                if not lines_of_nodes.take(text):
                    said.append(to_printable(re.sub("^srun: (error: )?", "", text)))
            for host in set(hosts).intersection(lines_of_nodes.contents).difference(answers):
                answers.update(_read(host, lines_of_nodes.contents[host], began))
            if not chunk:
                break
    finally:
        _end(process, is_done=len(answers) == len(hosts))
    return answers, said


def _start(
    job: Job, hosts: Sequence[str], health: HealthSettings, signals: Signals
) -> "subprocess.Popen[bytes]":
    def begin() -> None:
        os.setpgid(0, 0)
        signals.release()

    return subprocess.Popen(
        build_question(job, hosts, HEALTH, json.dumps(health._asdict())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=question_environment(),
        preexec_fn=begin,
    )


def _end(process: "subprocess.Popen[bytes]", is_done: bool) -> None:
    """Let srun end by itself if all nodes have answered; a node may hold a process that cannot end."""
    for number in (*((0,) if is_done else ()), signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)
            return


def _read(host: str, content: Any, began: float) -> Findings:
    """Read an answer: lines that the tasks' user or a shell could have printed too."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        findings = [Finding(*fields) for fields in content["findings"]]
        skew = max(began - content["time"], content["time"] - time.time())
        if skew > _SKEW_SECONDS:
            findings.append(Finding("clock", WARNING, f"its clock is off by {skew:.0f} s", skew))
        return {host: findings}
    return {}
