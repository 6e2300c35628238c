"""The marks of a chain are read once for a question, however many links it has."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import pytest
from job_marks import leave_marks
from monitor_samples import Runs

from launcher.cli.app import main
from launcher.schedulers.slurm import SlurmScheduler
from launcher.slurm.commands import Retry
from slipway.common import files
from slipway.common.node.marks import claim

_FORGOTTEN = "#!/bin/sh\nexit 0\n"
_SILENT = "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"


@pytest.mark.parametrize("answer", [_FORGOTTEN, _SILENT], ids=["forgotten", "silent"])
def test_the_marks_of_a_launch_are_read_as_often_for_each_number_of_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    for name in ("squeue", "sacct"):
        (tmp_path / name).write_text(answer)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(SlurmScheduler.__init__, "__defaults__", (None, Retry(rest=0.0, last_start=0.0)))
    reads: Counter[str] = Counter()
    open_regular = files.open_regular

    def counted(path: files.AnyPath, *, buffering: int = -1) -> BinaryIO:
        reads[Path(path).name] += 1
        return open_regular(path, buffering=buffering)

    monkeypatch.setattr(files, "open_regular", counted)
    most: dict[int, int] = {}
    for links in (2, 10, 100):
        run = Runs(tmp_path / str(links))
        directory = run.launch(job_id="1001", links=links)
        for link in range(1, links + 1):
            leave_marks(directory, str(1000 + link), started=1000.0 * link, ended=1000.0 * link + 1, code=75)
            claim(directory, str(1000 + link), link)
        (directory / "marks" / "job").write_text("1001\n")
        reads.clear()
        assert main(["status", "--json", "--base-results-dir", str(tmp_path / str(links))]) in (0, 3)
        (row,) = json.loads(capsys.readouterr().out)
        assert len(row["links"]) == (links if answer is _FORGOTTEN or row["links"] else 0)
        most[links] = max(count for name, count in reads.items() if name.endswith("ed.json"))
        assert sum(reads.values()) < 20 * links + 100
    assert most[2] == most[10] == most[100], "each file as often, whatever the number of links"
