"""An sbatch whose answer is lost leads to one job: never to a second one, and never to none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.runs.faulty_sbatch import LEADING_NOWHERE, SUBMITTED_AT_ONCE, accepted_jobs, calls
from tests.runs.faulty_site import Site, faulty_site, outcomes, wait_until


@pytest.fixture
def site(tmp_path: Path, plain_sandbox: Sandbox) -> Iterator[Site]:
    """Yield a site without accounting: nothing but the queue tells of its jobs."""
    with faulty_site(tmp_path, plain_sandbox) as site:
        yield site


def random_faults() -> dict[str, Sequence[str]]:
    """Return random sequences of faults, the same each time."""
    chance = random.Random(6)
    nothing_yet = ["unreachable", "before", "late", "very_late"]
    return {
        f"random{n}": [
            *chance.choices(nothing_yet, k=chance.randint(1, 2)),
            chance.choice(sorted(SUBMITTED_AT_ONCE)),
        ]
        for n in range(6)
    }


def finished_jobs(site: Site, runs: dict[str, Sequence[str]]) -> dict[str, list[str]] | None:
    """Return the jobs that Slurm took for each run, or None until all that can come have come and ended."""
    states = {job: state for job, (_, state) in site.queue().items()}
    taken = {run: accepted_jobs(site.faults(run)) for run in runs}
    for run, faults in runs.items():
        submissions = [*faults, *["fine"] * calls(site.faults(run))][: calls(site.faults(run))]
        if len(taken[run]) < sum(fault not in LEADING_NOWHERE for fault in submissions):
            return None
    is_over = all(states.get(job) in ("COMPLETED", "CANCELLED") for jobs in taken.values() for job in jobs)
    return taken if is_over else None


@pytest.mark.slurm
def test_the_payload_runs_once_whatever_happens_to_the_answers(site: Site) -> None:
    single = {fault: [fault] for fault in {*SUBMITTED_AT_ONCE, "unreachable", "before", "late", "very_late"}}
    runs: dict[str, Sequence[str]] = {**single, "two": ["overtaken", "overtaking"], **random_faults()}
    results = site.launch_all(runs)
    assert {run: code for run, (code, _) in results.items() if code} == {}, "each got through in the end"
    for run, (_, output) in results.items():
        if runs[run][0] not in ("fine", "told"):
            assert "Slurm did not answer: " in output, run
            assert "looking for the job by its tag" in output, run

    jobs = wait_until(lambda: finished_jobs(site, runs))
    assert {len(jobs[run]) for run in ("late", "very_late", "two")} == {2}, "doubled, as it was meant to be"
    assert {run: len(site.payload_jobs(run)) for run in runs} == dict.fromkeys(runs, 1)
    rows = site.status()
    assert {run: (row["state"], row["job_id"]) for run, row in rows.items()} == {
        run: ("COMPLETED", site.payload_jobs(run)[0]) for run in runs
    }
    assert {run: site.manifest(run).job_id for run in runs} == {
        run: site.payload_jobs(run)[0] for run in runs
    }


@pytest.mark.slurm
def test_oldest_of_two_waiting_jobs_is_kept(site: Site) -> None:
    process = site.launch("two", "cluster.partition=cloud", faults=["overtaken", "overtaking"])
    code, _, err = outcomes(process)
    assert code == 0, err
    older, younger = accepted_jobs(site.faults("two"))
    assert f"job {younger} is a second one of the same launch: cancelling it" in err
    assert site.manifest("two").job_id == older
    queue = site.queue()
    assert (queue[older][1], queue[younger][1]) == ("PENDING", "CANCELLED")
    assert site.status()["two"]["job_id"] == older


def _submit_late(site: Site, run: str) -> str:
    """Have the controller take a submission of long ago; return the id of the job."""
    manifest = site.manifest(run)
    script = site.directory / "results" / run / "launches" / "1" / f"faulty-{run}_submission.sh"
    environment = {name: value for name, value in site.environment.items() if name != "PATH"}
    command = ["sbatch", "--parsable", script, manifest.tag]
    done = subprocess.run(
        command,
        env=environment | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slurm
def test_unknown_submission_is_settled_by_the_next_launch(site: Site) -> None:
    """The controller is unreachable while the launcher waits; later one submission becomes a job."""
    runs = {"taken": ["for_ever"], "never": ["for_ever"]}
    for code, output in site.launch_all(runs, seconds=2).values():
        assert code == 3, output
        assert "Unable to contact slurm controller" in output
        assert "it is not known whether launch 1 became a job: slipway status results/" in output
    for run in runs:
        manifest = site.manifest(run)
        assert (manifest.job_id, manifest.error) == (None, None)
        assert "Unable to contact slurm controller" in (manifest.unanswered or "")
    job = _submit_late(site, "taken")
    results = site.launch_all(dict.fromkeys(runs, ()))
    assert results["never"][0] == 0, results
    assert results["taken"][0] == 2
    assert f"launch 1 of taken was submitted as job {job} after all" in results["taken"][1]
    adopted = site.manifest("taken")
    assert (adopted.job_id, adopted.error, adopted.unanswered) == (job, None, None)
    run_dir = site.directory / "results" / "taken"
    assert (run_dir / "launcher.log").read_text() == f"Submitted batch job {job}\n"
    assert (run_dir / f"log-faulty-taken_{job}.out").is_symlink()
    given_up = site.manifest("never")
    assert given_up.job_id is None
    assert "Unable to contact slurm controller" in (given_up.error or "")
    # The job is reported once: a user who launches again after that means it.
    assert site.launch_all({"taken": ()})["taken"][0] == 0
    # A launch that was given up does nothing, even if the controller takes it in the end.
    late_job = _submit_late(site, "never")
    wait_until(lambda: site.queue()[late_job][1] == "COMPLETED")
    known = {"taken": [job, site.manifest("taken", 2).job_id], "never": [site.manifest("never", 2).job_id]}
    wait_until(
        lambda: {run: sorted(site.payload_jobs(run)) for run in runs} == {r: sorted(known[r]) for r in runs}
    )
    log = site.directory / f"results/never/launches/1/log-faulty-never_{late_job}.out"
    assert "leaves without doing anything" in log.read_text()


@pytest.mark.slurm
def test_signals_leave_an_intent_that_the_next_launch_settles(site: Site) -> None:
    """Ctrl-C takes sbatch along; a launcher that is terminated, or whose terminal goes, leaves it behind."""
    signals = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM, "hung_up": signal.SIGHUP}
    started = {run: site.launch(run, "cluster.partition=cloud", faults=["slow"]) for run in signals}
    for run, process in started.items():
        wait_until(lambda run=run: calls(site.faults(run)))
        if run == "interrupted":
            os.killpg(process.pid, signals[run])
        else:
            process.send_signal(signals[run])
    codes = {run: outcomes(process) for run, process in started.items()}
    assert codes["interrupted"][0] == 130
    assert "whether there is a job: slipway status results/interrupted" in codes["interrupted"][2]
    assert (codes["terminated"][0], codes["hung_up"][0]) == (-signal.SIGTERM, -signal.SIGHUP)
    early_results = site.launch_all(dict.fromkeys(signals, ()))
    assert early_results["interrupted"][0] == 0, "there was no job, and none can come"
    assert "interrupted" in (site.manifest("interrupted").error or "")
    for run in ("terminated", "hung_up"):
        assert early_results[run][0] == 2
        assert "still submitting it" in early_results[run][1]
        (site.faults(run) / "go").touch()
        wait_until(lambda run=run: accepted_jobs(site.faults(run)))
    late_results = site.launch_all({"terminated": (), "hung_up": ()})
    for run, (code, output) in late_results.items():
        (job,) = accepted_jobs(site.faults(run))
        assert code == 2
        assert f"launch 1 of {run} was submitted as job {job} after all" in output
        assert site.manifest(run).job_id == job
