"""The image's way to the tasks: a node's own copy, or Apptainer; real bash with fake Slurm commands."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from launcher.config.compose import compose
from launcher.config.overrides import hydra_value
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.rendering.render import TEMPLATE_DIR
from launcher.stages.planning import plan_launch
from tests.fakes.programs import write_programs
from tests.fakes.slurm import JOB_COMMANDS
from tests.launch_files import with_argument, write_files
from tests.rendering.test_quoting import hostile, names, nasty

STAGE = TEMPLATE_DIR / "stage_image.sh"

# srun records its arguments, too.
TOOLS = {
    **JOB_COMMANDS,
    "srun": r"""printf '%s\0' "$@" "" >>"$RECORD"
"""
    + JOB_COMMANDS["srun"],
    "apptainer": r"""printf '%s\0' apptainer "$@" "" >>"$RECORD"
while [[ $1 != bash && $1 != /bin/sh ]]; do shift; done
if [[ $1 == /bin/sh ]]; then shift 2; fi
"$@" """,
    "tool": r"""printf '%s\0' payload "${GREETING-} ${QUOTED-}" "${KEPT-}" "$@" "" >>"$RECORD" """,
}


@dataclass
class Job:
    """A launch on disk, in a directory of its own."""

    root: Path
    plan: Plan

    def run(self, **variables: str) -> tuple[str, list[list[str]]]:
        """Run the script; return its output, and the arguments of each command, in their order."""
        record = self.root / "record"
        record.write_bytes(b"")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        done = subprocess.run(
            ["bash", self.plan.paths.script, "x"],
            env={
                **inherited,
                "PATH": f"{self.root}/bin:{os.environ['PATH']}",
                "SLURM_JOB_ID": "17",
                "SLURM_JOB_NODELIST": "n1",
                "RECORD": str(record),
                **variables,
            },
            capture_output=True,
            text=True,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        # Each call ends with an empty argument; the hostile ones are not empty.
        calls: list[list[str]] = [[]]
        for word in record.read_bytes().decode().split("\0")[:-1]:
            if word or (calls[-1][:1] == ["payload"] and len(calls[-1]) < 3):
                calls[-1].append(word)
            else:
                calls.append([])
        return output, calls[:-1]


def job(root: Path, image: Path, *overrides: str, argument: str = "") -> Job:
    """Write a launch whose payload is a recorder."""
    write_programs(root / "bin", TOOLS)
    composition = compose(
        [
            "stages=[data_preparation]",
            "cluster=bcm",
            "data_preparation.inputs=[/etc/hostname]",
            f"base_results_dir={hydra_value(f'{root}/results')}",
            "cluster.python=tool",
            f"container={hydra_value(str(image))}",
            *overrides,
        ]
    )
    plan = plan_launch(composition.config, number=1, tag="x")
    plan = with_argument(plan, argument) if argument else plan
    plan.paths.code.mkdir(parents=True)
    write_files(plan)
    return Job(root, plan)


def image(path: Path, text: str = "an image") -> Path:
    path.write_text(text)
    return path


def staged_copies(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"slipway-{os.getuid()}/*") if path.name[0] != ".")


def started_from(calls: list[list[str]]) -> Path:
    (option,) = (word for call in calls for word in call if word.startswith("--container-image="))
    return Path(option.partition("=")[2])


def test_the_tasks_start_from_a_copy_that_the_next_job_finds(tmp_path: Path) -> None:
    shared, local = image(tmp_path / "nemo.sqsh"), tmp_path / "local disk"
    local.mkdir()
    staged_job = job(tmp_path, shared, f"container_options.stage_to={hydra_value(str(local))}")
    _, calls = staged_job.run()
    (copy,) = staged_copies(local)
    assert started_from(calls) == copy
    assert copy.read_text() == "an image"
    assert copy.stat().st_mode & 0o077 == 0
    first = copy.stat().st_ino
    _, calls = staged_job.run()
    assert (staged_copies(local), copy.stat().st_ino) == ([copy], first)
    # Another image takes the place of the shared file.
    image(tmp_path / "new", "another image").replace(shared)
    _, calls = staged_job.run()
    assert started_from(calls).read_text() == "another image"
    assert len(staged_copies(local)) == 2


def test_tasks_start_from_the_shared_file_without_a_copy(tmp_path: Path) -> None:
    shared = image(tmp_path / "nemo.sqsh")
    (tmp_path / "local").write_text("a file in its place")
    output, calls = job(tmp_path, shared, f"container_options.stage_to={tmp_path}/local").run()
    assert started_from(calls) == shared
    assert f"no directory {tmp_path}/local/slipway-{os.getuid()} can be made here" in output
    assert f"not every node has a copy of the image in {tmp_path}/local" in output


def test_missing_image_is_left_to_pyxis(tmp_path: Path) -> None:
    output, calls = job(tmp_path, tmp_path / "none.sqsh", f"container_options.stage_to={tmp_path}").run()
    assert started_from(calls) == tmp_path / "none.sqsh"
    assert "not every node has a copy" in output


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=names, directory=names)
def test_hostile_paths_are_staged_as_they_are(tmp_path: Path, name: str, directory: str) -> None:
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    shared = image(base / f"x{name[:80]}.sqsh")
    stage_dir = base / f"x{directory[:80]}"
    stage_dir.mkdir()
    _, calls = job(base, shared, f"container_options.stage_to={hydra_value(str(stage_dir))}").run()
    (copy,) = staged_copies(stage_dir)
    assert started_from(calls) == copy
    assert copy.read_text() == "an image"
    assert not list(base.rglob("canary*"))


# --- the copying itself


def stage(source: Path, target: Path, state: str | None = None, **tools: str) -> tuple[int, str]:
    status = source.stat()
    programs = write_programs(target.parent.parent / "bin", tools)
    done = subprocess.run(
        ["bash", STAGE, source, target, state or f"{status.st_size} {int(status.st_mtime)}"],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def entries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if not path.name.endswith(".lock")]


def test_without_room_nothing_is_copied_but_old_copies_make_some(tmp_path: Path) -> None:
    source, target = image(tmp_path / "a.sqsh"), tmp_path / "local" / "a-1.sqsh"
    code, message = stage(source, target, df="echo Avail; echo 5")
    assert (code, entries(target.parent)) == (1, [])
    assert message == f"n1: no room in {target.parent} for {source}: 8 bytes, and 5 are free\n"
    old, recent = image(target.parent / "old.sqsh"), image(target.parent / "recent.sqsh")
    os.utime(old, (1, 1))
    code, message = stage(source, target, df=f"echo Avail; [[ -e {old} ]] && echo 5 || echo 9")
    assert (code, message) == (0, "")
    assert sorted(entries(target.parent)) == ["a-1.sqsh", "recent.sqsh"]
    assert recent.exists()


@pytest.mark.parametrize(
    ("cp", "words"),
    [
        ('head -c 3 "$2" >"$3"', "changed while it was copied"),
        ('head -c 3 "$2" >"$3"; echo "cp: no space left" >&2; exit 1', "could not be copied"),
        ('head -c 3 "$2" >"$3"; kill -s TERM "$PPID"; sleep 0.1', ""),
    ],
    ids=["shorter", "fails", "ended"],
)
def test_incomplete_copy_is_not_kept(tmp_path: Path, cp: str, words: str) -> None:
    source, target = image(tmp_path / "a.sqsh"), tmp_path / "local" / "a-1.sqsh"
    code, message = stage(source, target, cp=cp)
    assert code in (1, 143)
    assert words in message
    assert entries(target.parent) == []


def test_copy_of_a_killed_job_is_written_anew(tmp_path: Path) -> None:
    source, target = image(tmp_path / "a.sqsh"), tmp_path / "local" / "a-1.sqsh"
    target.parent.mkdir()
    image(target.parent / ".a-1.sqsh.new", "half")
    image(target, "torn")  # by somebody's hand
    assert stage(source, target) == (0, "")
    assert (target.read_text(), entries(target.parent)) == ("an image", ["a-1.sqsh"])


def test_another_state_of_the_source_is_not_taken_for_this_one(tmp_path: Path) -> None:
    source, target = image(tmp_path / "a.sqsh"), tmp_path / "local" / "a-1.sqsh"
    code, message = stage(source, target, state="8 1")
    assert (code, entries(target.parent)) == (1, [])
    assert "changed while it was copied" in message


def test_existing_copy_is_used_while_its_lock_is_held(tmp_path: Path) -> None:
    source, target = image(tmp_path / "a.sqsh"), tmp_path / "local" / "a-1.sqsh"
    target.parent.mkdir()
    image(target)
    os.utime(target, (1, 1))
    with (target.parent / ".a-1.sqsh.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert stage(source, target) == (0, "")
    assert target.stat().st_mtime > 1, "what is in use is not removed"


def test_simultaneous_jobs_copy_once(tmp_path: Path) -> None:
    source, target = image(tmp_path / "a.sqsh"), tmp_path / "local" / "a-1.sqsh"
    count = f'echo >>{tmp_path}/copies; sleep 0.2; exec /bin/cp "$@"'
    stage(image(tmp_path / "b.sqsh"), tmp_path / "local" / "b-1.sqsh", cp=count)
    (tmp_path / "copies").unlink()
    status = source.stat()
    words = ["bash", STAGE, source, target, f"{status.st_size} {int(status.st_mtime)}"]
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    processes = [subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL) for _ in range(5)]
    assert [process.wait() for process in processes] == [0] * 5
    assert (tmp_path / "copies").read_text() == "\n"
    assert target.read_text() == "an image"


# --- Apptainer


def test_apptainer_starts_the_task_with_mounts_and_the_images_variables(tmp_path: Path) -> None:
    shared = image(tmp_path / "nemo.sqsh")
    apptainer_job = job(
        tmp_path,
        shared,
        "container_options.runtime=apptainer",
        "container_options.env=[KEPT]",
        f"container_mounts=['{tmp_path}:/data:ro+rbind']",
        "env_vars.KEPT=mine",
    )
    # Lines as an import and Debian write them; this file stands for the image's.
    text = 'KEPT=theirs\nUID=5\nno variable\nQUOTED="q"\nGREETING=it\'s $HOME'
    variables = image(tmp_path / "environment", text)
    task = apptainer_job.plan.paths.task_script
    assert "/etc/environment" in task.read_text()
    task.write_text(task.read_text().replace("/etc/environment", str(variables)))
    _, calls = apptainer_job.run()
    started = next(call for call in calls if call[0] == "apptainer")
    assert started[1:4] == ["exec", "--nv", "--no-mount=home,cwd"]  # as the cluster's srun_args have it
    assert f"--bind={tmp_path}:/data:ro" in started
    assert f"--bind={tmp_path}/results:{tmp_path}/results" in started
    assert started[started.index("bash") - 1] == str(shared)
    assert not any("container" in word for word in calls[0] if word.startswith("--"))
    (payload,) = (call for call in calls if call[0] == "payload")
    assert payload[1:3] == ["it's $HOME q", "mine"]


def test_apptainer_runs_the_entry_point_that_an_import_keeps(tmp_path: Path) -> None:
    options = [f"container_options.{option}=True" for option in ("entrypoint", "writable", "remap_root")]
    _, calls = job(
        tmp_path, image(tmp_path / "nemo.sqsh"), "container_options.runtime=apptainer", *options
    ).run()
    started = next(call for call in calls if call[0] == "apptainer")
    assert {"--writable-tmpfs", "--fakeroot"} <= set(started)
    assert started[started.index("bash") - 2 :][:2] == ["/bin/sh", "/etc/rc"]


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=names, workdir=hostile, pattern=nasty)
def test_hostile_values_reach_apptainer_as_they_are(
    tmp_path: Path, name: str, workdir: str, pattern: str
) -> None:
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    shared = image(base / f"x{name[:80]}.sqsh")
    _, calls = job(
        base,
        shared,
        "container_options.runtime=apptainer",
        f"container_options.workdir={hydra_value(f'/{workdir}')}",
        argument=pattern,
    ).run()
    started = next(call for call in calls if call[0] == "apptainer")
    assert {str(shared), f"--pwd=/{workdir}"} <= set(started)
    (payload,) = (call for call in calls if call[0] == "payload")
    assert payload[-1] == pattern
    assert not list(base.rglob("canary*"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["container_options.runtime=apptainer"], ["container_options.runtime=apptainer", "launch --build"]),
        (["container_options.stage_to=/local"], ["container_options.stage_to='/local'", "launch --build"]),
        (["container=/x.sqsh", "container_options.stage_to=local"], ["a whole path is needed"]),
        (
            ["container=/x.sqsh", "container_options.runtime=apptainer", "container_options.name=nemo"],
            ["container_options.name='nemo'", "container_options.runtime=pyxis"],
        ),
        (["container_options.runtime=docker"], ["container_options.runtime='docker'", "'apptainer'"]),
    ],
)
def test_impossible_requests_are_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        plan_launch(compose(["cluster=bcm", *overrides]).config, number=1, tag="x")
    assert all(word in str(raised.value) for word in words), str(raised.value)
