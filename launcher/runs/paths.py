"""The paths and file names of a run, all in one place.

A run directory, with the names that users of the NeMo Megatron launcher know (links to the newest launch)::

    <base_results_dir>/gpt3_126m/
    ├── gpt3_126m_hydra.yaml, launcher_cmd.log, launcher.log, launcher.json, results/, ...
    ├── newest                  the launch that these names show
    ├── checkpoints/            shared by all launches of the run
    ├── evaluations/            step-N.json: the results of its checkpoints
    ├── alerts.jsonl, alerts/   what went wrong, and who was told
    └── launches/1/, 2/, ...    what each launch was and wrote; never overwritten
        └── submitted/          the script once more for each job, under a name that contains its tag
"""

from __future__ import annotations

import contextlib
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from slipway.common.files import names_in
from slipway.common.node import settings as supervisor_settings
from slipway.common.node.marks import MARKS

LAUNCHES = "launches"
NEWEST = "newest"
MANIFEST = "launcher.json"
COMMAND_LOG = "launcher_cmd.log"
JOB_ID_LOG = supervisor_settings.SUBMISSION_LOG
TASK_SCRIPT = "task.sh"
ROOT_CONFIG = "root_config.yaml"
TEMPLATES = "templates"
CODE = "code"
# The package of the trainer and of data preparation, which each launch copies. It lies next to the
# launcher, in a checkout and in an installation.
PACKAGE = Path(__file__).resolve().parents[2] / "slipway"
RESULTS = "results"
CHECKPOINTS = "checkpoints"
EVALUATIONS = "evaluations"
SUBMITTED = "submitted"
SUPERVISOR = "supervisor.pyz"
SCRIPT_SUFFIX = "_submission.sh"
LARGEST_LAUNCH = 10**9 - 1
# No larger number: a directory called 20261126120000 is somebody's backup.
_NUMBER = re.compile("[1-9][0-9]{0,8}")
_SUBMITTED_NAME = re.compile(rf"(.+)\.[1-9][0-9]*{re.escape(SCRIPT_SUFFIX)}")


class _Below:
    """A path below that of another attribute of `LaunchPaths`."""

    def __init__(self, parent: str, name: str) -> None:
        self._parent, self._name = parent, name

    def __get__(self, paths: LaunchPaths, _owner: type[LaunchPaths]) -> Path:
        parent: Path = getattr(paths, self._parent)
        return parent / self._name


@dataclass(frozen=True, slots=True)
class LaunchPaths:
    """The files of one launch of a run; `job_name` is such as ``nemo-megatron-gpt3_126m``."""

    run_dir: Path
    run_name: str
    job_name: str
    number: int

    checkpoints = _Below("run_dir", CHECKPOINTS)
    evaluations = _Below("run_dir", EVALUATIONS)

    root_config = _Below("directory", ROOT_CONFIG)  # the whole configuration; the job reads `config`
    templates = _Below("directory", TEMPLATES)  # the user's own that the launch was rendered with
    task_script = _Below("directory", TASK_SCRIPT)
    binding = _Below("directory", "binding.sh")  # functions for the task script
    megatron_lm = _Below("directory", "megatron_lm.py")  # finds Megatron-LM's script in the job
    stage_image = _Below("directory", "stage_image.sh")  # copies the image to a node's own disk
    supervisor = _Below("directory", SUPERVISOR)
    supervisor_settings = _Below("directory", supervisor_settings.NAME)
    attach_script = _Below("directory", "attach.sh")  # what `slipway attach` runs on a node
    code = _Below("directory", CODE)
    manifest = _Below("directory", MANIFEST)
    marks = _Below("directory", MARKS)
    results = _Below("directory", RESULTS)
    metrics = _Below("results", "metrics.jsonl")
    profiles = _Below("results", "profile_logs")

    @property
    def directory(self) -> Path:
        return self.run_dir / LAUNCHES / str(self.number)

    @property
    def config_name(self) -> str:
        return f"{self.run_name}_hydra.yaml"

    @property
    def config(self) -> Path:
        return self.directory / self.config_name

    @property
    def file_name(self) -> str:
        """Return the job's name as a part of names of files."""
        return re.sub("[:@]", "-", self.job_name)

    @property
    def script_name(self) -> str:
        return f"{self.file_name}{SCRIPT_SUFFIX}"

    @property
    def script(self) -> Path:
        return self.directory / self.script_name

    @property
    def log_prefix(self) -> str:
        """Return the name of a log up to the job's id, which ``.out`` or ``.err`` follows."""
        return _log_prefix(self.file_name)

    def log(self, job_id: str, extension: str = "out") -> Path:
        """Return the log of a job, a task of an array or a link of a chain."""
        return self.directory / f"{self.log_prefix}{job_id}.{extension}"


def submitted_name(script: Path, tag: str, link: int = 1) -> Path:
    """Return the name under which a script is submitted, a link to it.

    Every version of Slurm shows the path of a job's script, and since 23.02 nothing else without
    accounting: the path therefore holds the launch's tag and the link of the chain.
    """
    return script.parent / SUBMITTED / f"{tag}.{link}{SCRIPT_SUFFIX}"


def submitted_tag(script: Path) -> str | None:
    """Return the tag of the launch that submitted a script, if its name has one."""
    match = _SUBMITTED_NAME.fullmatch(script.name) if script.parent.name == SUBMITTED else None
    return match[1] if match else None


def launch_dir_of(script: Path) -> Path:
    """Return the launch directory of a script, which may be named as it was submitted."""
    return script.parent.parent if script.parent.name == SUBMITTED else script.parent


def log_prefix_beside(script: Path) -> Path:
    """Return a log's path up to the job's id, for a scheduler that knows the job by its script alone."""
    return script.with_name(_log_prefix(script.name.removesuffix(SCRIPT_SUFFIX)))


def _log_prefix(file_name: str) -> str:
    return f"log-{file_name}_"


# The user's working directory, where the process has changed to another.
typed_in: Path | None = None


def display_path(path: Path) -> str:
    """Return a path as the user would type it in the working directory."""
    cwd = typed_in or Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def scripts_in(launch_dir: Path) -> list[Path]:
    """Return the job scripts of a launch; none where its directory cannot be read."""
    return [launch_dir / name for name in names_in(launch_dir) if name.endswith(SCRIPT_SUFFIX)]


def launch_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of the launches of a run, ascending; empty if there is no such run."""
    # No check before reading: each is a question to a file server, and the run may be gone afterwards.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = (entry.name for entry in (run_dir / LAUNCHES).iterdir())
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))
    return []


def next_launch_number(run_dir: Path) -> int:
    """Return the number of a run's next launch; raise UserError if all are used."""
    number = max(launch_numbers(run_dir), default=0)
    if number >= LARGEST_LAUNCH:
        raise UserError(
            f"{run_dir / LAUNCHES / str(number)}: no launch can have a larger number",
            hint="it is no launch of Slipway: move it",
        )
    return number + 1


def find_runs(base_results_dir: Path) -> list[Path]:
    """Return the readable run directories directly below `base_results_dir`, the last launched first."""
    runs: list[tuple[float, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in base_results_dir.iterdir():
            with contextlib.suppress(OSError):  # unreadable, or removed meanwhile
                status = (entry / LAUNCHES).stat()
                if stat.S_ISDIR(status.st_mode):
                    runs.append((status.st_mtime, entry))
    return [run for _, run in sorted(runs, reverse=True)]
