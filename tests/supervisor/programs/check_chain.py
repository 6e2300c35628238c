"""Checks of the links of a chain with the Python of a node, and a fake Slurm."""

import json
import os
import tempfile
import unittest
import unittest.mock
from typing import Any, Dict, List, Optional, Sequence

from slipway.common.node import checkpoints, marks
from slipway.common.node.settings import ChainSettings, Settings
from slipway.supervisor import nemo_checkpoints
from slipway.supervisor.job import Job, Leave
from slipway.supervisor.link import Link
from slipway.supervisor.slurm import Answer, JobRecord, Slurm

TAG = "0123abcd"


class PlayedSlurm(Slurm):
    """A fake Slurm that numbers its jobs; all of its nodes but n2 are up."""

    def __init__(self, job: Job, record: Optional[JobRecord] = None) -> None:
        super().__init__(job)
        self.record, self.calls = record, []  # type: Optional[JobRecord], List[List[str]]

    def show_job(self, job_id: str) -> Optional[JobRecord]:
        return self.record

    def down_nodes(self, hosts: Sequence[str]) -> List[str]:
        return [host for host in hosts if host == "n2"]

    def find_submitted(self, link: int) -> Optional[str]:
        return None

    def _run(self, command: Sequence[str], seconds: float, as_submitted: bool = False) -> Answer:
        self.calls.append([str(word) for word in command])
        return Answer(0, f"{int(self._job.id) + 1}\n", "")


