"""Checks of files that the supervisor writes and reads again, with the Python of a node."""

import errno
import json
import os
import pathlib
import resource
import shutil
import signal
import tempfile
import unittest
from unittest import mock

from slipway.common.files import (
    UnfitFile,
    append_line,
    open_regular,
    read_int,
    read_json,
    read_text,
    write_atomic,
    write_once,
)
from slipway.common.node import marks
from slipway.common.node.excluded import ExcludedNode, append_excluded, read_excluded
from slipway.common.node.json_lines import read_new_records
from slipway.common.node.settings import ChainSettings, ContainerSettings, Settings, from_json, to_json

TAG = "0123abcd"


class InDirectory(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def names(self) -> "list":
        return sorted(os.listdir(self.directory))


class Files(InDirectory):
    def test_a_file_is_written_whole_and_with_the_users_umask(self) -> None:
        before = os.umask(0o027)
        try:
            write_atomic(self.path("a"), "one\n")
            write_atomic(pathlib.Path(self.path("a")), "b\udcff\n", 0o777)
        finally:
            os.umask(before)
        with open(self.path("a"), "rb") as stream:
            self.assertEqual(stream.read(), b"b\xff\n")
        self.assertEqual(os.stat(self.path("a")).st_mode & 0o777, 0o750)
        self.assertEqual(self.names(), ["a"])

    def test_first_of_two_writers_wins(self) -> None:
        self.assertTrue(write_once(self.path("a"), "first\n"))
        self.assertFalse(write_once(self.path("a"), "second\n"))
        self.assertEqual(read_text(self.path("a")), "first\n")
        self.assertEqual(self.names(), ["a"])

    def test_first_of_two_writers_wins_without_hard_links(self) -> None:
        link, os.link = os.link, refuse
        try:
            self.assertTrue(write_once(self.path("a"), "first\n"))
            self.assertFalse(write_once(self.path("a"), "second\n"))
        finally:
            os.link = link
        self.assertEqual(read_text(self.path("a")), "first\n")
        self.assertEqual(self.names(), ["a"])

    def test_special_file_is_missing(self) -> None:
        os.mkfifo(self.path("fifo"))
        for path in (self.path("fifo"), self.directory, self.path("null\0"), "/dev/zero"):
            with self.assertRaises(UnfitFile):
                open_regular(path)

    def test_lines_are_appended(self) -> None:
        for word in ("one", "two"):
            append_line(self.path("a"), word)
        self.assertEqual(read_text(self.path("a")), "one\ntwo\n")

    def test_json_is_an_object_of_numbers_in_range(self) -> None:
        write_atomic(self.path("a"), '{"a": 1e999, "b": true, "c": 3}')
        content = read_json(self.path("a"))
        self.assertEqual([read_int(content[key]) for key in "abc"], [None, None, 3])
        for text in ("[1]", "[" * 100000, "{"):
            write_atomic(self.path("a"), text)
            with self.assertRaises(ValueError):
                read_json(self.path("a"))


class Marks(InDirectory):
    def setUp(self) -> None:
        InDirectory.setUp(self)
        os.mkdir(self.path(marks.MARKS))

    def test_no_mark_is_left_in_another_launch(self) -> None:
        for settings, left in (
            ('{"tag": "other"}', False),
            ("damaged", True),
            (json.dumps({"tag": TAG}), True),
        ):
            write_atomic(self.path("supervisor.json"), settings)
            self.assertEqual(marks.leave(self.directory, "17.0", marks.STARTED, TAG, {"started": 1}), left)
            self.assertEqual(bool(marks.read_attempts(self.directory)), left)

    def test_attempt_is_read_as_it_was_left(self) -> None:
        started = {"started": 1000, "nodes": "n1,n2", "link": 2, "avoids": "", "checkpoint": None}
        self.assertTrue(marks.leave(self.directory, "17.1", marks.STARTED, TAG, started))
        ended = {"exit_code": 75, "ended": 1060, "verdict": "continue", "why": 'a "quoted"\nline'}
        self.assertTrue(marks.leave(self.directory, "17.1", marks.ENDED, TAG, ended))
        self.assertFalse(marks.leave(self.directory, "17.1", marks.ENDED, TAG, {}, once=True))
        (attempt,) = marks.read_attempts(self.directory)
        self.assertEqual((attempt.stem, attempt.tag, attempt.link, attempt.started), ("17.1", TAG, 2, 1000.0))
        self.assertEqual((attempt.exit_code, attempt.why, attempt.avoids), (75, ended["why"], None))
        mark = read_text(os.path.join(self.directory, "marks", "17.1.started.json"))
        self.assertTrue(mark.startswith('{"job_id": "17", "tag": "0123abcd", "started": 1000, '), mark)
        self.assertNotIn("checkpoint", mark)
        self.assertEqual(marks.read_attempts(self.directory, "18"), [])
        self.assertEqual(marks.read_attempts(self.directory, tags=("another",)), [])

    def test_a_job_goes_on_between_two_starts_of_its_tasks(self) -> None:
        end = {"ended": 1100, "exit_code": 137, "rule": "killed"}
        for name, fields in (
            (marks.STARTED, {"started": 1000, "nodes": "n1"}),
            (marks.RESTARTED + "-1", end),
            (marks.RESTARTED + "-1", dict(end, started=1200, nodes="n2")),
        ):
            marks.leave(self.directory, "17.0", name, TAG, fields)
            (attempt,) = marks.read_attempts(self.directory)
            self.assertEqual((attempt.started, attempt.is_over, attempt.rule), (1000.0, False, None))
        self.assertEqual((attempt.nodes, attempt.restarts), ("n2", 1))
        ends = [start.ended for start in marks.read_attempts(self.directory, each_start=True)]
        self.assertEqual(ends, [1100.0, None])

    def test_on_a_full_disk_no_mark_is_left_and_the_job_goes_on(self) -> None:
        before = marks.leave(self.directory, "17.0", marks.STARTED, TAG, {"started": 1})
        self.assertTrue(before)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            is_started = marks.leave(self.directory, "17.0", marks.STARTED, TAG, {"started": 2})
            is_ended = marks.leave(self.directory, "17.0", marks.ENDED, TAG, {"ended": 2}, once=True)
            holder = marks.claim(self.directory, "17")
            with self.assertRaises(OSError):
                marks.end_chain(self.directory, marks.ChainEnd("job 17", "done"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        self.assertEqual((is_started, is_ended, holder), (False, False, "17"))
        self.assertEqual([attempt.started for attempt in marks.read_attempts(self.directory)], [1.0])
        self.assertEqual(os.listdir(self.path(marks.MARKS)), ["17.0.started.json"])

    def test_a_launch_directory_that_is_gone_is_not_made_again(self) -> None:
        gone = self.path("gone")
        marks.note_cancelled(gone, "17", "ann")
        self.assertFalse(marks.leave(gone, "17.0", marks.STARTED, TAG, {}))
        self.assertEqual(marks.claim(gone, "17"), "17")
        with self.assertRaises(OSError):
            marks.end_chain(gone, marks.ChainEnd("ann", "cancelled"))
        self.assertFalse(os.path.exists(gone))

    def test_links_are_read_on_over_claims_that_are_missing(self) -> None:
        self.assertEqual(marks.claim(self.directory, "17"), "17")
        self.assertEqual(marks.claim(self.directory, "18"), "17")
        for link, job in ((2, "18"), (4, "20"), (11, "27")):
            marks.claim(self.directory, job, link)
        marks.leave(self.directory, "19.0", marks.STARTED, TAG, {"started": 1, "link": 3})
        marks.leave(self.directory, "99.0", marks.STARTED, "another", {"started": 1, "link": 5})
        write_atomic(os.path.join(self.directory, "marks", "job.6"), "$(touch x)\n")
        self.assertEqual(marks.later_jobs(self.directory, (TAG,)), {2: "18", 3: "19", 4: "20", 11: "27"})
        self.assertEqual(marks.link_jobs(self.directory)[:2], ["17", "18"])

    def test_a_link_on_a_full_disk_is_known_by_an_empty_claim(self) -> None:
        marks.claim(self.directory, "17")
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(marks, "write_once", side_effect=full):
            self.assertEqual(marks.claim(self.directory, "18", 2), "18")
            self.assertEqual(marks.claim(self.directory, "19", 3), "19")
        marks.claim(self.directory, "20", 4)
        self.assertEqual(marks.link_jobs(self.directory), ["17", "18", "19", "20"])

    def test_first_end_of_a_chain_is_on_record(self) -> None:
        self.assertIsNone(marks.chain_end(self.directory))
        self.assertTrue(marks.end_chain(self.directory, marks.ChainEnd("job 17", "all is done", 60)))
        self.assertFalse(marks.end_chain(self.directory, marks.ChainEnd("ann", "cancelled")))
        self.assertEqual(marks.chain_end(self.directory), ("job 17", "all is done", 60.0))

    def test_nodes_are_avoided_for_a_while(self) -> None:
        nodes = [ExcludedNode("n1", 100, "17", "a tab\tand\na line"), ExcludedNode("n2", 50, "17", "x")]
        append_excluded(self.directory, nodes)
        append_line(self.path("excluded_nodes.tsv"), "$(id)\t100\t17\tno node")
        append_line(self.path("excluded_nodes.tsv"), "n3\t10")
        self.assertEqual([node.why for node in read_excluded(self.directory, 60.0)], ["a tab?and?a line"])


class SettingsFile(unittest.TestCase):
    def test_settings_are_read_as_they_were_written(self) -> None:
        chain = ChainSettings(links=3, exclude="n1")
        container = ContainerSettings("/images/a.sqsh", True, name="a")
        settings = Settings(
            "run", 1, TAG, "/r", "/r/s.sh", "/r/log_", "slurm", "megatron",
            host_arguments=("--mpi=none",), chain=chain, container=container,
        )  # fmt: skip
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        write_atomic(directory + "/supervisor.json", to_json(settings))
        content = read_json(directory + "/supervisor.json")
        self.assertEqual(from_json(content), settings)
        for wrong in (dict(content, chains={}), {"run": "x"}, dict(content, chain=3)):
            with self.assertRaises(ValueError):
                from_json(wrong)

    def test_settings_of_an_earlier_version_are_read(self) -> None:
        stored = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stored", "supervisor.json")
        settings = from_json(read_json(stored))
        self.assertEqual((settings.run, settings.chain.links), ("gpt3_126m", 3))
        self.assertEqual((settings.results, settings.metrics), (None, None))


class JsonLines(InDirectory):
    def test_records_are_read_once_as_the_file_grows(self) -> None:
        path, offset = self.path("metrics.jsonl"), None
        for content, expected in (
            (None, []),
            ('{"step": 1}\n', [1]),
            ('{"step": 2}\nno record\n[3]\n{"step": ', [2]),
            ('3, "loss": NaN}\n', [3]),
            ("", []),
            ("[" * 100000 + '\n{"step": 4}\n', []),
            ("", [4]),
        ):
            if content is not None:
                with open(path, "a") as stream:
                    stream.write(content)
            records, offset = read_new_records(path, offset, limit=100002)
            self.assertEqual([record["step"] for record in records], expected)
        self.assertEqual(offset, os.path.getsize(path))
        with open(path, "w") as stream:
            stream.write('{"step": 5}\n' * 2)
        self.assertEqual(read_new_records(path), ([], 24))
        self.assertEqual(read_new_records(path, offset), ([{"step": 5}] * 2, 24))
        self.assertEqual(read_new_records(path, 0, limit=4), ([], 4))


def refuse(*_: object) -> None:
    raise OSError(errno.EPERM, "no links here")
