"""Checks of the judge and its evidence, with the Python of a node."""

import json
import os
import shutil
import tempfile
import unittest

from slipway.common.node.evidence import TAIL_BYTES, evidence, find_first_failure, find_hosts, find_last_step
from slipway.common.node.judging import RULES, Facts, judge
from slipway.common.node.slurm_states import is_ending, state_at_end


class Evidence(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self.log = self.directory + "/log.out"

    def test_end_of_a_long_log_is_read_byte_for_byte(self) -> None:
        with open(self.log, "wb") as stream:
            stream.truncate(TAIL_BYTES << 10)
            stream.seek(0, 2)
            stream.write(b"x" * TAIL_BYTES + b"\xff\xfe GPU is lost\rstep 7/9 |\n")
            # A hole is no log: the file's first blocks are there.
            for block in range(0, TAIL_BYTES << 10, 1 << 18):
                stream.seek(block)
                stream.write(b"x")
        lines = evidence([self.log, self.directory + "/missing"], self.directory + "/nowhere")
        self.assertEqual(lines[-3:], ["step 7/9 |", "", ""])
        self.assertEqual(judge(Facts(1), lines, ["n1"]).rule.name, "gpu_lost")

    def test_both_ends_of_a_long_line_are_matched(self) -> None:
        with open(self.log, "w") as stream:
            stream.write("srun: error: Node failure on n1" + "Got async event" * 9999 + "GPU is lost")
        (line,) = evidence([self.log])
        self.assertLess(len(line), 5000)
        self.assertTrue(line.startswith("srun: error: Node failure on n1Got"))
        self.assertTrue(line.endswith("eventGPU is lost"))

    def test_reports_of_ranks_come_first_in_order_of_time(self) -> None:
        for rank, moment in ((0, 20.5), (1, 10.0), (2, 3.0)):
            content = {"time": moment, "rank": rank, "host": f"n{rank}", "error": "e", "log": None}
            with open(f"{self.directory}/globalrank-{rank}.json", "w") as stream:
                json.dump(content, stream)
        with open(self.directory + "/globalrank-9.json", "w") as stream:
            stream.write('{"time": "$(id)"}')
        os.mkfifo(self.directory + "/globalrank-8.json")
        lines = evidence([], self.directory, 5.0)
        self.assertEqual([line[9:14] for line in lines], ["10.0,", "20.5,"])
        self.assertEqual(find_first_failure(lines, ["n0", "n1"], 1), (1, "n1"))

    def test_the_first_task_that_failed_is_named_by_srun(self) -> None:
        lines = [
            "said: srun: error: n9: task 9",
            "srun: error: n2: tasks 8-9: Exited",
            "srun: error: n1: task 0: x",
        ]
        self.assertEqual(find_first_failure(lines, ["n1", "n2"], 8), (8, "n2"))
        self.assertEqual(find_first_failure(["nothing"], ["n1"], 8), (None, None))

    def test_last_step_is_read_from_progress_lines(self) -> None:
        for line, step in (
            ("0: step 8/9 | loss 1", 8),
            ("step 0012/99 | loss 1", 12),
            (" 10%| 3/30 [00:01] 13%| 4/30 [00:02<", 4),
            (" iteration      100/     500 |", 100),
            ("my step 5/9 |", None),
        ):
            self.assertEqual(find_last_step(["step 1/9 |", line] if step else [line]), step, line)
        self.assertIsNone(find_last_step([]))

    def test_no_node_is_named_but_the_jobs_own(self) -> None:
        self.assertEqual(find_hosts("g011 xg01 g01-ib0 g1: rank 3", ["g01", "g1", "g.1"], 2), ("g1",))
        self.assertEqual(find_hosts("[rank3]: lost", ["g01", "g02"], 2), ("g02",))
        self.assertEqual(find_hosts("[rank4]: lost", ["g01", "g02"], 2), ())
        self.assertEqual(find_hosts("gx1: lost", ["g.1"], 2), ())


class Judging(unittest.TestCase):
    def test_each_name_and_each_column_is_a_text(self) -> None:
        self.assertTrue(
            all(isinstance(text, str) and text for rule in RULES for text in (*rule[:4], rule.nodes))
        )

    def test_requeued_or_cancelled_is_not_known_at_the_end(self) -> None:
        ended = Facts(143, "COMPLETING", "None", "None", save="USR1")
        judgements = [judge(ended._replace(requeue=requeue), []) for requeue in (True, False, None)]
        self.assertEqual([judgement.verdict for judgement in judgements], ["continue", "stop", "stop"])

    def test_hostile_words_of_slurm_stay_words(self) -> None:
        self.assertEqual(Facts(state="A B=C\nd").line.split()[1], "state=A_B=C")


class States(unittest.TestCase):
    def test_states_tell_if_slurm_ends_a_job(self) -> None:
        for word, ending in (
            ("RUNNING", False), ("SUSPENDED", False), ("COMPLETING", True), ("CANCELLED by 0", True),
            ("REQUEUED", True), ("PENDING", True), ("COMPLETED", None), ("", None), ("slurm is down", None),
        ):  # fmt: skip
            self.assertEqual(is_ending(word), ending, word)

    def test_final_state_of_an_ending_job_is_known(self) -> None:
        for words, state in (
            (("COMPLETING", "TimeLimit", "None"), "TIMEOUT"),
            (("COMPLETING", "NodeDown", ""), "NODE_FAIL"),
            (("COMPLETING", "None", "None"), "CANCELLED"),
            (("COMPLETING", "None", "None", True), None),
            (("COMPLETING", "None", "2026-01-01T00:00:00", True), "PREEMPTED"),
            (("RUNNING", "None", "2026-01-01T00:00:00"), "PREEMPTED"),
            (("RUNNING", "None", "None"), None),
            (("", "", ""), None),
            (("CANCELLED by 1000", "None", "None"), "CANCELLED"),
        ):
            self.assertEqual(state_at_end(*words), state, words)
