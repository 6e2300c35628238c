"""A run is found by a path, its name or a job's id, from any directory, with and without the index."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_trees import Cluster, launch

from launcher.errors import UserError
from launcher.jobs import locator as scanning
from launcher.jobs.locator import RunLocator
from launcher.jobs.lookup import RunRef, find_run, runs_in
from launcher.runs import provenance
from launcher.runs.known_trees import remember_trees, remembered_trees
from launcher.runs.paths import submitted_name

BASE = Path("results")
_SCHEDULERS = RunLocator.__dict__["_schedulers"]  # the real ones, which most tests replace by a single one


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The only scheduler there is."""
    fake = Cluster()
    monkeypatch.setattr(RunLocator, "_schedulers", [fake])
    return fake


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the working directory of a user, without runs."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def remember(run_dir: Path) -> None:
    """Remember a run's tree, as `launch` and every look-up do."""
    remember_trees([run_dir.parent])


# by a path


def test_any_path_of_a_run_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a tree of" / "runs"
    first, second = launch(run), launch(run, 2)
    (first / "results").mkdir()
    (second / "log-job_12.out").touch()
    (run / "log-job_12.out").symlink_to("launches/2/log-job_12.out")
    (run / "newest").symlink_to("launches/2")
    (run / "checkpoints").mkdir()
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(first)
    launches: dict[object, int | None] = {
        run: None,
        run / "launches": None,
        run / "checkpoints": None,
        first: 1,
        first / "results": 1,
        second / "log-job_12.out": 2,
        run / "log-job_12.out": 2,
        run / "newest": 2,
        f"{run}/newest/../1/results": 1,
        elsewhere: 1,
        f"{elsewhere}/launcher.json": 1,
    }
    refs = {word: find_run(str(word), BASE) for word in launches}
    assert {word: ref.launch for word, ref in refs.items()} == launches
    assert {ref.run_dir for ref in refs.values()} == {run}
    assert find_run("runs", BASE) == find_run("runs", Path("nowhere")) == RunRef(run), "it is remembered"
    monkeypatch.chdir(first)
    assert find_run(".", BASE) == find_run("results", BASE) == RunRef(run, 1)
    monkeypatch.chdir(run)
    assert find_run(".", BASE) == RunRef(run)
    assert find_run("../runs", BASE) == RunRef(run)


def test_a_file_beside_a_directory_called_launches_names_no_run(tmp_path: Path, cwd: Path) -> None:
    (tmp_path / "launches" / "of ships").mkdir(parents=True)
    (cwd / "notes").touch()
    with pytest.raises(UserError, match="no run 'notes'"):
        find_run("notes", BASE)


def test_a_tree_is_no_run(cwd: Path) -> None:
    launch(cwd / "mine" / "a")
    with pytest.raises(UserError, match="no run 'mine'") as raised:
        find_run("mine", BASE)
    assert "slipway status --base-results-dir mine" in str(raised.value)


# by a name


def test_a_name_is_found_from_any_directory(tmp_path: Path) -> None:
    run = tmp_path / "x" / "gpt3_126m"
    launch(run)
    remember(run)
    assert find_run("gpt3_126m", BASE).run_dir == run
    assert find_run("gpt3_126m", tmp_path / "x") == RunRef(run)


def test_trees_of_the_environment_are_always_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(tmp_path / "x" / "deep" / "er" / "a")
    launch(tmp_path / "y" / "b")
    monkeypatch.setenv("SLIPWAY_RESULTS_DIR", f"{tmp_path / 'nowhere'}:{tmp_path / 'x'}::{tmp_path / 'y'}")
    assert find_run("a", BASE).run_dir == tmp_path / "x/deep/er/a"
    assert find_run("b", BASE).run_dir == tmp_path / "y/b"


def test_the_base_comes_first_then_own_runs(tmp_path: Path, cwd: Path) -> None:
    other_run, own_run, base_run = tmp_path / "t/a", tmp_path / "m/a", cwd / "results/group/a"
    launch(other_run)
    launch(own_run, user=provenance.user())
    remember(other_run)
    remember(own_run)
    assert find_run("a", BASE).run_dir == own_run
    launch(base_run)
    assert find_run("a", BASE).run_dir == base_run


def test_several_of_one_name_are_listed(tmp_path: Path) -> None:
    for tree in "xy":
        launch(tmp_path / tree / "a", user=f"user-{tree}")
        remember(tmp_path / tree / "a")
    with pytest.raises(UserError, match="several runs 'a'") as raised:
        find_run("a", BASE)
    message = str(raised.value)
    assert f"{tmp_path}/x/a  (user-x, 2026-11-21T12:00:01Z)" in message
    assert f"{tmp_path}/y/a  (user-y" in message


