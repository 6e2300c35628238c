"""The links to come: submitted, kept off nodes that failed, and cancelled where the chain ends."""

import os
import time
from typing import Dict, List, Optional, Sequence

from slipway.common.files import RECORD_LIMIT, to_printable
from slipway.common.node import marks
from slipway.common.node.excluded import ExcludedNode, append_excluded, parse_exclude_file, read_excluded
from slipway.common.node.marks import ChainEnd
from slipway.supervisor.dependent_stages import name_script
from slipway.supervisor.job import Job
from slipway.supervisor.slurm import Slurm, run_limited, submitted_id

_SUBMISSION_ATTEMPTS = 3
# For the team's file of nodes to avoid.
_READ_SECONDS = 10.0


class LaterLinks:
    """The links after this one."""

    def __init__(self, job: Job, slurm: Slurm) -> None:
        self._job, self._slurm = job, slurm
        self._settings, self._chain = job.settings, job.settings.chain
        self._next_job: Optional[str] = None
        self._shared_answers = True
        self._known: Dict[str, bool] = {}  # names of the team's file: whether they are nodes of the cluster

    def next_job(self) -> Optional[str]:
        """Return the job of the next link, if there is one."""
        claimed = marks.job_of(self._job.directory, self._job.link + 1)
        # Where there is no room for a claim the link itself knows whom it has submitted.
        return claimed or self._next_job

    def may_exist(self) -> bool:
        """Return False if there is certainly no next link: its submission may have lost all answers."""
        following = self._job.link + 1
        if self._chain.links < following:
            return False
        if self.next_job():
            return True
        queued = self._slurm.queued_jobs(self._settings.tag)
        lost = (queued or {}).get(following)
        if lost is not None:
            self._next_job = lost.job_id
            marks.claim(self._job.directory, lost.job_id, following)
        return queued is None or lost is not None

    def submit_next(self) -> bool:
        """Submit the next link, once; where the answer is lost, ask the queue."""
        job, following = self._job, self._job.link + 1
        if os.path.lexists(os.path.join(job.marks, marks.CHAIN_ENDED)):  # somebody has ended it meanwhile
            return True
        dependency = "--dependency=afterany:" + job.environment.get("SLURM_JOB_ID", "")
        flags = [dependency + (",singleton" if self._chain.singleton else ""), "--kill-on-invalid-dep=yes"]
        script = name_script(self._settings.script, self._settings.tag, following)
        avoided = ",".join(self.list_avoided())
        for attempt in range(1, _SUBMISSION_ATTEMPTS + 1):
            arguments = list(flags)
            if avoided:
                arguments.append("--exclude=" + avoided)  # in place of the header's
            if self._chain.begin:
                arguments.append("--begin=now")  # the header's was for the first
            answer = self._slurm.submit(script, [str(following), self._settings.tag], arguments)
            job_id = submitted_id(answer) or self._slurm.find_submitted(following)
            if job_id:
                self._next_job = job_id
                marks.claim(job.directory, job_id, following)
                place = f"link {following} of at most {self._chain.links}"
                job.say(f"{place} is job {job_id}, which waits for the end of this one")
                return True
            job.say(f"link {following} could not be submitted: {to_printable(answer.last_line)}")
            avoided = self._chain.exclude  # a node that has left the cluster since is no node to Slurm
            if attempt < _SUBMISSION_ATTEMPTS:
                time.sleep(attempt)
        return False

    def exclude(self, nodes: Sequence[str], why: str, failed_under: str) -> None:
        """Keep later jobs of this run off nodes for a while, if Slurm can do without them."""
        job, names = self._job, ",".join(nodes)
        if self._chain.exclude_seconds <= 0 or not names:
            return
        answer = self._slurm.test_only(",".join([*self.list_avoided(), names]))
        if answer.code != 0:
            reason = f"Slurm may be unable to run without it: {to_printable(answer.last_line)}"
            job.say(f"does not exclude {names}: {reason}")
            return
        until = int(time.time()) + self._chain.exclude_seconds
        try:
            append_excluded(
                self._settings.run_dir, [ExcludedNode(node, until, failed_under, why) for node in nodes]
            )
        except OSError as error:
            job.say(f"does not exclude {names}: excluded_nodes.tsv could not be written: {error}")
            return
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
        job.say(f"excludes {names} until {moment}: {why}")
        later = self._jobs()
        if later and not self._slurm.update_excluded(later, ",".join(self.list_avoided())):
            job.say(f"job {','.join(later)} may run on {names} all the same: Slurm did not take the change")

    def end_chain(self, why: str) -> None:
        """Keep later links from doing anything, and cancel those that wait; the first end is on record."""
        job = self._job
        if self._chain.links <= 1:
            return
        try:
            marks.end_chain(job.directory, ChainEnd("job " + job.claimant, why))
        except OSError:
            job.say(f"could not leave the mark {job.marks}/{marks.CHAIN_ENDED}")
        later = self._jobs()
        if not later and self._chain.from_job:
            lost = self._slurm.find_submitted(job.link + 1)
            later = [lost] if lost else []
        if later and not self._slurm.cancel(later):
            job.say("job {} leaves by itself when it begins".format(" ".join(later)))

    def abandon(self) -> None:
        """Cancel the later links of a launch that is no longer there."""
        queued = self._slurm.queued_jobs(self._settings.tag) if self._chain.links > 1 else None
        later = [job.job_id for link, job in (queued or {}).items() if link > self._job.link]
        if later:
            self._slurm.cancel(later)

    def list_avoided(self) -> List[str]:
        """Return the nodes to avoid: the user's own, those that failed under this run, and the team's."""
        names = [self._chain.exclude] if self._chain.exclude else []
        failed = [entry.node for entry in read_excluded(self._settings.run_dir, time.time())]
        return names + failed + [name for name in self._list_shared() if name not in failed]

    def _list_shared(self) -> List[str]:
        """Return the nodes of the team's file that the cluster has: Slurm refuses a job for other names."""
        path = self._chain.exclude_file
        if not path or not self._shared_answers:
            return []
        # A file server that is gone holds whoever reads: this process must not wait for it, nor ask twice.
        answer = run_limited(["head", f"--bytes={RECORD_LIMIT}", "--", path], _READ_SECONDS)
        if answer.code != 0:
            self._shared_answers = answer.code is not None
            self._job.say(f"resilience.exclude_file cannot be read: {to_printable(answer.last_line)}")
            return []
        names = [entry.node for entry in parse_exclude_file(answer.output, time.time())]
        unseen = [name for name in names if name not in self._known]
        if unseen:
            known = self._slurm.known_nodes(unseen)
            self._known.update((name, name in known) for name in unseen)
            if len(known) < len(unseen):
                passed_over = ",".join(name for name in unseen if name not in known)
                self._job.say(f"{path}: {passed_over} passed over, as this cluster has no such node")
        return [name for name in names if self._known[name]]

    def _jobs(self) -> List[str]:
        """Return the jobs of the links to come: of one, unless all were submitted at launch."""
        claimed = marks.later_jobs(self._job.directory, (self._settings.tag,))
        later = {link: job for link, job in claimed.items() if link > self._job.link}
        if self._next_job:
            later.setdefault(self._job.link + 1, self._next_job)
        return [later[link] for link in sorted(later)]
