"""Points of sweeps: each is a job to us, and a task of an array to Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from launcher.schedulers.arrays import expand
from launcher.schedulers.base import Ticket
from launcher.schedulers.records import Record, by_job


def by_ticket(tickets: Sequence[Ticket], records: Iterable[Record]) -> Mapping[Ticket, Sequence[Record]]:
    """The records that each ticket is about.

    Of a task these are its own; where there is none, one of another task tells that the array is known.
    """
    found = by_job(records)
    # Slurm tells those that wait together in one record: each array is taken apart once.
    apart = {job: _by_task(found.get(job, ())) for job in {t.of for t in tickets if t.task is not None}}
    return {ticket: _of(ticket, found, apart) for ticket in tickets}


def by_id(job_ids: Sequence[str], records: Iterable[Record]) -> dict[str, Sequence[Record]]:
    """The records of each job, of an array's task those that are about it; nothing where there are none."""
    found = by_job(records)
    tasks = {job_id: job_id.partition("_") for job_id in job_ids}
    apart = {of: _by_task(found.get(of, ())) for of, _, task in tasks.values() if task}
    return {
        job_id: apart[of].get(int(task), ()) if task else found.get(of, ())
        for job_id, (of, _, task) in tasks.items()
    }


def _of(
    ticket: Ticket, found: Mapping[str, Sequence[Record]], apart: Mapping[str, Mapping[int, list[Record]]]
) -> Sequence[Record]:
    whole = found.get(ticket.of, ())
    return whole if ticket.task is None else apart[ticket.of].get(ticket.task) or whole[:1]


def _by_task(records: Sequence[Record]) -> dict[int, list[Record]]:
    apart: dict[int, list[Record]] = {}
    for record in records:
        for number in expand(record.task or ""):
            apart.setdefault(number, []).append(replace(record, job_id=f"{record.of}_{number}"))
    return apart