def test_an_unknown_name_is_explained(tmp_path: Path, cluster: Cluster) -> None:
    launch(tmp_path / "x" / "gpt3_126m")
    remember(tmp_path / "x" / "gpt3_126m")
    cluster.error = "the controller does not answer"
    with pytest.raises(UserError, match="no run 'gtp3_126m'") as raised:
        find_run("gtp3_126m", BASE)
    message = str(raised.value)
    assert "did you mean 'gpt3_126m'?" in message
    assert f"looked in results, {tmp_path}/x" in message
    assert "the controller does not answer" in message
    with pytest.raises(UserError, match="names no run"):
        find_run("", BASE)


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLocator, "_schedulers", _SCHEDULERS)
    monkeypatch.setattr("launcher.jobs.locator._SECONDS", 0.5)
    monkeypatch.setattr("launcher.schedulers.local._pids", list)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("squeue", "sacct"):
        (programs / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for word in ("unheard-of", "17"):
        with pytest.raises(UserError, match="there is no run") as raised:
            find_run(word, BASE)
        assert str(raised.value).count("Slurm does not answer: no answer within 0 s (squeue, asked once") == 1


# by a job's id


def test_a_remembered_job_is_found_without_questions(tmp_path: Path, cluster: Cluster) -> None:
    run = tmp_path / "x" / "a"
    launch(run, job_id="16")
    launch(run, 2, job_id="17")
    remember(run)
    assert find_run("17", BASE) == RunRef(run, 2)
    assert find_run("17_3", BASE) == RunRef(run, 2, "3")
    assert cluster.questions == []


def test_a_job_is_found_by_its_own_mark(tmp_path: Path) -> None:
    run = tmp_path / "x" / "a"
    directory = launch(run)
    (directory / "marks").mkdir()
    (directory / "marks" / "job").write_text("17\n")
    assert find_run("17", tmp_path / "x") == RunRef(run, 1)


def test_a_job_of_a_colleague_is_found_by_its_script(tmp_path: Path, cluster: Cluster) -> None:
    run = tmp_path / "theirs" / "a"
    directory = launch(run, 3, job_id="17")
    launch(run, 4, job_id="19")
    cluster.jobs["17"] = directory / "job-a_submission.sh"
    cluster.jobs["18"] = tmp_path / "no_slipway.sh"
    assert find_run("17", BASE) == RunRef(run, 3)
    cluster.questions.clear()
    assert find_run("17", BASE) == RunRef(run, 3)
    assert find_run("a", BASE) == RunRef(run)
    assert cluster.questions == []
    with pytest.raises(UserError, match="no launch of a job of that id") as raised:
        find_run("18", BASE)
    assert f"there is a job 18 of {tmp_path}/no_slipway.sh, which is in no run" in str(raised.value)


def test_a_job_of_a_launch_that_was_removed_is_not_the_next_one(tmp_path: Path, cluster: Cluster) -> None:
    """The run was removed while its chain waited, and launched anew."""
    run = tmp_path / "theirs" / "a"
    script = launch(run, job_id="17", tag="new") / "job-a_submission.sh"
    cluster.jobs |= {"18": submitted_name(script, "new", 2), "12": submitted_name(script, "old", 2)}
    assert find_run("18", BASE) == RunRef(run, 1)
    with pytest.raises(UserError, match="job 12 is of a launch that was removed: "):
        find_run("12", BASE)


def test_an_id_that_was_used_again_means_the_newest_launch(tmp_path: Path) -> None:
    """The newest launch is meant, most likely; a note names the others."""
    old, new = tmp_path / "x" / "old", tmp_path / "y" / "new"
    launch(new, job_id="17", created="2026-11-21T12:00:00Z")
    launch(old, job_id="17", created="2025-01-01T12:00:00Z")
    remember(new)
    remember(old)
    ref = find_run("17", BASE)
    assert (ref.run_dir, ref.launch) == (new, 1)
    assert ref.notes == (
        f"several launches had a job 17; the newest is taken, not that of {old} (2025-01-01T12:00:00Z)",
    )


def test_the_array_of_a_sweep_is_found_by_its_points(tmp_path: Path, cluster: Cluster) -> None:
    """If a job had this id before, the newest is meant; the other points are not listed as others."""
    old, sweep = tmp_path / "x" / "old", tmp_path / "y" / "sweep"
    launch(old, job_id="17", created="2026-11-21T11:00:00Z")
    for task in range(3):
        launch(sweep / f"seed={task}", job_id=f"17_{task}", array_tag="t", array_task=task)
        remember(sweep / f"seed={task}")
    launch(tmp_path / "z" / "other", job_id="170_1")
    remember(tmp_path / "z" / "other")
    ref = find_run("17", BASE)
    assert (ref.run_dir.parent, ref.launch, ref.job, ref.notes) == (sweep, 1, "17", ())
    assert find_run("17_1", BASE) == RunRef(sweep / "seed=1", 1)
    with pytest.raises(UserError, match="no launch of a job of that id"):
        find_run("17_9", BASE)
    remember(old)
    (note,) = find_run("17", BASE).notes
    assert note.endswith(f"not that of {old} (2026-11-21T11:00:00Z)")
    assert cluster.questions == ["scripts"], "who knows the id asks nobody"


def test_a_run_may_be_called_a_number(cwd: Path) -> None:
    launch(cwd / "results" / "17")
    launch(cwd / "results" / "a", job_id="17")
    assert find_run("17", BASE).run_dir == cwd / "results" / "17"


# lost indexes, moved and copied trees


def test_runs_are_found_without_the_index(
    tmp_path: Path, cwd: Path, cluster: Cluster, cache_dir: Path
) -> None:
    """The base, and the trees of the user's own jobs, are searched still."""
    below, far = cwd / "results" / "a", tmp_path / "far" / "b"
    launch(below, job_id="17")
    script = launch(far, job_id="18") / "job-b_submission.sh"
    remember(below)
    remember(far)
    shutil.rmtree(cache_dir)
    assert find_run("17", BASE) == RunRef(below, 1)
    with pytest.raises(UserError):
        find_run("b", BASE)
    cluster.own = [script, tmp_path / "something.sh", far / "launches/9/not_there.sh"]
    assert find_run("b", BASE) == RunRef(far)
    shutil.rmtree(cache_dir)
    assert find_run("18", BASE) == RunRef(far, 1)
    cluster.own = []
    assert find_run("b", BASE) == RunRef(far), "what was found is remembered"


def test_a_tree_that_was_moved_is_found(tmp_path: Path, cwd: Path) -> None:
    run = tmp_path / "before" / "a"
    launch(run, job_id="17")
    remember(run)
    (tmp_path / "before").rename(cwd / "results")
    assert find_run("a", BASE) == RunRef(cwd / "results" / "a")
    assert find_run("17", BASE) == RunRef(cwd / "results" / "a", 1)
    with pytest.raises(UserError):
        find_run("nowhere", BASE)
    assert remembered_trees() == [cwd / "results"]
    (cwd / "results" / "a").rename(cwd / "results" / "b")
    assert find_run("17", BASE) == RunRef(cwd / "results" / "b", 1)
    assert find_run("b", BASE) == find_run("a", BASE) == RunRef(cwd / "results" / "b")


def test_a_run_that_was_moved_between_known_trees_is_found(tmp_path: Path) -> None:
    for tree in "xy":
        launch(tmp_path / tree / f"stays_in_{tree}")
        remember(tmp_path / tree / f"stays_in_{tree}")
    run = launch(tmp_path / "x" / "a", job_id="17").parents[1]
    remember(run)
    run.rename(tmp_path / "y" / "a")
    assert find_run("17", BASE).run_dir == find_run("a", BASE).run_dir == tmp_path / "y" / "a"
    shutil.rmtree(tmp_path / "y" / "a")
    shutil.rmtree(tmp_path / "y" / "stays_in_y")
    for word in ("17", "a"):
        with pytest.raises(UserError, match="no run"):
            find_run(word, BASE)
    assert find_run("stays_in_x", BASE).run_dir.parent == tmp_path / "x"


def test_a_copy_is_the_same_launch(tmp_path: Path, cwd: Path) -> None:
    run = tmp_path / "x" / "a"
    launch(run, job_id="17")
    remember(run)
    shutil.copytree(tmp_path / "x", tmp_path / "backup")
    launch(run, 2, job_id="18")
    assert runs_in(tmp_path / "backup") == [tmp_path / "backup" / "a"]
    assert find_run("a", BASE) == RunRef(run)
    assert find_run("17", BASE) == RunRef(run, 1), "nothing is told of the copy"
    copy = tmp_path / "backup" / "a"
    assert find_run(str(copy), BASE) == RunRef(copy)
    assert find_run("a", tmp_path / "backup") == RunRef(copy)
    assert find_run("17", BASE) == RunRef(run, 1)
    shutil.rmtree(tmp_path / "x")
    assert find_run("17", BASE) == RunRef(copy, 1)


# unusual trees


def test_the_search_of_a_tree_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
    launch(tmp_path / "data" / "a_run_among_data")
    launch(tmp_path / "runs" / "b")
    monkeypatch.setattr(scanning, "_MAX_ENTRIES", 20)
    assert [run.name for run in scanning.runs_below([tmp_path])] == ["b"]
    monkeypatch.setattr(scanning, "_MAX_DIRECTORIES", 2)
    assert list(scanning.runs_below([tmp_path])) == []


def test_names_that_are_no_text_are_found(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9sultats \xff")) / "a b\n"
    launch(run, job_id="17")
    remember(run)
    assert find_run("a b\n", BASE).run_dir == find_run("17", BASE).run_dir == run
    with pytest.raises(UserError) as raised:
        find_run("a c\n", BASE)
    lines = str(raised.value).splitlines()
    assert all(line.isprintable() for line in lines)
    assert "did you mean 'a b\\n'?" in lines[1]


def test_links_that_go_in_circles_name_no_run(cwd: Path) -> None:
    (cwd / "loop").symlink_to("loop")
    for word in ("loop", "../here/loop"):
        with pytest.raises(UserError, match="there is no run"):
            find_run(word, BASE)


def test_obstacles_in_a_tree_do_not_stop_the_search(tmp_path: Path) -> None:
    tree = tmp_path / "x"
    for run in ("a", ".hidden/b", "1/2/3/c", "1/2/3/4/5/too_deep"):
        launch(tree / run, user=provenance.user())
    (tree / "1" / "round").symlink_to(tree)
    (tree / "again").symlink_to(tree / "a")
    (tree / "dangling").symlink_to(tree / "nowhere")
    (tree / "a" / "launches" / "1" / "launches" / "1").mkdir(parents=True)
    (tree / "broken" / "launches" / "1").mkdir(parents=True)
    (tree / "broken" / "launches" / "1" / "launcher.json").write_text("{")
    launch(tree / "odd", job_id=17, run=None, tag=["x"])
    paths = {
        launch.paths.run_dir.relative_to(tree).as_posix() for launch in RunLocator(tree).launches([tree])
    }
    assert paths == {"a", "1/2/3/c"}
    assert find_run("odd", tree).run_dir == tree / "odd"
    assert find_run("broken", tree).run_dir == tree / "broken"


def find_as(user: int, cache: Path, base: Path, words: Sequence[str]) -> list[str]:
    """Return the run and the launch that each word names to another user, who has an index of their own.

    A fork does it: the other user may not be able to read this interpreter and the checkout.
    """
    receiver, sender = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.environ["SLIPWAY_CACHE_DIR"] = str(cache)
            RunLocator._schedulers = []  # type: ignore[assignment]
            os.write(sender, "\n".join(name_of(word, base) for word in words).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sender)
    with os.fdopen(receiver) as stream:
        lines = stream.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return lines


def name_of(word: str, base: Path) -> str:
    try:
        run = find_run(word, base)
    except UserError:
        return "-"
    return f"{run.run_dir.name}:{run.launch}"


def test_two_users_find_each_others_runs(tmp_path: Path, other_user: int) -> None:
    """Each finds the other's runs; what may not be read is passed over."""
    cache = tmp_path / "their cache"
    cache.mkdir(mode=0o700)
    os.chown(cache, other_user, other_user)
    tree = tmp_path / "shared"
    launch(tree / "open", job_id="2")
    launch(tree / "closed", job_id="3").parents[1].chmod(0o700)
    launch(tree / "half", job_id="4")
    launch(tree / "half", 2, job_id="5").chmod(0o700)
    theirs = launch(tree / "theirs", job_id="6", user="nobody").parents[1]
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, other_user, other_user)
        path.chmod(0o700)
    # The launcher imports some modules where it first needs them, and the fork may not read them.
    assert find_run("2", tree) == RunRef(tree / "open", 1)
    lines = find_as(other_user, cache, tree, ["open", "2", "half", "4", "5", "3", "theirs", "6"])
    assert lines == ["open:None", "open:1", "half:None", "half:1", "-", "-", "theirs:None", "theirs:1"]
    assert find_as(other_user, cache, tmp_path / "nowhere", ["open", "6"]) == ["open:None", "theirs:1"]
    assert find_run("6", tree) == RunRef(theirs, 1)


def test_one_of_two_thousand_launches_is_found(tmp_path: Path) -> None:
    for number in range(2000):
        launch(tmp_path / "x" / f"run_{number // 4}", number % 4 + 1, job_id=str(number + 1))
    assert find_run("2000", tmp_path / "x") == RunRef(tmp_path / "x" / "run_499", 4)
    assert find_run("8", BASE) == RunRef(tmp_path / "x" / "run_1", 4)
    assert find_run("run_250", BASE) == RunRef(tmp_path / "x" / "run_250")
