"""A job that was submitted is found again, however large its launch's records are, or how damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.config.stored import config_text
from launcher.drafting import Request, drafts
from launcher.errors import UserError
from launcher.jobs.launches import Launch
from launcher.launching import launch_stages, writing
from launcher.runs import manifest as manifests
from launcher.runs.manifest import read_manifest, read_yaml, require_readable
from launcher.runs.paths import launch_numbers
from launcher.schedulers.base import FoundJobs, JobRef, JobStatus, Submission
from launcher.slurm.states import Action, State
from launcher.sweeps.record import ArrayRecord, points_of, read_records, write_record
from slipway.common.node.settings import SweepSettings
from tests.launching.fake_slurm import FakeSlurm, install, overrides

Capsys = pytest.CaptureFixture[str]
# A data set of a blend, as `slipway.trainer.data.identity` describes it.
DATA_SET = {"kind": "data", "key": "model.data.data_prefix", "name": "/" + "x" * 150 + ".bin"}
DATA_SET |= {"size": 10**12, "checksum": "0" * 64, "path": "/" + "x" * 150}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manifests, "_logged", set())
    return install(tmp_path, monkeypatch)


def launch(tmp_path: Path, *words: str) -> Launch:
    request = Request(overrides(tmp_path, *words), ["slipway", "launch"])
    (launched,) = launch_stages(drafts(request), request)
    return launched


def with_data_sets(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "data_identity", lambda _: [DATA_SET] * count)


# --- numbers


@pytest.mark.parametrize("name", ["20261126120000", "9" * 30, "1000000000", "1e9", "backup"])
def test_a_directory_beside_the_launches_is_no_launch(slurm: FakeSlurm, tmp_path: Path, name: str) -> None:
    first = launch(tmp_path)
    (first.paths.run_dir / "launches" / name).mkdir()
    second = launch(tmp_path)
    assert launch_numbers(second.paths.run_dir) == [1, 2]
    assert read_manifest(second.paths.directory).job_id == "102"


def test_the_largest_number_is_named_before_a_job_is_lost(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = launch(tmp_path).paths.run_dir
    (run_dir / "launches" / "999999999").mkdir()
    with pytest.raises(UserError, match=r"launches/999999999: no launch can have a larger number"):
        launch(tmp_path)
    assert len(slurm.submitted()) == 1


# --- sizes


def test_a_blend_of_thousands_of_data_sets_is_read_again(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_data_sets(2 * 5300, monkeypatch)
    directory = launch(tmp_path).paths.directory
    assert (directory / "launcher.json").stat().st_size > 4 << 20
    assert len(read_manifest(directory).data) == 2 * 5300
    prefixes = [word for number in range(5300) for word in ("1.0", f"/{'x' * 145}{number:05}")]
    (directory / "a.yaml").write_text(config_text({"data_prefix": prefixes}))
    require_readable(directory / "a.yaml", (directory / "a.yaml").read_text())
    assert read_yaml(directory / "a.yaml") == {"data_prefix": prefixes}


def test_what_no_reader_takes_is_refused_before_the_submission(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    with_data_sets(40_000, monkeypatch)
    assert main(["launch", *overrides(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "launcher.json of this launch would have" in err and "data sets" in err
    assert slurm.submitted() == []
    assert not list(tmp_path.rglob("launches"))


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a" * (1 << 20)), ("a.yaml", "a" * (1 << 18))])
@pytest.mark.parametrize("path", ["", "\\uDCE9"])
def test_what_may_be_written_is_read(tmp_path: Path, name: str, text: str, path: str) -> None:
    """A path that is not UTF-8 needs a parser that reads less."""
    content = f'a: "{text}{path}"\n'
    (tmp_path / name).write_text(content)
    try:
        require_readable(tmp_path / name, content)
    except UserError:
        return
    assert read_yaml(tmp_path / name)["a"].startswith("aaa")


def record(points: int, **values: str) -> ArrayRecord:
    point = {"launch": 1, "values": {f"training.model.optim.key_{key}": "0.123456789" for key in range(5)}}
    fields: dict[str, Any] = dict.fromkeys(("sweep", "tag", "script", "created", "user", "host"), "x")
    fields |= {"slurm_conf": None, "command": [], "overrides": [], "throttle": None, "labels": {}}
    listed = [{"name": "-".join(f"key_{key}=0.123456789" for key in range(5)), **point}] * points
    return ArrayRecord(**fields, points=listed)


def test_the_record_of_ten_thousand_points_is_read_again(tmp_path: Path) -> None:
    array = tmp_path / "arrays" / "1"
    array.mkdir(parents=True)
    write_record(array, record(10_000))
    assert (array / "sweep.json").stat().st_size > 4 << 20
    assert [len(each.points) for each in read_records(tmp_path)] == [10_000]
    with pytest.raises(UserError, match=r"sweep\.json of this launch would have"):
        write_record(array, record(60_000))


# --- damage


@dataclass
class FakeScheduler:
    """A scheduler that has all jobs, and notes the actions."""

    scripts_of: dict[str, Path] = field(default_factory=dict)
    acts: list[tuple[Action, str]] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)

    def statuses(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        self.tags += [ref.submitted_tag for ref in refs]
        return [JobStatus(State.RUNNING, nodes="n1", elapsed="00:10:00") for _ in refs]

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        self.acts += [(action, job_id) for job_id in job_ids]
        return {}

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        return {}


def flipped(at: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 0x80
        path.write_bytes(content)

    return flip


DAMAGES = {
    "first byte": flipped(0.0),
    "a byte": flipped(0.5),
    "last byte": flipped(0.99),
    "half": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "gone": lambda path: path.unlink(),
    "another version": lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "run": 7})),
    "too large": lambda path: path.write_bytes(b" " * (17 << 20)),
}


@pytest.mark.parametrize("trace", ["launcher.log", "marks/job"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_job_of_a_damaged_manifest_is_found(
    slurm: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capsys,
    damage: str,
    trace: str,
) -> None:
    launched = launch(tmp_path)
    directory, manifest = launched.paths.directory, launched.manifest
    if trace == "marks/job":
        (directory / "marks").mkdir()
        (directory / trace).write_text("101\n")
        (directory / "launcher.log").unlink()
    launched.paths.log("101").write_text("it trains\n")
    DAMAGES[damage](directory / "launcher.json")
    scheduler = FakeScheduler()
    monkeypatch.setattr("launcher.schedulers.scheduler_for", lambda *_: scheduler)
    for word in (manifest.run, "101", str(directory)):
        where = f"--base-results-dir={tmp_path / 'results'}"
        assert main(["status", word, "--json", where]) == 0
        output = capsys.readouterr()
        (row,) = json.loads(output.out)
        assert (row["job_id"], row["state"], row["run"]) == ("101", "RUNNING", manifest.run)
        assert set(scheduler.tags) == {manifest.tag}
        assert main(["logs", word, where]) == 0
        assert "it trains" in capsys.readouterr().out
        scheduler.acts.clear()
        assert main(["cancel", word, where]) == 0
        assert scheduler.acts == [(Action.CANCEL, "101")]
        capsys.readouterr()
    assert main(["launch", *overrides(tmp_path)]) == 0, "it hides no launch after it"


def test_damage_is_said_once(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    launched = launch(tmp_path)
    launched.paths.manifest.write_text("{\x1b[2J")
    monkeypatch.setattr("launcher.schedulers.scheduler_for", lambda *_: FakeScheduler())
    assert main(["status", "--base-results-dir", str(launched.paths.run_dir.parent)]) == 0
    err = capsys.readouterr().err
    assert err.count("launcher.json is not a launch's manifest") == 1
    assert "according to its other files, it is job 101" in err and "\x1b" not in err


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_points_of_a_damaged_sweep_are_found(tmp_path: Path, capsys: Capsys, damage: str) -> None:
    array = tmp_path / "sweep" / "arrays" / "1"
    array.mkdir(parents=True)
    write_record(array, replace(record(1), points=[{"name": "a", "launch": 3, "values": {"k": "1"}}]))
    settings = SweepSettings("x", "x", "x.sh", [(str(tmp_path / "sweep/a/launches/3"), "tag")])
    (array / "supervisor.json").write_text(json.dumps(settings._asdict()))
    if damage in ("gone", "another version"):
        return  # there is no such array, or another one
    DAMAGES[damage](array / "sweep.json")
    assert points_of(tmp_path / "sweep") == [tmp_path / "sweep" / "a"]
    assert main(["sweep", "--results", str(tmp_path / "sweep"), "--json"]) == 3
    output = capsys.readouterr()
    assert [row["point"] for row in json.loads(output.out)] == ["a"]
    assert "arrays/1/sweep.json cannot be read: its points have no values" in output.err
    (array / "supervisor.json").write_text(json.dumps({"points": [["/..", "x"], ["/a/launches/1", 2]]}))
    assert points_of(tmp_path / "sweep") == []
