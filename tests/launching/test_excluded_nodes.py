"""The nodes that failed under a run's jobs: the next launch reads, avoids and records them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.launching import launch, nodes_to_avoid
from launcher.runs.manifest import read_manifest
from slipway.common.node.excluded import ExcludedNode, read_excluded
from tests.launching.fake_slurm import FakeSlurm, install, overrides

FAR = 99_999_999_999


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def write_excluded(tmp_path: Path, *lines: str) -> Path:
    run_dir = tmp_path / "results" / "gpt3_tiny"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "excluded_nodes.tsv").write_text("".join(f"{line}\n" for line in lines))
    return run_dir


def draft_with_request(tmp_path: Path, *more: str) -> tuple[Draft, Request]:
    request = Request(overrides(tmp_path, *more), ["slipway", "launch"])
    return draft(request), request


def exclude_lines(new_draft: Draft) -> list[str]:
    return [line for line in new_draft.script.splitlines() if line.startswith("#SBATCH --exclude")]


def test_a_run_without_the_file_avoids_nothing(tmp_path: Path) -> None:
    assert read_excluded(tmp_path, now=0) == ()


def test_lines_expire_and_the_newest_of_a_node_counts(tmp_path: Path) -> None:
    run_dir = write_excluded(
        tmp_path,
        "n1\t100\t7\told",
        "n2\t200\t8\tXid 79",
        "n1\t300\t9\tfell off the bus",
        "n1\t150\t9\ta job that ended later, and began earlier",
    )
    assert read_excluded(run_dir, now=250) == (ExcludedNode("n1", 300, "9", "fell off the bus"),)
    assert [entry.node for entry in read_excluded(run_dir, now=0)] == ["n1", "n2"]
    assert read_excluded(run_dir, now=300) == ()


@pytest.mark.parametrize(
    "line",
    [
        *("", "n1", "n1\t900", "n1\t900\t7", "n1\tsoon\t7\twhy", "n1\t-5\t7\twhy", "\t900\t7\twhy"),
        *("n1,n2\t900\t7\twhy", "n[1-9]\t900\t7\twhy", "$(touch x)\t900\t7\twhy", "n 1\t900\t7\twhy"),
        *("--all\t900\t7\twhy", "n1\t٣٣٣\t7\twhy"),
    ],
)
def test_damaged_lines_are_passed_over(tmp_path: Path, line: str) -> None:
    run_dir = write_excluded(tmp_path, line, "n2\t900\t7\twhy")
    assert [entry.node for entry in read_excluded(run_dir, now=0)] == ["n2"]


def test_bytes_that_are_no_text_hide_no_other_line(tmp_path: Path) -> None:
    run_dir = write_excluded(tmp_path)
    (run_dir / "excluded_nodes.tsv").write_bytes(b"n1\t900\t7\t\xff\nn2\t900\t7\twhy")
    assert [entry.node for entry in read_excluded(run_dir, now=0)] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("own", "nodes", "exclude"),
    [
        (None, ["n1", "n2"], "n1,n2"),
        ("n[1-3],n7", ["n9"], "n[1-3],n7,n9"),
        ("n1,n9", ["n1", "n2"], "n1,n9,n2"),
    ],
)
def test_nodes_that_failed_are_excluded_beside_the_users_own(
    tmp_path: Path, slurm: FakeSlurm, own: str | None, nodes: list[str], exclude: str
) -> None:
    write_excluded(tmp_path, *(f"{node}\t{FAR}\t7\tXid 79" for node in nodes))
    new_draft, request = draft_with_request(tmp_path, *([f"cluster.exclude='{own}'"] if own else []))
    launch(new_draft, request)
    (submission,) = slurm.submitted()
    assert submission.startswith(f"--exclude={exclude} ")


def test_the_next_launch_avoids_and_records_failed_nodes(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79", "n3\t5\t6\tlong ago")
    new_draft, request = draft_with_request(tmp_path, "cluster.exclude=n9")
    outcome = launch(new_draft, request)
    assert not outcome.warnings
    assert exclude_lines(new_draft) == ["#SBATCH --exclude=n9"], (
        "a later link may use the others again, once they expire"
    )
    assert slurm.submitted()[0].startswith("--exclude=n9,n2 ")
    excluded = read_manifest(outcome.paths.directory).excluded
    assert excluded == [{"node": "n2", "until": FAR, "job": "7", "why": "Xid 79"}]


def test_links_submitted_at_launch_avoid_failed_nodes_too(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    new_draft, request = draft_with_request(tmp_path, "resilience.links=3", "resilience.submit=launch")
    launch(new_draft, request)
    assert len(slurm.submitted()) == 3
    assert all("--exclude=n2 " in submission for submission in slurm.submitted())


def test_sbatch_tests_a_launch_once(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79", f"n4\t{FAR}\t9\tdied")
    new_draft, request = draft_with_request(tmp_path)
    launch(new_draft, request)
    assert len([call for call in slurm.calls() if call.startswith("judged ")]) == 1


@pytest.mark.parametrize("more", ["resilience.exclude_hours=0", "cluster.scheduler=local"])
def test_nodes_are_not_avoided_if_switched_off_or_without_slurm(tmp_path: Path, more: str) -> None:
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    assert nodes_to_avoid(draft_with_request(tmp_path)[0])
    assert nodes_to_avoid(draft_with_request(tmp_path, more)[0]) == ()


def test_a_node_that_slurm_does_not_take_does_not_stop_the_launch(tmp_path: Path, slurm: FakeSlurm) -> None:
    """The node may be gone from the cluster."""
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79", f"gone\t{FAR}\t8\tdied")
    slurm.refuse("--exclude=")
    new_draft, request = draft_with_request(tmp_path)
    outcome = launch(new_draft, request)
    assert [("--exclude" in submission) for submission in slurm.submitted()] == [True, False]
    assert [*outcome.warnings] == [
        "n2 (job 7 failed there), gone (job 8 failed there) not avoided: Slurm refused the job: no --exclude="
    ]
    assert outcome.manifest.excluded == []
    assert read_manifest(outcome.paths.directory).excluded == []
    assert outcome.manifest.job_id == "102"


def test_launches_avoid_the_nodes_of_the_teams_file(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    file = tmp_path / "bad.tsv"
    lines = [("n3", FAR), ("n2", FAR), ("n4", FAR), ("n4", 1), ("$(touch x)", FAR)]
    file.write_text("".join(f"{node}\t{until}\tada@x 2026\tslow\n" for node, until in lines))
    new_draft, request = draft_with_request(tmp_path, f"resilience.exclude_file={file}", "cluster.exclude=n9")
    outcome = launch(new_draft, request)
    assert slurm.submitted()[0].startswith("--exclude=n9,n2,n3 ")
    assert exclude_lines(new_draft) == ["#SBATCH --exclude=n9"]
    assert [node["node"] for node in read_manifest(outcome.paths.directory).excluded] == ["n2", "n3"]
    slurm.refuse("--exclude=")
    warnings = launch(*draft_with_request(tmp_path, f"resilience.exclude_file={file}")).warnings
    assert warnings[0].startswith("n2 (job 7 failed there), n3 (excluded by ada@x 2026) not avoided: ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bad.tsv", "resilience.exclude_file='bad.tsv': a whole path is needed"),
        ("/nope/bad.tsv", "it cannot be read: no such file or directory"),
        ("/", "it cannot be read: not a regular file"),
    ],
)
def test_a_teams_file_that_cannot_be_read_stops_a_launch(
    tmp_path: Path, slurm: FakeSlurm, value: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        launch(*draft_with_request(tmp_path, f"resilience.exclude_file={value}"))
    assert "resilience.exclude_file" in str(error.value)
    assert not slurm.submitted() and not (tmp_path / "results").exists()


def test_other_refusals_of_slurm_are_reported_in_its_words(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_excluded(tmp_path, f"n2\t{FAR}\t7\tXid 79")
    slurm.judge(gpt3_tiny="Invalid account")
    new_draft, request = draft_with_request(tmp_path)
    with pytest.raises(UserError, match="Invalid account"):
        launch(new_draft, request)
    assert not (tmp_path / "results" / "gpt3_tiny" / "launches").exists()
