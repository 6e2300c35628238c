"""The nodes that failed under a run's jobs: read, avoided by the next launch, and on record there."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.drafting import Draft, Request, avoided, draft
from launcher.errors import UserError
from launcher.launching import launch
from launcher.plan import Queue
from launcher.runs.manifest import read_manifest
from supervisor.excluded import ExcludedNode, excluded_from_json, read_excluded
from tests.launching.fake_slurm import FakeSlurm, install, overrides

FAR = 99_999_999_999


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def note(tmp_path: Path, *lines: str) -> Path:
    run_dir = tmp_path / "results" / "gpt3_tiny"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "excluded_nodes.tsv").write_text("".join(f"{line}\n" for line in lines))
    return run_dir


def drafted(tmp_path: Path, *more: str) -> tuple[Draft, Request]:
    request = Request(overrides(tmp_path, *more), ["slipway", "launch"])
    return draft(request), request


def header(made: Draft) -> list[str]:
    return [line for line in made.rendered.script.splitlines() if line.startswith("#SBATCH --exclude")]


def test_a_run_without_the_file_avoids_nothing(tmp_path: Path) -> None:
    assert read_excluded(tmp_path, now=0) == ()


def test_lines_expire_and_the_newest_of_a_node_counts(tmp_path: Path) -> None:
    run_dir = note(
        tmp_path,
        "n1\t100\t7\told",
        "n2\t200\t8\tXid 79",
        "n1\t300\t9\tfell off the bus",
        "n1\t150\t9\ta job that ended later, and began earlier",
    )
    assert read_excluded(run_dir, now=250) == (ExcludedNode("n1", 300, "9", "fell off the bus"),)
    assert [one.node for one in read_excluded(run_dir, now=0)] == ["n1", "n2"]
    assert read_excluded(run_dir, now=300) == ()


@pytest.mark.parametrize(
    "line",
    [
        *("", "n1", "n1\t900", "n1\t900\t7", "n1\tsoon\t7\twhy", "n1\t-5\t7\twhy", "\t900\t7\twhy"),
        *("n1,n2\t900\t7\twhy", "n[1-9]\t900\t7\twhy", "$(touch x)\t900\t7\twhy", "n 1\t900\t7\twhy"),
        *("--all\t900\t7\twhy", "n1\t٣٣٣\t7\twhy"),
    ],
)
def test_what_is_no_whole_line_of_ours_is_passed_over(tmp_path: Path, line: str) -> None:
    run_dir = note(tmp_path, line, "n2\t900\t7\twhy")
    assert [one.node for one in read_excluded(run_dir, now=0)] == ["n2"]


def test_bytes_that_are_no_text_hide_no_other_line(tmp_path: Path) -> None:
    run_dir = note(tmp_path)
    (run_dir / "excluded_nodes.tsv").write_bytes(b"n1\t900\t7\t\xff\nn2\t900\t7\twhy")
    assert [one.node for one in read_excluded(run_dir, now=0)] == ["n1", "n2"]


def test_what_a_manifest_has_comes_back(tmp_path: Path) -> None:
    nodes = (ExcludedNode("n1", 300, "9", "why"),)
    assert excluded_from_json([node.to_json() for node in nodes]) == nodes
    assert excluded_from_json([{"node": "a b"}, "n1", {}, {"node": "n3", "until": "x"}]) == (
        ExcludedNode("n3", 0, "", ""),
    )


@pytest.mark.parametrize(
    ("own", "nodes", "all_of_them"),
    [
        (None, [], None),
        ("n[1-3],n7", [], "n[1-3],n7"),
        (None, ["n1", "n2"], "n1,n2"),
        ("n1,n9", ["n1", "n2"], "n1,n9,n2"),
    ],
)
def test_they_are_excluded_beside_the_users_own(
    own: str | None, nodes: list[str], all_of_them: str | None
) -> None:
    queue = Queue(exclude=own, avoided=tuple(ExcludedNode(node, 1, "7", "why") for node in nodes))
    assert queue.exclude_all == all_of_them


def test_the_next_launch_avoids_them_and_says_so(tmp_path: Path, slurm: FakeSlurm) -> None:
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79", "n3\t5\t6\tlong ago")
    made, request = drafted(tmp_path, "cluster.exclude=n9")
    assert header(made) == ["#SBATCH --exclude=n9,n2"]
    assert made.plan.job.queue.exclude == "n9", "a later link may use the others again, once they expire"
    done = launch(made, request)
    assert done.warnings == []
    found = read_manifest(done.paths.directory).excluded
    assert found == [{"node": "n2", "until": FAR, "job": "7", "why": "Xid 79"}]


def test_the_script_of_a_launch_again_avoids_what_it_did_then(tmp_path: Path, slurm: FakeSlurm) -> None:
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    made, request = drafted(tmp_path)
    done = launch(made, request)
    note(tmp_path, f"n4\t{FAR}\t8\tXid 79")
    again = draft(Request(request.overrides, [], number=1, tag=done.manifest.tag))
    assert again.rendered.script == done.paths.script.read_text()
    next_one, _ = drafted(tmp_path)
    assert header(next_one) == ["#SBATCH --exclude=n4"]


def test_another_launcher_that_took_the_number_changes_nothing_about_them(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    first, request = drafted(tmp_path)
    second, _ = drafted(tmp_path)
    launch(first, request)
    done = launch(second, request)
    assert done.paths.number == 2
    assert "#SBATCH --exclude=n2\n" in done.paths.script.read_text()


@pytest.mark.parametrize("more", ["resilience.exclude_hours=0", "cluster.scheduler=local"])
def test_who_does_not_want_them_avoided_need_not(tmp_path: Path, more: str) -> None:
    run_dir = note(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    made, _ = drafted(tmp_path, more)
    assert avoided(made.composition, run_dir) == ()
    assert header(made) == []


def test_a_node_that_slurm_does_not_take_is_not_avoided_and_that_is_said(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    """It may be gone from the cluster: that must not keep the run from being launched."""
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79", f"gone\t{FAR}\t8\tdied", f"n4\t{FAR}\t9\tdied")
    slurm.judge(gone="Invalid node name specified")
    made, request = drafted(tmp_path)
    done = launch(made, request)
    assert "#SBATCH --exclude=n2,n4\n" in done.paths.script.read_text()
    (warning,) = done.warnings
    assert warning.startswith("gone is not avoided, on which job 8 failed: ")
    assert "Invalid node name specified" in warning
    assert [one["node"] for one in done.manifest.excluded] == ["n2", "n4"]


def test_nodes_without_which_the_job_would_wait_are_not_avoided(tmp_path: Path, slurm: FakeSlurm) -> None:
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79", f"n4\t{FAR}\t9\tdied")
    slurm.judge(**{"n2,n4": "Requested node configuration is not available"})
    made, request = drafted(tmp_path)
    done = launch(made, request)
    assert "#SBATCH --exclude=n2\n" in done.paths.script.read_text()
    assert done.warnings[0].startswith("n4 is not avoided, on which job 9 failed: as the cluster is now, ")


def test_a_job_that_waits_in_any_case_avoids_them_all_the_same(tmp_path: Path, slurm: FakeSlurm) -> None:
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    slurm.judge(gpt3_tiny="Requested nodes are busy")
    made, request = drafted(tmp_path)
    done = launch(made, request)
    assert "#SBATCH --exclude=n2\n" in done.paths.script.read_text()
    (warning,) = done.warnings
    assert "Requested nodes are busy" in warning


def test_what_slurm_refuses_for_another_reason_is_refused_in_its_words(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    note(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    slurm.judge(gpt3_tiny="Invalid account")
    made, request = drafted(tmp_path)
    with pytest.raises(UserError, match="Invalid account"):
        launch(made, request)
    assert not (tmp_path / "results" / "gpt3_tiny" / "launches").exists()


def test_rendering_asks_nobody(tmp_path: Path) -> None:
    """The same arguments, the same bytes: what is avoided is one of them."""
    made, _ = drafted(tmp_path)
    nodes = [ExcludedNode("n5", 1, "7", "why")]
    again = made.replanned(avoided=nodes)
    assert header(again) == ["#SBATCH --exclude=n5"]
    assert again.replanned(avoided=()).rendered == made.rendered
