"""An sbatch whose answer is lost: never a second job, and never none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.runs.faulty_sbatch import LEADING_NOWHERE, TOLD_AT_ONCE, accepted, calls
from tests.runs.faulty_site import Site, faulty_site, outcomes, wait_until


@pytest.fixture
def site(tmp_path: Path, plain_sandbox: Sandbox) -> Iterator[Site]:
    """Without accounting: what Slurm tells is all there is."""
    with faulty_site(tmp_path, plain_sandbox) as one:
        yield one


def random_faults() -> dict[str, Sequence[str]]:
    """Sequences of faults, always the same."""
    chance = random.Random(6)
    nothing_yet = ["unreachable", "before", "late", "very_late"]
    return {
        f"random{n}": [
            *chance.choices(nothing_yet, k=chance.randint(1, 2)),
            chance.choice(sorted(TOLD_AT_ONCE)),
        ]
        for n in range(6)
    }


def all_are_over(site: Site, runs: dict[str, Sequence[str]]) -> dict[str, list[str]] | None:
    """All jobs that Slurm took for each run, once all that can come have come and ended."""
    states = {job: state for job, (_, state) in site.queue().items()}
    taken = {run: accepted(site.faults(run)) for run in runs}
    for run, faults in runs.items():
        submissions = [*faults, *["fine"] * calls(site.faults(run))][: calls(site.faults(run))]
        if len(taken[run]) < sum(fault not in LEADING_NOWHERE for fault in submissions):
            return None
    over = all(states.get(job) in ("COMPLETED", "CANCELLED") for jobs in taken.values() for job in jobs)
    return taken if over else None


@pytest.mark.slurm
def test_the_payload_runs_once_whatever_happens_to_the_answers(site: Site) -> None:
    single = {fault: [fault] for fault in {*TOLD_AT_ONCE, "unreachable", "before", "late", "very_late"}}
    runs: dict[str, Sequence[str]] = {**single, "two": ["overtaken", "overtaking"], **random_faults()}
    told = site.launch_all(runs)
    assert {run: code for run, (code, _) in told.items() if code} == {}, "each got through in the end"
    for run, (_, output) in told.items():
        if runs[run][0] not in ("fine", "told"):
            assert "Slurm did not answer: " in output, run
            assert "looking for the job by its tag" in output, run

    taken = wait_until(lambda: all_are_over(site, runs))
    assert {len(taken[run]) for run in ("late", "very_late", "two")} == {2}, "doubled, as it was meant to be"
    assert {run: len(site.ran(run)) for run in runs} == dict.fromkeys(runs, 1)
    seen = site.status()
    assert {run: (row["state"], row["job_id"]) for run, row in seen.items()} == {
        run: ("COMPLETED", site.ran(run)[0]) for run in runs
    }
    assert {run: site.manifest(run).job_id for run in runs} == {run: site.ran(run)[0] for run in runs}


@pytest.mark.slurm
def test_oldest_of_two_waiting_jobs_is_kept(site: Site) -> None:
    process = site.launch("two", "cluster.partition=cloud", faults=["overtaken", "overtaking"])
    code, _, err = outcomes(process)
    assert code == 0, err
    older, younger = accepted(site.faults("two"))
    assert f"job {younger} is a second one of the same launch: cancelling it" in err
    assert site.manifest("two").job_id == older
    queue = site.queue()
    assert (queue[older][1], queue[younger][1]) == ("PENDING", "CANCELLED")
    assert site.status()["two"]["job_id"] == older


def _submit_late(site: Site, run: str) -> str:
    """The controller takes a submission of long ago; the id of the job."""
    manifest = site.manifest(run)
    script = site.directory / "results" / run / "launches" / "1" / f"faulty-{run}_submission.sh"
    environment = {name: value for name, value in site.environment.items() if name != "PATH"}
    command = ["sbatch", "--parsable", script, manifest.tag]
    told = subprocess.run(
        command,
        env=environment | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


@pytest.mark.slurm
def test_unknown_submission_is_settled_by_the_next_launch(site: Site) -> None:
    """Unreachable for as long as the launcher waits; later one submission is a job, the other is not."""
    runs = {"taken": ["for_ever"], "never": ["for_ever"]}
    for code, output in site.launch_all(runs, seconds=2).values():
        assert code == 3, output
        assert "Unable to contact slurm controller" in output
        assert "whether launch 1 became a job is not known: slipway status results/" in output
    for run in runs:
        manifest = site.manifest(run)
        assert (manifest.job_id, manifest.error) == (None, None)
        assert "Unable to contact slurm controller" in (manifest.unanswered or "")
    job = _submit_late(site, "taken")
    again = site.launch_all(dict.fromkeys(runs, ()))
    assert again["never"][0] == 0, again
    assert again["taken"][0] == 2
    assert f"launch 1 of taken was submitted as job {job} after all" in again["taken"][1]
    adopted = site.manifest("taken")
    assert (adopted.job_id, adopted.error, adopted.unanswered) == (job, None, None)
    run_dir = site.directory / "results" / "taken"
    assert (run_dir / "launcher.log").read_text() == f"Submitted batch job {job}\n"
    assert (run_dir / f"log-faulty-taken_{job}.out").is_symlink()
    given_up = site.manifest("never")
    assert given_up.job_id is None
    assert "Unable to contact slurm controller" in (given_up.error or "")
    # Told once: the user who launches once more means it.
    assert site.launch_all({"taken": ()})["taken"][0] == 0
    # A launch that was given up does nothing, even if the controller takes it in the end.
    ghost = _submit_late(site, "never")
    wait_until(lambda: site.queue()[ghost][1] == "COMPLETED")
    known = {"taken": [job, site.manifest("taken", 2).job_id], "never": [site.manifest("never", 2).job_id]}
    wait_until(lambda: {run: sorted(site.ran(run)) for run in runs} == {r: sorted(known[r]) for r in runs})
    log = site.directory / f"results/never/launches/1/log-faulty-never_{ghost}.out"
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
    too_early = site.launch_all(dict.fromkeys(signals, ()))
    assert too_early["interrupted"][0] == 0, "there was no job, and none can come"
    assert "interrupted" in (site.manifest("interrupted").error or "")
    for run in ("terminated", "hung_up"):
        assert too_early[run][0] == 2
        assert "still submitting it" in too_early[run][1]
        (site.faults(run) / "go").touch()
        wait_until(lambda run=run: accepted(site.faults(run)))
    after = site.launch_all({"terminated": (), "hung_up": ()})
    for run, (code, output) in after.items():
        (job,) = accepted(site.faults(run))
        assert code == 2
        assert f"launch 1 of {run} was submitted as job {job} after all" in output
        assert site.manifest(run).job_id == job
