"""What the script of a chain does, link by link: real bash, and Slurm's commands played."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.config.compose import compose
from launcher.plan import Chain, Payload, Plan, Queue
from launcher.runs.paths import submitted_name
from launcher.stages.planning import plan_launch
from supervisor.marks import ChainEnd, chain_end, claim, link_jobs, note_cancelled, read_attempts
from tests.launch_files import write_files

TAG = "0123abcd"
# Each notes how it was called; sbatch its environment too, and it has as many answers as it was given.
TOOLS = {
    "srun": """while [[ $1 != bash ]]; do shift; done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1
"$@\"""",
    "scontrol": """case "$*" in
    "show hostnames"*) printf 'n1\\nn2\\n' ;;
    *"job --oneliner 17") echo "JobId=17 ${STATE-JobState=RUNNING Reason=None PreemptTime=None} x=y" ;;
    *"job --oneliner 16") echo "JobId=16 JobState=${BEFORE-COMPLETED} Reason=None x=y" ;;
    esac""",
    "squeue": '[[ $* == *%T* ]] && echo RUNNING || echo "${QUEUE-}"',
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
class Script:
    """A launch on disk, and the jobs that run its script."""

    plan: Plan
    root: Path
    commands: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.plan.paths.directory

    def run(self, *arguments: str, job: str = "17", **variables: str) -> tuple[int, str]:
        """Run the script as a job; what Slurm's commands were asked is in `commands` then."""
        calls = self.root / "calls"
        calls.write_text("")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        log = self.directory / self.plan.paths.log_name(job)
        with log.open("a") as output:
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
        self.commands = calls.read_text().splitlines()
        return done.returncode, log.read_text()

    def called(self, name: str) -> list[str]:
        return [command for command in self.commands if command.split()[0] == name]

    def submitted(self) -> list[str]:
        return [command for command in self.called("sbatch") if "--test-only" not in command]

    def tasks(self, command: str) -> None:
        """What each task of later jobs does."""
        self.plan.paths.task_script.write_text(f"#!/bin/bash\n{command}\n")

    def checkpoint(self, step: int, serial: int) -> None:
        """Leave a checkpoint as our trainer does."""
        path = self.plan.paths.checkpoints / f"megatron_gpt--step={step}-serial={serial}"
        path.mkdir(parents=True)
        (path / "complete.json").write_text(json.dumps({"step": step, "serial": serial}))

    def ended(self, job: str = "17") -> dict[str, Any]:
        return dict(json.loads((self.plan.paths.marks / f"{job}.0.ended.json").read_text()))


def script(tmp_path: Path, *overrides: str, queue: Queue | None = None, chain: Chain | None = None) -> Script:
    given = ["training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf=null", "resilience.links=3"]
    places = [f"base_results_dir={tmp_path}/results", "cluster.python=/usr/bin/python3"]
    plan = plan_launch(compose([*given, *places, *overrides]).config, number=1, tag=TAG)
    job = dataclasses.replace(plan.job, payload=Payload(argv=("true",), working_dir=str(tmp_path)))
    job = dataclasses.replace(job, queue=queue or job.queue, chain=chain or job.chain)
    plan = dataclasses.replace(plan, job=job)
    write_files(plan)
    (tmp_path / "bin").mkdir()
    for name, body in TOOLS.items():
        tool(tmp_path, name, body)
    return Script(plan, tmp_path)


def tool(root: Path, name: str, body: str) -> None:
    noted = f'printf "%s" {name} >>{root}/calls; printf " %s" "$@" >>{root}/calls; echo >>{root}/calls'
    path = root / "bin" / name
    path.write_text(f"#!/bin/bash\n{noted}\n{body}\n")
    path.chmod(0o755)


def test_a_link_submits_the_next_before_its_tasks_and_cancels_it_when_all_is_done(tmp_path: Path) -> None:
    made = script(tmp_path)
    code, told = made.run()
    assert code == 0, told
    names = [command.split()[0] for command in made.commands]
    assert names.index("sbatch") < names.index("srun") < names.index("scancel")
    (submitted,) = made.submitted()
    path = submitted_name(made.plan.paths.script, TAG, 2)
    assert submitted.endswith(f" --kill-on-invalid-dep=yes {path} 2 {TAG}")
    assert "--dependency=afterany:17,singleton " in submitted
    assert link_jobs(made.directory) == ["17", "18"]
    assert made.called("scancel") == ["scancel 18"]
    end = chain_end(made.directory)
    assert end is not None and end.by == "job 17"
    assert made.ended()["verdict"] == "done"
    assert list(made.plan.paths.marks.glob(".*")) == []


