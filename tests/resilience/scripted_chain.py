"""A chain whose links run one by one: real bash and supervisor, with stand-ins for Slurm's commands."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.compose import compose
from launcher.plan import Payload, Plan, Queue
from launcher.stages.planning import plan_launch
from tests.fakes.programs import write_program
from tests.fakes.slurm import JOB_COMMANDS
from tests.launch_files import write_files

TAG = "0123abcd"
# Each command records its calls, and sbatch its environment too; environment variables set their answers.
COMMANDS = {
    "srun": JOB_COMMANDS["srun"],
    "scontrol": """case "$*" in
    "show hostnames"*) printf 'n1\\nn2\\n' ;;
    *"job --oneliner 17") echo "JobId=17 ${STATE-JobState=RUNNING Reason=None PreemptTime=None} x=y" ;;
    *"job --oneliner 16") echo "JobId=16 JobState=${BEFORE-COMPLETED} Reason=None x=y" ;;
    esac""",
    "squeue": '[[ $* == *=%T* ]] && echo RUNNING || echo "${QUEUE-}"',
    "sacct": "exit 1",
    "sinfo": 'printf "n1 mixed\\nn2 ${DOWN-mixed}\\n"',
    "scancel": ":",
    "sbatch": """env >"$0.env"
if [[ $* == *--test-only* ]]; then echo "sbatch: Job 99 to start" >&2; exit "${REFUSES-0}"; fi
if [[ ${GONE-} && $* == *"$GONE"* ]]; then echo "sbatch: error: Invalid node name specified" >&2; exit 1; fi
if [[ -e $0.busy ]]; then rm "$0.busy"; echo "sbatch: error: Socket timed out" >&2; exit 1; fi
echo "${ANSWER-18}\"""",
}


@dataclass
class ScriptedChain:
    """A launch on disk, and the jobs that run its script."""

    plan: Plan
    root: Path
    commands: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.plan.paths.directory

    def run(self, *arguments: str, job: str = "17", **variables: str) -> tuple[int, str]:
        """Run the script as a job; keep the calls of Slurm's commands in `commands`."""
        calls = self.root / "calls"
        calls.write_text("")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        log = self.plan.paths.log(job)
        with log.open("a+") as output:
            done = subprocess.run(
                ["bash", self.plan.paths.script, *(arguments or (TAG,))],
                env={
                    **inherited,
                    "PATH": f"{self.root}/bin:{os.environ['PATH']}",
                    "SLURM_JOB_ID": job,
                    "SLURM_JOB_NODELIST": "n[1-2]",
                    **variables,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=60,
            )
            output.seek(0)  # its directory may be gone by now
            text = output.read()
        self.commands = calls.read_text().splitlines()
        return done.returncode, text

    def calls_of(self, name: str) -> list[str]:
        return [command for command in self.commands if command.split()[0] == name]

    def submissions(self) -> list[str]:
        return [command for command in self.calls_of("sbatch") if "--test-only" not in command]

    def replace_command(self, name: str, body: str) -> None:
        """Write one of Slurm's commands, which records each call."""
        calls = self.root / "calls"
        noted = f'printf "%s" {name} >>{calls}; printf " %s" "$@" >>{calls}; echo >>{calls}'
        write_program(self.root / "bin" / name, f"{noted}\n{body}")

    def tasks(self, command: str) -> None:
        """Have each task of later jobs run a command."""
        self.plan.paths.task_script.write_text(f"#!/bin/bash\n{command}\n")

    def checkpoint(self, step: int, serial: int) -> None:
        """Write a checkpoint as our trainer does."""
        path = self.plan.paths.checkpoints / f"megatron_gpt--step={step}-serial={serial}"
        path.mkdir(parents=True)
        (path / "complete.json").write_text(json.dumps({"step": step, "serial": serial}))

    def end_mark(self, job: str = "17") -> dict[str, Any]:
        return dict(json.loads((self.plan.paths.marks / f"{job}.0.ended.json").read_text()))


def write_chain(tmp_path: Path, *overrides: str, queue: Queue | None = None) -> ScriptedChain:
    """Write the launch of a chain whose tasks do nothing, and the commands that its script calls."""
    own = ["training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf=null", "resilience.links=3"]
    places = [f"base_results_dir={tmp_path}/results", "cluster.python=/usr/bin/python3"]
    plan = plan_launch(compose([*own, *places, *overrides]).config, number=1, tag=TAG)
    job = dataclasses.replace(plan.job, payload=Payload(argv=("true",), working_dir=str(tmp_path)))
    plan = dataclasses.replace(plan, job=dataclasses.replace(job, queue=queue or job.queue))
    write_files(plan)
    chain = ScriptedChain(plan, tmp_path)
    for name, body in COMMANDS.items():
        chain.replace_command(name, body)
    return chain
