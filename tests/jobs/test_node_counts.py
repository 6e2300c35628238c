"""A launch with a range of nodes counts as many as its newest job got."""

from __future__ import annotations

from pathlib import Path

from launcher.jobs.launches import open_launch
from tests.job_marks import leave_marks
from tests.jobs.run_trees import launch


def test_a_range_is_as_many_as_the_newest_link_got(tmp_path: Path) -> None:
    directory = launch(tmp_path / "run", job_id="17", nodes=2, max_nodes=4, links=3)
    assert open_launch(tmp_path / "run").nodes == 2, "as long as none has begun: the least"
    leave_marks(directory, "17", started=100, nodes="n1,n2,n3,n4")
    assert open_launch(tmp_path / "run").nodes == 4
    leave_marks(directory, "18", started=200, nodes="n1,n2,n4")
    assert open_launch(tmp_path / "run").nodes == 3


def test_a_fixed_number_is_the_requested_one(tmp_path: Path) -> None:
    """A mark may abbreviate the nodes, as Slurm does."""
    leave_marks(launch(tmp_path / "run", job_id="17", nodes=8), "17", started=100, nodes="n[1-8]")
    assert open_launch(tmp_path / "run").nodes == 8
