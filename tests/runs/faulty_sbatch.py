"""A faulty sbatch in front of the real one: the failures that occur between a launcher and the controller."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

# The wrapper's code for one submission. `accept` hands it to the real sbatch, whose answer it keeps.
FAULTS: Mapping[str, str] = {
    "fine": 'accept "$@"; cat "$answer"',
    # The controller has the job, and the answer is lost.
    "timeout": 'accept "$@"; fail "Socket timed out on send/recv operation"',
    "killed": 'accept "$@"; kill -KILL $$',
    "terminated": 'accept "$@"; exit 143',
    "empty": 'accept "$@"; exit 0',
    "garbage": 'accept "$@"; echo "this is job 3 of 5"; exit 0',
    "binary": r"""accept "$@"; printf '\xff\xfe\n'; exit 0""",
    "hook": 'accept "$@"; echo "sbatch: warning: be nice" >&2; echo "Traceback" >&2; exit 1',
    "told": '"$real" "$@" | tee -a "$here/accepted"; fail "a hook of the site: invalid partition"',
    # The controller has no job.
    "unreachable": 'fail "Unable to contact slurm controller (connect failure)"',
    "before": "kill -KILL $$",
    # The controller takes the job only later, when it may have been submitted again.
    "late": 'later 1.5 "$@"; fail "Socket timed out on send/recv operation"',
    "very_late": 'later 5 "$@"; fail "Socket timed out on send/recv operation"',
    # The controller takes the first submission while the second is on its way: two jobs, and no answer yet.
    "overtaken": 'overtaken "$@" </dev/null >/dev/null 2>&1 & fail "Socket timed out on send/recv operation"',
    "overtaking": 'touch "$here/go"; until [[ -s $here/accepted ]]; do sleep 0.1; done; '
    'accept "$@"; cat "$answer"',
    # The controller takes the job at a moment that the test chooses.
    "stopping": 'touch "$here/stopped"; until [[ -e $here/go ]]; do sleep 0.1; done; '
    'SLURM_CONF=$REAL_SLURM_CONF accept "$@"; fail "Socket timed out on send/recv operation"',
    # The answer takes as long as the test wants.
    "slow": 'until [[ -e $here/go ]]; do sleep 0.1; done; accept "$@"; cat "$answer"',
    "for_ever": 'echo for_ever >>"$here/faults"; fail "Unable to contact slurm controller (connect failure)"',
}

# The faults after which the job exists.
SUBMITTED_AT_ONCE = {"fine", "timeout", "killed", "terminated", "empty", "garbage", "binary", "hook", "told"}
# The faults that lead to no job.
LEADING_NOWHERE = {"unreachable", "before", "for_ever"}

_SCRIPT = """\
#!/bin/bash
real={real}
case " $* " in *" --test-only "*) exec "$real" "$@" ;; esac
# Without a trap bash lives on if its child just ended by itself; the real sbatch would not.
trap 'trap - INT; kill -INT $$' INT
here=${{FAULTS:?}} answer=$FAULTS/answer.$$
echo "$*" >>"$here/calls"
accept() {{ "$real" "$@" >"$answer" && cat "$answer" >>"$here/accepted"; }}
later() {{ (sleep "$1"; shift; accept "$@") </dev/null >/dev/null 2>&1 & }}
overtaken() {{ until [[ -e $here/go ]]; do sleep 0.1; done; accept "$@"; }}
fail() {{ echo "sbatch: error: Batch job submission failed: $1" >&2; exit 1; }}
fault=$(head -n 1 "$here/faults")
sed -i 1d "$here/faults"
case ${{fault:-fine}} in
{cases}
esac
"""


def install(programs: Path) -> None:
    """Write the wrapper as `programs`/sbatch; ``$FAULTS`` is a directory of `plan`."""
    programs.mkdir()
    cases = "\n".join(f"{name}) {body} ;;" for name, body in FAULTS.items())
    wrapper = programs / "sbatch"
    wrapper.write_text(_SCRIPT.format(real=shutil.which("sbatch"), cases=cases))
    wrapper.chmod(0o755)


def plan(directory: Path, faults: Sequence[str]) -> Path:
    """Set the faults of one launcher's submissions, one after the other; later ones are fine."""
    assert set(faults) <= set(FAULTS)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "faults").write_text("".join(f"{fault}\n" for fault in faults))
    (directory / "accepted").touch()
    return directory


def accepted_jobs(directory: Path) -> list[str]:
    """Return the ids of the jobs that the controller took, in order; the launcher did not hear of some."""
    return [line.split()[-1] for line in (directory / "accepted").read_text().splitlines()]


def calls(directory: Path) -> int:
    path = directory / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0
