"""Slurm: submission and cancelling through submitit, states through its own commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from launcher.errors import UserError
from launcher.schedulers import states
from launcher.schedulers.base import Intent, JobStatus, Ticket
from launcher.schedulers.commands import (
    WITHOUT_SLURM,
    Unreachable,
    ask,
    clean_environment,
    describe_leaks,
    leaked_variables,
    words,
)

# What `sbatch --test-only` rejects and sbatch itself queues: nodes that are drained, busy or not enough now.
_WOULD_WAIT = (
    "Requested node configuration is not available",
    "Requested nodes are busy",
    "Required node not available",
    "Requested partition configuration not available now",
    "Requested reservation is in use",
)


# Slurm's commands are there, and no slurm.conf is.
_NO_CONFIGURATION = ("resolve_ctls_from_dns_srv", "fetch_config: DNS SRV lookup failed")


class SlurmScheduler:
    """The Slurm that `slurm_conf` describes, or the site's own where it is ``None``."""

    def __init__(self, slurm_conf: str | None = None) -> None:
        self._slurm_conf = slurm_conf
        self._environment = clean_environment(slurm_conf)

    def validate(self, script_text: str) -> str | None:
        """Let sbatch judge the script without submitting it; see `Scheduler.validate`."""
        self._require_configuration()
        answer = ask(["sbatch", "--test-only"], self._environment, stdin=script_text)
        if answer.code == 0:
            return None
        told = words(answer.stderr)
        if any(reason in answer.stderr for reason in _WOULD_WAIT):
            return f"as the cluster is now, the job would wait: {told}"
        if any(sign in answer.stderr for sign in _NO_CONFIGURATION):
            raise Unreachable(
                f"there is no Slurm that this machine belongs to: {told}",
                hint=f"SLURM_CONF names the configuration of one that is elsewhere; {WITHOUT_SLURM}",
            )
        raise UserError(f"Slurm would refuse this job: {told}")

    def ignored_environment(self) -> list[str]:
        """Say which variables sbatch would have read; see `Scheduler.ignored_environment`."""
        return describe_leaks(os.environ)

    def submit(self, script: Path, tag: str) -> str:
        """Submit a script; see `Scheduler.submit`."""
        # Imported late: a dry run needs no submitit.
        from launcher.schedulers.submission import submit_script

        unset = leaked_variables(os.environ)
        return submit_script(script, tag, unset=unset, slurm_conf=self._slurm_conf)

    def find(self, intent: Intent) -> str | None:
        """Look for a job whose script was given the tag, in the queue and then in the accounting."""
        self._require_configuration()
        queue = ["squeue", "--noheader", "--states=all", f"--user={intent.user}"]
        answer = ask([*queue, f"--Format={states.COMMAND_FORMAT}"], self._environment)
        if answer.code != 0:
            raise UserError(f"squeue failed: {words(answer.stderr)}")
        found = states.job_with_argument(answer.stdout, intent.tag)
        return found or self._find_accounted(intent)

    def _find_accounted(self, intent: Intent) -> str | None:
        options = ["--noheader", "--parsable2", "--allocations", f"--user={intent.user}"]
        # sacct reads a time in this machine's zone: the day before is early enough in every zone.
        since = datetime.fromisoformat(intent.since) - timedelta(days=1)
        options += [f"--starttime={since:%Y-%m-%d}", f"--format={states.SUBMIT_LINE_FORMAT}"]
        answer = ask(["sacct", *options], self._environment)
        return states.job_with_argument(answer.stdout, intent.tag) if answer.code == 0 else None

    def statuses(self, tickets: Iterable[Ticket]) -> Mapping[str, JobStatus]:
        """Ask squeue once and, for jobs that it no longer knows as alive, sacct once."""
        asked = list(tickets)
        self._require_configuration()
        live = self._squeue(asked)
        ended = [t for t in asked if t.job_id not in live or live[t.job_id].state.is_final]
        accounted = self._sacct(ended) if ended else {}
        return {t.job_id: states.resolve(t, live.get(t.job_id), accounted.get(t.job_id)) for t in asked}

    def cancel(self, job_id: str) -> None:
        answer = ask(["scancel", job_id], self._environment)
        if answer.code != 0:
            raise UserError(f"Slurm did not cancel job {job_id}: {words(answer.stderr)}")

    def _squeue(self, tickets: list[Ticket]) -> Mapping[str, JobStatus]:
        jobs = ",".join(ticket.job_id for ticket in tickets)
        command = [
            "squeue",
            "--noheader",
            "--states=all",
            f"--Format={states.SQUEUE_FORMAT}",
            f"--jobs={jobs}",
        ]
        answer = ask(command, self._environment)
        # Asked for one job alone that it has forgotten, squeue calls the id invalid; that is no failure.
        if answer.code != 0 and "Invalid job id" not in answer.stderr:
            raise UserError(f"squeue failed: {words(answer.stderr)}")
        return states.parse_squeue(answer.stdout)

    def _sacct(self, tickets: list[Ticket]) -> Mapping[str, JobStatus]:
        jobs = ",".join(ticket.job_id for ticket in tickets)
        options = ["--noheader", "--parsable2", "--allocations", f"--format={states.SACCT_FORMAT}"]
        try:
            answer = ask(["sacct", *options, f"--jobs={jobs}"], self._environment)
        except UserError:
            return {}  # what squeue told of the other jobs is still good
        # Without accounting sacct exits 1; the job's own marks are what is left to go by.
        return states.parse_sacct(answer.stdout) if answer.code == 0 else {}

    def _require_configuration(self) -> None:
        if self._slurm_conf is not None and not Path(self._slurm_conf).exists():
            raise Unreachable(
                f"cluster.slurm_conf={self._slurm_conf!r}: no such file",
                hint="for cluster=sandbox, boot it first: slipway sandbox up",
            )
