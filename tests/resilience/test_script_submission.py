"""The script of a chain submits the next link, once, whatever Slurm answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.paths import submitted_name
from slipway.common.node.marks import ChainEnd, chain_end, claim, link_jobs, read_attempts
from tests.resilience.scripted_chain import TAG, write_chain


def test_link_submits_next_before_its_tasks_and_cancels_it_when_done(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    code, output = chain.run()
    assert code == 0, output
    names = [command.split()[0] for command in chain.commands]
    assert names.index("sbatch") < names.index("srun") < names.index("scancel")
    (submission,) = chain.submissions()
    path = submitted_name(chain.plan.paths.script, TAG, 2)
    assert submission.endswith(f" --kill-on-invalid-dep=yes {path} 2 {TAG}")
    assert "--dependency=afterany:17,singleton " in submission
    assert link_jobs(chain.directory) == ["17", "18"]
    assert chain.calls_of("scancel") == ["scancel 18"]
    end = chain_end(chain.directory)
    assert end is not None and end.by == "job 17"
    assert chain.end_mark()["verdict"] == "done"
    assert list(chain.plan.paths.marks.glob(".*")) == []


def test_link_after_end_of_chain_does_nothing(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.run()
    code, output = chain.run("2", TAG, job="18")
    assert code == 0
    assert "leaves without doing anything" in output and "job 17" in output
    assert not chain.calls_of("srun") and not chain.calls_of("sbatch")
    assert [attempt.job_id for attempt in read_attempts(chain.directory)] == ["17"]


def test_second_job_of_one_link_leaves(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    chain.run()
    code, output = chain.run("2", TAG, job="19")
    assert (code, chain.calls_of("srun")) == (0, [])
    assert f"{chain.plan.paths.marks}/job.2 says 18" in output


def test_variables_of_job_do_not_reach_next_job(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, "env_vars.OF_THE_TASKS=1")
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
    chain.run(**variables)
    environment = (tmp_path / "bin" / "sbatch.env").read_text().splitlines()
    assert (
        "SLURM_CONF=/etc/slurm.conf" in environment
        and "OF_THE_USER=kept" in environment
        and f"PWD={tmp_path}" in environment
    )
    assert [line for line in environment if line.startswith(("SLURM", "SBATCH", "CUDA"))] == [
        "SLURM_CONF=/etc/slurm.conf"
    ]
    assert "OF_THE_TASKS=1" not in environment


def test_variables_of_tasks_do_not_reach_job_submitted_after_them(tmp_path: Path) -> None:
    """The script has exported the variables of its tasks by then, secrets among them."""
    chain = write_chain(tmp_path, "env_vars.OF_THE_TASKS=1", "env_vars.OF_BOTH=2")
    chain.tasks(f"sed -i 's/ANSWER-18/LATER/' {tmp_path}/bin/sbatch; exit 75")
    _, output = chain.run(ANSWER="refused", LATER="22", OF_BOTH="1", conf="mine", SLURM_CONF="/c")
    assert link_jobs(chain.directory) == ["17", "22"], output
    environment = (tmp_path / "bin" / "sbatch.env").read_text().splitlines()
    assert {"OF_BOTH=1", "conf=mine", "SLURM_CONF=/c"} <= set(environment)
    assert not [line for line in environment if line.startswith(("OF_THE_TASKS", "MASTER_", "OF_BOTH=2"))]


def test_script_submitted_by_hand_is_no_link(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    code, output = chain.run("by hand")
    assert code == 0, output
    assert chain.calls_of("srun") and not chain.calls_of("sbatch")
    assert chain_end(chain.directory) is None


def test_last_link_and_chain_submitted_at_launch_submit_nothing(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    assert chain.run("3", TAG)[0] == 75
    assert chain.submissions() == []
    at_launch = write_chain(tmp_path / "other", "resilience.submit=launch")
    for link, job in enumerate(("17", "18", "19"), start=1):
        claim(at_launch.directory, job, link)
    assert at_launch.run()[0] == 0
    assert at_launch.submissions() == []
    assert at_launch.calls_of("scancel") == ["scancel 18 19"]


def test_what_a_site_says_of_a_link_is_kept_with_the_launch(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f"{sbatch.read_text()}\necho 'sbatch: error: 40 GPU hours are left' >&2\n")
    log = chain.directory / "launcher.log"
    log.write_text("Submitted batch job 17\n")
    _, output = chain.run()
    assert "sbatch says of job 18: 40 GPU hours are left" in output
    assert log.read_text() == "Submitted batch job 17\njob 18: 40 GPU hours are left\n"


# The queue tells the script's arguments before Slurm 23.02 alone.
@pytest.mark.parametrize("arguments", ["", f" 2 {TAG}"])
def test_lost_answer_makes_no_second_job(tmp_path: Path, arguments: str) -> None:
    """Slurm took the job, and sbatch says that it did not: the queue knows better."""
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    (tmp_path / "bin" / "sbatch.busy").touch()
    code, output = chain.run(
        QUEUE=f"18|PENDING|(null)|{submitted_name(chain.plan.paths.script, TAG, 2)}{arguments}"
    )
    assert code == 75
    assert len(chain.submissions()) == 1, output
    assert link_jobs(chain.directory) == ["17", "18"]


def test_busy_controller_is_asked_again(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks("exit 75")
    (tmp_path / "bin" / "sbatch.busy").touch()
    _, output = chain.run()
    assert len(chain.submissions()) == 2
    assert "link 2 could not be submitted: sbatch: error: Socket timed out" in output
    assert link_jobs(chain.directory) == ["17", "18"]


def test_refused_submission_is_tried_again_at_end(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    chain.tasks(f"printf '#!/bin/bash\\necho 21' >{tmp_path}/bin/sbatch; exit 75")
    code, output = chain.run(ANSWER="sbatch: error: Batch job submission failed")
    assert code == 75
    assert "tries once more" in output and link_jobs(chain.directory) == ["17", "21"]


def test_one_next_job_is_submitted_where_claims_cannot_be_written(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    for claimed in ("job", "job.2"):
        (chain.plan.paths.marks / claimed).mkdir(parents=True)  # so that none can be written
    chain.tasks("exit 75")
    code, output = chain.run()
    assert code == 75
    assert link_jobs(chain.directory) == []
    assert len(chain.submissions()) == 1, output
    chain.tasks("true")
    chain.run()
    assert chain.calls_of("scancel") == ["scancel 18"]


def test_ended_chain_submits_nothing(tmp_path: Path) -> None:
    chain = write_chain(tmp_path)
    ended = chain.plan.paths.marks / "chain-ended"
    chain.tasks(f"""echo '{{"by": "me", "why": "cancelled"}}' >{ended}; exit 75""")
    chain.run(ANSWER="refused")
    assert len(chain.submissions()) == 3  # before the tasks, and none of them taken
    assert chain_end(chain.directory) == ChainEnd("me", "cancelled")
