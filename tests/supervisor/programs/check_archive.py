"""Checks of the archive's modules, and of every recorded end of a job, with the Python of a node."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from typing import Dict, Optional

from slipway.common.node.judging import Facts, judge
from slipway.common.node.settings import LOCAL, Settings, to_json

ARCHIVE, SAMPLES = sys.argv[1:3]


def run_archive(
    archive: str, *arguments: str, environment: Optional[Dict[str, str]] = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run an archive as a job does."""
    # The script of a job starts it so, and keeps the environment for it.
    script = 'exec 9< <(env -0); exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-IS", archive, *arguments]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False
    )


class Archive(unittest.TestCase):
    def test_usage_is_printed_without_arguments(self) -> None:
        done = run_archive(ARCHIVE)
        self.assertEqual((done.returncode, done.stderr[:6]), (2, b"usage:"))

    def test_job_runs_in_a_directory_with_characters_outside_the_locale(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = folder.name + "/\u00e9"
        bytes_of_root = root.encode("utf-8")
        os.makedirs(bytes_of_root + b"/checkpoints/step=5")
        with open(bytes_of_root + b"/checkpoints/step=5/complete.json", "w") as stream:
            stream.write('{"step": 5, "serial": 1}')
        archive = os.fsdecode(bytes_of_root + b"/supervisor.pyz")
        shutil.copy(ARCHIVE, archive)
        settings = Settings(
            "x", 1, "0123abcd", root, root + "/s.sh", root + "/log_", LOCAL, "megatron", singleton=True
        )
        with open(bytes_of_root + b"/supervisor.json", "w") as stream:
            stream.write(to_json(settings._replace(checkpoints=root + "/checkpoints")))
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        no_zombie = ["bash", "-c", "! ps -o stat=,comm= --ppid $PPID | grep Z"]
        arguments = ["0123abcd", "1", "0123abcd", "--", *no_zombie]
        done = run_archive(archive, *arguments, environment=environment)
        self.assertEqual((done.returncode, done.stderr), (0, b""), done.stdout)
        (end_mark,) = [
            name for name in os.listdir(bytes_of_root + b"/marks") if name.endswith(b".ended.json")
        ]
        with open(bytes_of_root + b"/marks/" + end_mark) as stream:
            self.assertEqual(json.load(stream)["checkpoint"], 5)

    def test_every_module_can_be_imported(self) -> None:
        with zipfile.ZipFile(ARCHIVE) as archive:
            names = [name for name in archive.namelist() if name.startswith("slipway/")]
            is_same_python = archive.read("slipway/common/node/marks.pyc")[:4] == importlib.util.MAGIC_NUMBER
        self.assertIn("slipway/common/node/marks.py", names)
        for name in names:
            module = importlib.import_module(name.rpartition(".")[0].replace("/", "."))
            self.assertTrue(str(module.__file__).startswith(ARCHIVE), module)
            self.assertTrue(str(module.__file__).endswith(".pyc" if is_same_python else ".py"), module)

    def test_end_of_the_chain_is_one_line_of_the_log(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = folder.name
        shutil.copy(ARCHIVE, root + "/supervisor.pyz")
        with open(root + "/supervisor.json", "w") as stream:
            stream.write(
                to_json(Settings("x", 1, "0123abcd", root, root + "/s.sh", root + "/l", LOCAL, "nemo"))
            )
        os.mkdir(root + "/marks")
        chain_end = {"by": "job 1\x1b[2J", "why": "x\n" * 9999, "ended": 1}
        with open(root + "/marks/chain-ended", "w") as stream:
            json.dump(chain_end, stream)
        done = run_archive(root + "/supervisor.pyz", "0123abcd", "1", "0123abcd", "--", "true")
        self.assertEqual(done.stdout.count(b"\n"), 1, done.stderr)
        self.assertNotIn(b"\x1b", done.stdout)
        self.assertLess(len(done.stdout), 2000)

    def test_each_end_is_judged_as_expected(self) -> None:
        with open(SAMPLES, encoding="utf-8") as stream:
            samples = json.load(stream)
        self.assertGreater(len(samples), 50)
        for name, expected, facts, lines, hosts, tasks, down in samples:
            judgement = judge(Facts(*facts), lines, hosts, tasks, down)
            self.assertEqual([judgement.rule.name, judgement.verdict, list(judgement.nodes)], expected, name)
