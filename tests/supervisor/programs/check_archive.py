"""Every module of the archive, and every recorded end of a job, with the Python of a node."""

import importlib.util
import json
import sys
import unittest
import zipfile

from supervisor.judging import Facts, judge

ARCHIVE, SAMPLES = sys.argv[1:3]


class Archive(unittest.TestCase):
    def test_every_module_can_be_imported(self) -> None:
        with zipfile.ZipFile(ARCHIVE) as archive:
            names = [name for name in archive.namelist() if name.startswith("supervisor/")]
            is_same_python = archive.read("supervisor/marks.pyc")[:4] == importlib.util.MAGIC_NUMBER
        self.assertIn("supervisor/marks.py", names)
        for name in names:
            module = importlib.import_module(name.rpartition(".")[0].replace("/", "."))
            self.assertTrue(str(module.__file__).startswith(ARCHIVE), module)
            self.assertTrue(str(module.__file__).endswith(".pyc" if is_same_python else ".py"), module)

    def test_each_end_is_judged_as_expected(self) -> None:
        with open(SAMPLES, encoding="utf-8") as stream:
            samples = json.load(stream)
        self.assertGreater(len(samples), 50)
        for name, expected, facts, lines, hosts, tasks, down in samples:
            judged = judge(Facts(*facts), lines, hosts, tasks, down)
            self.assertEqual([judged.rule.name, judged.verdict, list(judged.nodes)], expected, name)