class Chain(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        self.launch = os.path.join(self.root, "launches", "1")
        os.makedirs(os.path.join(self.launch, marks.MARKS))
        self.script = os.path.join(self.launch, "x_submission.sh")
        with open(self.script, "w") as stream:
            stream.write("#!/bin/bash\n")
        self.messages = []  # type: List[str]

    def link(self, number: int, record: Optional[JobRecord] = None) -> "tuple[Link, PlayedSlurm]":
        settings = Settings(
            run="x",
            launch=1,
            tag=TAG,
            run_dir=self.root,
            script=self.script,
            log=os.path.join(self.root, "log-x_"),
            scheduler="slurm",
            engine="megatron",
            checkpoints=os.path.join(self.root, "checkpoints"),
            chain=ChainSettings(links=9, max_failures=2, singleton=True),
        )
        job_id = str(16 + number)
        messages = self.messages

        class QuietJob(Job):
            def say(self, message: str, stream: Any = None) -> None:
                messages.append(message)

        environment = {"SLURM_JOB_ID": job_id, "PATH": os.environ.get("PATH", "")}
        attempt = job_id + ".0"
        job = QuietJob(job_id, attempt, job_id, number, False, self.launch, settings, 0, environment)
        marks.claim(self.launch, job_id, number)
        slurm = PlayedSlurm(job, record)
        return Link(job, slurm), slurm

    def save(self, step: int, serial: int) -> None:
        path = os.path.join(self.root, "checkpoints", f"step={step}-{serial}")
        os.makedirs(path)
        with open(os.path.join(path, checkpoints.MARKER), "w") as stream:
            json.dump({"step": step, "serial": serial}, stream)

    def end_mark(self, number: int) -> Dict[str, Any]:
        with open(os.path.join(self.launch, marks.MARKS, f"{16 + number}.0.ended.json")) as stream:
            return dict(json.load(stream))

    def test_a_training_that_went_back_goes_on_and_then_gets_nowhere(self) -> None:
        self.save(1000, 1)
        for number, step in enumerate((400, 600), start=1):
            link, slurm = self.link(number)
            link.begin()
            (submission,) = (call for call in slurm.calls if "--parsable" in call)
            self.assertIn(f"--dependency=afterany:{16 + number},singleton", submission)
            self.save(step, number + 1)
            link.end(1, ["n1", "n2"], None)
            self.assertEqual(self.end_mark(number)["verdict"], "continue", self.messages)
        for number in (3, 4):
            link, slurm = self.link(number)
            link.begin()
            link.end(1, ["n1", "n2"], None)
        self.assertEqual(self.end_mark(4)["verdict"], "stop")
        self.assertEqual(slurm.calls[-1], ["scancel", "21"])
        with self.assertRaises(Leave) as raised:
            self.link(5)[0].begin()
        self.assertEqual(raised.exception.code, 1)
        self.assertEqual(marks.link_jobs(self.launch), ["17", "18", "19", "20", "21"])

    def test_the_next_link_judges_one_whose_node_died(self) -> None:
        link, _ = self.link(1)
        link.begin()
        fields = dict(link.fields(), nodes="n1,n2", started=1)
        marks.leave(self.launch, "17.0", marks.STARTED, TAG, fields)
        link, slurm = self.link(2, JobRecord("NODE_FAIL"))
        link.begin()
        mark = self.end_mark(1)
        self.assertEqual((mark["state"], mark["verdict"]), ("NODE_FAIL", "exclude"), self.messages)
        self.assertEqual((mark["excluded"], mark["judged_by"]), ("n2", "job 18"))
        (submission,) = (call for call in slurm.calls if "--parsable" in call)
        self.assertIn("--exclude=n2", submission)

    def test_the_next_link_judges_one_that_died_while_its_tasks_were_to_start_again(self) -> None:
        ended = {"exit_code": 16, "ended": 2}
        for started, failures, nodes in (({}, 1, "n1,n2"), ({"started": 3, "nodes": "n2,n3"}, 2, "n2,n3")):
            self.setUp()
            link, _ = self.link(1)
            link.begin()
            marks.leave(
                self.launch, "17.0", marks.STARTED, TAG, dict(link.fields(), nodes="n1,n2", started=1)
            )
            again = dict(ended, **dict(link.fields(), failures=1, **started) if started else {})
            marks.leave(self.launch, "17.0", f"{marks.RESTARTED}-1", TAG, again)
            with open(os.path.join(self.root, "log-x_17.out"), "w") as stream:
                stream.write("CUDA out of memory\n")
            link, _ = self.link(2, JobRecord("NODE_FAIL" if started else "FAILED"))
            if started:
                with self.assertRaises(Leave):  # two failures of two
                    link.begin()
            else:
                link.begin()
            mark, (attempt,) = self.end_mark(1), marks.read_attempts(self.launch)
            self.assertEqual((attempt.nodes, link.fields()["failures"]), (nodes, failures), mark)
            rule, code = ("node_failed", None) if started else ("gpu_out_of_memory", 16)
            self.assertEqual((mark["rule"], mark.get("exit_code")), (rule, code), self.messages)

    def test_a_requeue_does_not_end_the_chain(self) -> None:
        link, _ = self.link(1, JobRecord("COMPLETING", "None", "None", True, 1))
        link.begin()
        link.end(143, ["n1"], "TERM")
        self.assertEqual(self.end_mark(1)["verdict"], "continue", self.messages)
        self.assertIsNone(marks.chain_end(self.launch))

    def test_an_unreadable_checkpoint_ends_no_chain_and_forgives_nothing(self) -> None:
        for number in (1, 2):
            link, slurm = self.link(number)
            with unittest.mock.patch.object(checkpoints, "progress", side_effect=RuntimeError("a bug")):
                link.begin()
            self.assertTrue([call for call in slurm.calls if "--parsable" in call], self.messages)
            self.save(number, number)
            link.end(1, ["n1", "n2"], None)
        self.assertEqual(self.end_mark(2)["verdict"], "stop", self.messages)

    def test_remains_of_nemo_are_tidied(self) -> None:
        directory = os.path.join(self.root, "nemo")
        for name in ("x--step=2-last", "x--step=4"):
            os.makedirs(os.path.join(directory, name, "weights"))
            with open(os.path.join(directory, name, "weights", "0.0"), "w") as stream:
                stream.write("0")
        os.utime(os.path.join(directory, "x--step=2-last"), (1, 1))
        nemo_checkpoints.tidy(directory, "7.0", lambda message, stream=None: None)
        self.assertEqual(sorted(os.listdir(directory)), ["x--step=4", "x--step=4-last"])
        self.assertEqual(os.listdir(directory + "-set-aside"), ["7.0"])
