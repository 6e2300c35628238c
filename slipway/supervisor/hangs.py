"""The search for the cause of a hang: all ranks are asked where they stand, and what they say is kept."""

import json
import os
import subprocess
import time
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from slipway.common.files import names_in, write_atomic
from slipway.common.node import marks
from slipway.common.node.settings import LOCAL
from slipway.supervisor.hang_judge import Hang, Rank, group_by_stack, judge
from slipway.supervisor.hang_probe import read_answers
from slipway.supervisor.job import Job
from slipway.supervisor.nccl_ras import ask
from slipway.supervisor.node_answers import build_question, question_environment

# A node that has not answered after this is a suspect itself.
_PROBE_SECONDS = 20
_MOST_RECORDS, _MOST_GROUPS = 20, 64


class Inquiry(NamedTuple):
    """The judgement of a hang, with all that the ranks of each node have said."""

    hang: Hang
    ranks: Sequence[Rank]
    answers: Dict[str, List[Dict[str, Any]]]


def find_hang(job: Job) -> Inquiry:
    """Ask all ranks where they stand, and judge what they say.

    Raises
    ------
    OSError
        If no node has answered.
    """
    hosts = _find_hosts(job)
    answers = _ask_nodes(job, hosts)
    ranks, silent = _arrange(answers, hosts or list(answers), job.settings.tasks_per_node)
    return Inquiry(judge(ranks, silent, ask()), ranks, answers)


def _find_hosts(job: Job) -> List[str]:
    """Return the hosts of the tasks, in the order of their ranks; none without Slurm."""
    if job.settings.scheduler == LOCAL:
        return []
    attempts = [each for each in marks.read_attempts(job.directory) if each.stem == job.attempt]
    return (attempts[-1].nodes or "").split(",") if attempts else []


def _ask_nodes(job: Job, hosts: Sequence[str]) -> Dict[str, List[Dict[str, Any]]]:
    """Return the answers of the nodes that answer in time."""
    command = build_question(job, hosts, "stacks", job.settings.tag)
    # A srun that nobody ends waits for a node that is away.
    done = subprocess.run(
        ["timeout", "--kill-after=2", str(_PROBE_SECONDS), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=question_environment(),
    )
    answers = read_answers(done.stdout.decode("utf-8", "replace"))
    if not answers:
        raise OSError(f"no rank could be asked: {done.stderr.decode('utf-8', 'replace').strip()[-500:]}")
    return answers


def _arrange(
    answers: Dict[str, List[Dict[str, Any]]], hosts: Sequence[str], tasks: int
) -> Tuple[List[Rank], Dict[str, List[int]]]:
    """Return all ranks that ought to be there, and those of the nodes that did not answer."""
    ranks: List[Rank] = []
    silent: Dict[str, List[int]] = {}
    for index, host in enumerate(hosts):
        expected = list(range(index * tasks, (index + 1) * tasks))
        if host not in answers:
            silent[host] = expected
            continue
        found = [
            Rank(
                rank=each["rank"],
                host=host,
                pid=each["pid"],
                state=each["state"],
                answers=each["answers"],
                moves=each["moves"],
                frames=tuple((file, line, name) for file, line, name in each["frames"]),
                collectives=each["collectives"],
                kernel=each.get("kernel", ""),
            )
            for each in answers[host]
        ]
        numbers = {each.rank for each in found}
        ranks += found
        if numbers <= set(expected):  # torchrun's workers are more than Slurm's tasks
            ranks += [Rank(number, host) for number in expected if number not in numbers]
    return sorted(ranks, key=lambda each: each.rank), silent


def keep(job: Job, inquiry: Inquiry) -> None:
    """Keep the judgement, the groups of ranks, and all that the suspects say, in a file of the launch.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    directory = os.path.join(job.directory, marks.HANGS)
    os.makedirs(directory, exist_ok=True)
    number = sum(name.startswith(job.attempt + ".") for name in names_in(directory))
    if number >= _MOST_RECORDS:
        return
    groups = [
        {
            "ranks": [each.rank for each in group],
            "state": group[0].state,
            "frames": [f"{file}:{line} {name}" for file, line, name in group[0].frames],
        }
        for group in group_by_stack(inquiry.ranks)[:_MOST_GROUPS]
    ]
    said = [dict(each, host=host) for host, own in inquiry.answers.items() for each in own]
    suspects = [each for each in said if each["rank"] in inquiry.hang.suspects][:_MOST_GROUPS]
    content = dict(inquiry.hang._asdict(), time=time.time(), job=job.id, groups=groups, said=suspects)
    path = os.path.join(directory, f"{job.attempt}.{number + 1}.json")
    write_atomic(path, json.dumps(content, indent=1) + "\n", sync=False)
