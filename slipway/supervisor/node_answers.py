"""The answers of a job's nodes to one srun: JSON, in lines among those of other nodes, prologs and shells."""

import json
import os
import sys
from contextlib import suppress
from typing import Any, Dict, List, Sequence

from slipway.supervisor.job import Job

# They give the step of one task a part of a node's GPUs.
_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_TRES", "SLURM_GPU_BIND")
# Slurm passes a line of up to 1,024 bytes on as a whole, whatever other nodes print meanwhile.
_CHUNK = 700


def print_answer(prefix: str, content: Any) -> None:
    """Print the answer of this node in lines that `NodeAnswers` joins."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    text = json.dumps(content)
    for start in range(0, len(text), _CHUNK):
        is_last = start + _CHUNK >= len(text)
        print(prefix, node, int(is_last), text[start : start + _CHUNK], flush=True)


def build_question(job: Job, hosts: Sequence[str], verb: str, argument: str) -> List[str]:
    """Return the command that runs a verb of this program on each host, or here if there are no hosts."""
    archive = os.path.join(job.directory, os.path.basename(sys.argv[0]))
    command = [sys.executable, "-IS", archive, verb, argument]
    if not hosts:
        return command
    count = str(len(hosts))
    srun = ["srun", "--overlap", "--export=ALL", "--job-name=" + verb, "--mpi=none", "--kill-on-bad-exit=0"]
    srun += ["--nodelist=" + ",".join(hosts), "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1"]
    return [*srun, *job.settings.host_arguments, *command]


def question_environment() -> Dict[str, str]:
    """Return the environment for `build_question`: it sees all GPUs of a node."""
    return {name: value for name, value in os.environ.items() if name not in _OF_TASKS}


class NodeAnswers:
    """The whole answers so far in `contents`, by node; a node that was cut off has none."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._texts: Dict[str, str] = {}
        self.contents: Dict[str, Any] = {}

    def take(self, line: str) -> bool:
        """Take a line; return False if it is no part of an answer."""
        words = line.split(" ", 3)
        if len(words) < 4 or words[0] != self._prefix:
            return False
        _, node, is_last, chunk = words
        self._texts[node] = self._texts.get(node, "") + chunk
        if is_last == "1":
            with suppress(ValueError):
                self.contents[node] = json.loads(self._texts.pop(node))
        return True