def test_a_link_after_the_end_of_its_chain_does_nothing(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.run()
    code, told = made.run("2", TAG, job="18")
    assert code == 0
    assert "leaves without doing anything" in told and "job 17" in told
    assert not made.called("srun") and not made.called("sbatch")
    assert [life.job_id for life in read_attempts(made.directory)] == ["17"]


def test_of_two_jobs_that_are_one_link_one_leaves(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 75")
    made.run()
    code, told = made.run("2", TAG, job="19")
    assert (code, made.called("srun")) == (0, [])
    assert f"{made.plan.paths.marks}/job.2 says 18" in told


def test_nothing_of_the_job_reaches_the_next_one(tmp_path: Path) -> None:
    made = script(tmp_path, "env_vars.OF_THE_TASKS=1")
    variables = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CPUS_PER_TASK": "8",
        "SBATCH_PARTITION": "other",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_GPUS": "0",
        "CUDA_VISIBLE_DEVICES": "0",
        "OF_THE_USER": "kept",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    made.run(**variables)
    seen = (tmp_path / "bin" / "sbatch.env").read_text().splitlines()
    assert "SLURM_CONF=/etc/slurm.conf" in seen and "OF_THE_USER=kept" in seen and f"PWD={tmp_path}" in seen
    assert [line for line in seen if line.startswith(("SLURM", "SBATCH", "CUDA"))] == [
        "SLURM_CONF=/etc/slurm.conf"
    ]
    assert "OF_THE_TASKS=1" not in seen


def test_not_even_where_it_is_submitted_after_the_tasks(tmp_path: Path) -> None:
    """The script has exported by then what is for the tasks, secrets among it."""
    made = script(tmp_path, "env_vars.OF_THE_TASKS=1", "env_vars.OF_BOTH=2")
    made.tasks(f"sed -i 's/ANSWER-18/LATER/' {tmp_path}/bin/sbatch; exit 75")
    _, told = made.run(ANSWER="refused", LATER="22", OF_BOTH="1", conf="mine", SLURM_CONF="/c")
    assert link_jobs(made.directory) == ["17", "22"], told
    seen = (tmp_path / "bin" / "sbatch.env").read_text().splitlines()
    assert {"OF_BOTH=1", "conf=mine", "SLURM_CONF=/c"} <= set(seen)
    assert not [line for line in seen if line.startswith(("OF_THE_TASKS", "MASTER_", "OF_BOTH=2"))]


def test_a_script_submitted_by_hand_is_no_link(tmp_path: Path) -> None:
    made = script(tmp_path)
    code, told = made.run("by hand")
    assert code == 0, told
    assert made.called("srun") and not made.called("sbatch")
    assert chain_end(made.directory) is None


def test_the_last_link_and_a_chain_submitted_at_launch_submit_nothing(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 75")
    assert made.run("3", TAG)[0] == 75
    assert made.submitted() == []
    at_launch = script(tmp_path / "other", "resilience.submit=launch")
    for link, job in enumerate(("17", "18", "19"), start=1):
        claim(at_launch.directory, job, link)
    assert at_launch.run()[0] == 0
    assert at_launch.submitted() == []
    assert at_launch.called("scancel") == ["scancel 18 19"]


# The queue tells the script's arguments before Slurm 23.02 alone.
@pytest.mark.parametrize("arguments", ["", f" 2 {TAG}"])
def test_an_answer_that_was_lost_makes_no_second_job(tmp_path: Path, arguments: str) -> None:
    """Slurm took the job, and sbatch says that it did not: the queue knows better."""
    made = script(tmp_path)
    made.tasks("exit 75")
    (tmp_path / "bin" / "sbatch.busy").touch()
    code, told = made.run(QUEUE=f"18|{submitted_name(made.plan.paths.script, TAG, 2)}{arguments}")
    assert code == 75
    assert len(made.submitted()) == 1, told
    assert link_jobs(made.directory) == ["17", "18"]


def test_a_busy_controller_is_asked_again(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 75")
    (tmp_path / "bin" / "sbatch.busy").touch()
    _, told = made.run()
    assert len(made.submitted()) == 2
    assert "link 2 could not be submitted: sbatch: error: Socket timed out" in told
    assert link_jobs(made.directory) == ["17", "18"]


def test_what_could_not_be_submitted_is_tried_once_more_at_the_end(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks(f"printf '#!/bin/bash\\necho 21' >{tmp_path}/bin/sbatch; exit 75")
    code, told = made.run(ANSWER="sbatch: error: Batch job submission failed")
    assert code == 75
    assert "tries once more" in told and link_jobs(made.directory) == ["17", "21"]


def test_without_room_for_claims_there_is_one_next_job_all_the_same(tmp_path: Path) -> None:
    made = script(tmp_path)
    for claimed in ("job", "job.2"):
        (made.plan.paths.marks / claimed).mkdir(parents=True)  # so that none can be written
    made.tasks("exit 75")
    code, told = made.run()
    assert code == 75
    assert link_jobs(made.directory) == []
    assert len(made.submitted()) == 1, told
    made.tasks("true")
    made.run()
    assert made.called("scancel") == ["scancel 18"]


def test_nothing_is_submitted_once_somebody_has_ended_the_chain(tmp_path: Path) -> None:
    made = script(tmp_path)
    ended = made.plan.paths.marks / "chain-ended"
    made.tasks(f"""echo '{{"by": "me", "why": "cancelled"}}' >{ended}; exit 75""")
    made.run(ANSWER="refused")
    assert len(made.submitted()) == 3  # before the tasks, and none of them taken
    assert chain_end(made.directory) == ChainEnd("me", "cancelled")


@pytest.mark.parametrize(
    ("code", "verdict", "ends"),
    [
        (0, "done", True),
        (75, "continue", False),
        (1, "continue", False),
        (2, "stop", True),
        (3, "stop", True),
    ],
)
def test_the_exit_code_decides_whether_it_goes_on(
    tmp_path: Path, code: int, verdict: str, ends: bool
) -> None:
    made = script(tmp_path)
    made.tasks(f"exit {code}")
    assert made.run()[0] == code
    assert made.ended()["verdict"] == verdict
    assert (chain_end(made.directory) is not None) == ends
    assert made.called("scancel") == (["scancel 18"] if ends else [])
    (life,) = read_attempts(made.directory)
    assert (life.exit_code, life.link, life.verdict) == (code, 1, verdict)
    assert life.why


def test_what_is_no_training_does_not_diverge(tmp_path: Path) -> None:
    made = script(tmp_path, "stages=[data_preparation]", "data_preparation.inputs=[/x]", "resilience.links=1")
    made.tasks("exit 3")
    made.run()
    assert made.ended()["rule"] == "failed"


def test_links_that_get_nowhere_end_the_chain_and_say_why(tmp_path: Path) -> None:
    made = script(tmp_path, "resilience.links=9", "resilience.max_failures=3")
    made.tasks("exit 1")
    failures = []
    for link in (1, 2, 3):
        made.run(*([TAG] if link == 1 else [str(link), TAG]), job=str(16 + link), ANSWER=str(17 + link))
        failures.append(made.ended(str(16 + link))["failures"])
    assert failures == [0, 1, 2]
    assert made.ended("19")["verdict"] == "stop"
    end = chain_end(made.directory)
    assert end is not None and end.by == "job 19"
    assert end.why.startswith("3 links in a row ended without a new checkpoint: ")
    assert made.called("scancel") == ["scancel 20"]


def test_a_new_checkpoint_forgives_what_came_before(tmp_path: Path) -> None:
    made = script(tmp_path, "resilience.links=9", "resilience.max_failures=2")
    made.tasks("exit 1")
    made.run()
    into = made.plan.paths.checkpoints / "step=20"
    made.tasks(f"""mkdir -p {into}; echo '{{"step": 20, "serial": 1}}' >{into}/complete.json; exit 1""")
    made.run("2", TAG, job="18", ANSWER="19")
    assert made.ended("18")["verdict"] == "continue"
    made.tasks("exit 75")
    made.run("3", TAG, job="19", ANSWER="20")
    started = json.loads((made.plan.paths.marks / "19.0.started.json").read_text())
    assert (started["failures"], started["checkpoint"], started["link"]) == (0, 20, 3)
    # A job that saves nothing new before it leaves gets nowhere either.
    made.run("4", TAG, job="20", ANSWER="21")
    assert chain_end(made.directory) is not None


def test_a_preempted_link_does_not_count(tmp_path: Path) -> None:
    made = script(tmp_path, "resilience.links=9", "resilience.max_failures=1")
    made.tasks("exit 143")
    made.run(STATE="JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:00:00")
    assert (made.ended()["state"], made.ended()["verdict"]) == ("PREEMPTED", "continue")
    made.tasks("exit 1")
    made.run("2", TAG, job="18")
    assert (made.ended("18")["failures"], made.ended("18")["verdict"]) == (0, "stop")


@pytest.mark.parametrize("by_slipway", [True, False])
def test_a_chain_whose_link_was_cancelled_stops(tmp_path: Path, by_slipway: bool) -> None:
    made = script(tmp_path)
    made.tasks("exit 143")
    if by_slipway:
        (made.plan.paths.marks).mkdir()
        note_cancelled(made.directory, "17", "me")
        made.run()
    else:
        made.run(STATE="JobState=COMPLETING Reason=None PreemptTime=None")
    assert made.ended()["verdict"] == "stop"
    assert chain_end(made.directory) is not None


def test_a_cancel_that_the_link_itself_could_not_see_stops_the_chain_too(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 143")
    made.run(job="16", ANSWER="17")
    assert chain_end(made.directory) is None
    code, told = made.run("2", TAG, BEFORE="CANCELLED")
    assert (code, made.called("srun")) == (1, []), told
    end = chain_end(made.directory)
    assert end is not None and end.why == "job 16: it was cancelled"


def test_a_link_judges_the_one_before_whose_node_died(tmp_path: Path) -> None:
    made = script(tmp_path, "resilience.max_failures=2", "resilience.links=9")
    made.tasks("exit 75")
    made.run(job="16", ANSWER="17")
    (made.plan.paths.marks / "16.0.ended.json").unlink()
    made.run("2", TAG, BEFORE="NODE_FAIL", ANSWER="18")
    told = made.ended("16")
    assert (told["state"], told["judged_by"], told["link"]) == ("NODE_FAIL", "job 17", 1)
    assert "exit_code" not in told and told["why"]
    assert made.ended("17")["failures"] == 1
    assert made.ended("17")["verdict"] == "stop"


def test_a_node_is_excluded_for_the_job_that_it_failed_under(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 75")
    made.run(job="16", ANSWER="17")
    (made.plan.paths.marks / "16.0.ended.json").unlink()
    made.run("2", TAG, BEFORE="NODE_FAIL", DOWN="down*")
    (line,) = (made.plan.paths.run_dir / "excluded_nodes.tsv").read_text().splitlines()
    assert line.split("\t")[0::2] == ["n2", "16"]


def test_a_node_that_failed_is_excluded_where_slurm_can_do_without_it(tmp_path: Path) -> None:
    made = script(tmp_path, "cluster.exclude=n9")
    made.tasks("exit 1")
    made.run(STATE="JobState=COMPLETING Reason=NodeDown PreemptTime=None", DOWN="down*")
    assert (made.ended()["verdict"], made.ended()["excluded"]) == ("exclude", "n2")
    assert made.called("sbatch")[-1].startswith("sbatch --test-only --exclude=n9,n2 ")
    assert made.called("scontrol")[-1] == "scontrol update JobId=18 ExcNodeList=n9,n2"
    (line,) = (made.plan.paths.run_dir / "excluded_nodes.tsv").read_text().splitlines()
    assert line.split("\t")[0::2] == ["n2", "17"]
    made.run("2", TAG, job="18", ANSWER="19")
    assert "--exclude=n9,n2 " in made.submitted()[0]
    assert read_attempts(made.directory)[-1].avoids == "n9,n2"


def test_a_node_that_is_needed_is_not_excluded_and_that_is_said(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 1")
    _, told = made.run(
        STATE="JobState=COMPLETING Reason=NodeDown PreemptTime=None", DOWN="down*", REFUSES="1"
    )
    assert "does not exclude n2" in told
    assert not (made.plan.paths.run_dir / "excluded_nodes.tsv").exists()
    assert not [command for command in made.commands if "ExcNodeList" in command]


def test_links_that_were_all_submitted_at_launch_all_stay_away(tmp_path: Path) -> None:
    made = script(tmp_path, "resilience.submit=launch")
    for link, job in enumerate(("17", "18", "19"), start=1):
        claim(made.directory, job, link)
    made.tasks("exit 1")
    made.run(STATE="JobState=COMPLETING Reason=NodeDown PreemptTime=None", DOWN="down*")
    assert made.called("scontrol")[-1] == "scontrol update JobId=18,19 ExcNodeList=n2"


def test_a_node_that_has_left_the_cluster_does_not_end_the_chain(tmp_path: Path) -> None:
    """To Slurm it is no node then, and a job that is to avoid it is refused."""
    made = script(tmp_path)
    made.tasks("exit 75")
    (made.plan.paths.run_dir / "excluded_nodes.tsv").write_text("n2\t99999999999\t9\tit failed\n")
    _, told = made.run(GONE="--exclude=n2")
    assert "Invalid node name" in told
    assert link_jobs(made.directory) == ["17", "18"], told
    assert "--exclude" not in made.submitted()[-1]


def test_an_exclusion_expires_and_a_strange_one_is_ignored(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 75")
    lines: Sequence[str] = (
        "n1\t1\t9\tlong ago",
        "n2\t99999999999\t9\tstill",
        "n2\t99999999999\t9\ttwice",
        "$(touch x)\t99999999999\t9\tx",
        "torn",
    )
    (made.plan.paths.run_dir / "excluded_nodes.tsv").write_text("\n".join(lines) + "\n")
    made.run()
    assert "--exclude=n2 " in made.submitted()[0]


def test_the_begin_of_the_header_is_for_the_first_link_alone(tmp_path: Path) -> None:
    made = script(tmp_path, queue=Queue(begin="now+1hour"))
    made.tasks("exit 75")
    made.run()
    assert " --begin=now " in made.submitted()[0]
    assert "--exclude" not in made.submitted()[0]


def test_a_log_can_neither_name_nodes_of_others_nor_run_anything(tmp_path: Path) -> None:
    made = script(tmp_path)
    hostile = "NVRM: Xid (PCI:0000:3b:00): 79, $(touch canary) `touch canary` n7 n22 fallen off the bus"
    made.tasks(f"echo {shlex.quote(hostile)}; echo '\"}}, {{\"'; exit 1")
    made.run()
    told = made.ended()
    assert told["rule"] == "gpu_lost" and told["verdict"] == "continue" and "excluded" not in told
    assert not list(tmp_path.rglob("canary")) and not Path("canary").exists()


@pytest.mark.parametrize(
    "progress",
    [
        "step   26/3000 | loss 6.2637 | lr 5.0e-03\nstep    7/3000 | loss 6.2981 | lr 5.0e-03",
        "0: step    7/3000 | loss 6.2981 | lr 5.0e-03",
        " 40%|### | 7/9 [00:01<00:02, x]",
        " iteration        7/     500 | consumed samples:          56 |",
    ],
)
def test_the_first_rank_that_failed_and_the_last_step_are_told(tmp_path: Path, progress: str) -> None:
    made = script(tmp_path)
    said = [progress, "srun: error: n2: tasks 3: Exited with exit code 1"]
    made.tasks(f"printf '%s\\n' {shlex.join(said)}; exit 1")
    made.run()
    told = made.ended()
    assert (told["rank"], told["host"], told["step"]) == (3, "n2", 7)


@pytest.mark.parametrize(
    ("said", "signal", "expected"),
    [
        ("`Trainer.fit` stopped: `max_steps=5` reached.", "", 0),
        ("`Trainer.fit` stopped: `max_steps=5` reached.", "USR1", 0),
        ("Time limit reached. Elapsed time is 0:00:01. Signaling Trainer to stop.", "", 75),
        ("saving", "USR1", 75),
        ("saving", "", 0),
    ],
)
def test_nemo_that_saved_and_left_is_not_done(tmp_path: Path, said: str, signal: str, expected: int) -> None:
    made = script(tmp_path)
    payload = dataclasses.replace(made.plan.job.payload, save_signal="TERM")
    plan = dataclasses.replace(
        made.plan, job=dataclasses.replace(made.plan.job, payload=payload, engine="nemo")
    )
    write_files(plan)
    tell = f"kill -s {signal} $(ps -o ppid= -p $PPID); sleep 1; " if signal else ""
    made.tasks(f"{tell}echo {shlex.quote(said)}; exit 0")
    tool(tmp_path, "srun", "trap '' USR1; " + TOOLS["srun"])
    code, told = made.run()
    assert code == expected, told
    assert made.ended()["verdict"] == ("continue" if expected else "done")


def test_a_training_that_went_back_goes_on_link_by_link(tmp_path: Path) -> None:
    """From step 1000 to 200: links that save 400, 600 and 800 get on; links that save nothing do not."""
    made = script(tmp_path, "resilience.links=20", "resilience.max_failures=2")
    for serial, step in enumerate((200, 1000), start=1):
        made.checkpoint(step, serial)
    steps = iter((400, 600, 800, 1000))
    for link, step in enumerate(steps, start=1):
        made.tasks("exit 1")
        into = made.plan.paths.checkpoints / f"step={step}-again"
        made.tasks(f"""mkdir {into}
            echo '{{"step": {step}, "serial": {link + 2}}}' >{into}/complete.json; exit 1""")
        made.run(*([TAG] if link == 1 else [str(link), TAG]), job=str(16 + link), ANSWER=str(17 + link))
        assert made.ended(str(16 + link))["verdict"] == "continue"
    assert [life.checkpoint for life in read_attempts(made.directory)] == [1000, 400, 600, 800]
    made.tasks("exit 1")
    for link in (5, 6):
        assert chain_end(made.directory) is None
        made.run(str(link), TAG, job=str(16 + link), ANSWER=str(17 + link))
    assert chain_end(made.directory) is not None


@pytest.mark.parametrize(
    ("restarts", "why"), [("0", "somebody cancelled or requeued it"), ("1", "somebody requeued it")]
)
def test_a_link_that_may_have_been_requeued_does_not_end_its_chain(
    tmp_path: Path, restarts: str, why: str
) -> None:
    """Slurm calls it COMPLETING for no reason, as one that was cancelled, until it has ended."""
    made = script(tmp_path, "resilience.max_failures=1")
    made.tasks("exit 143")
    state = f"JobState=COMPLETING Reason=None Requeue=1 Restarts={restarts} PreemptTime=None"
    assert made.run(STATE=state)[0] == 143
    assert (made.ended()["verdict"], made.ended()["why"]) == ("continue", why)
    assert chain_end(made.directory) is None and made.called("scancel") == []
    made.tasks("exit 0")
    code, told = made.run(SLURM_RESTART_COUNT="1")
    assert code == 0, told
    assert made.submitted() == [], "the next link is there already"
    assert [(life.number, life.verdict) for life in read_attempts(made.directory)] == [
        (0, "continue"),
        (1, "done"),
    ]
    assert made.called("scancel") == ["scancel 18"]


def test_text_of_a_mark_is_no_code_and_no_number(tmp_path: Path) -> None:
    made = script(tmp_path)
    made.tasks("exit 75")
    made.run(job="16", ANSWER="17")
    mark = made.plan.paths.marks / "16.0.started.json"
    hostile = {"job_id": "16", "checkpoint": "BASH_VERSINFO[$(touch canary)]", "failures": "$(touch canary)"}
    mark.write_text(json.dumps({**hostile, "checkpoint_order": [1], "nodes": "$(touch canary)"}))
    (made.plan.paths.marks / "16.0.ended.json").unlink()
    made.run("2", TAG, BEFORE="NODE_FAIL", ANSWER="18")
    assert made.called("srun")
    assert not list(tmp_path.rglob("canary")) and not Path("canary").exists()
