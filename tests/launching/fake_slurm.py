"""An sbatch that takes every job and writes down how it was called: ids count from 101."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Of one line each: what was asked for and in which order. `refuse` and `judge` hold words that are refused.
_SBATCH = """#!/bin/bash
here={here}
if [[ $1 == --test-only ]]; then
    script=$(grep '^#SBATCH')
    name=$(sed -n 's/^#SBATCH --job-name=//p' <<<"$script")
    echo "judged $name $(sed -n 's/^#SBATCH --exclude=//p' <<<"$script")" >>"$here/calls"
    while read -r word reason; do
        [[ $script == *"$word"* ]] || continue
        echo "allocation failure: $reason" >&2
        exit 1
    done <"$here/judge"
    exit 0
fi
echo "submitted $*" >>"$here/calls"
while read -r word; do
    [[ " $* " == *"$word"* ]] || continue
    echo "sbatch: error: Batch job submission failed: no $word" >&2
    exit 1
done <"$here/refuse"
echo "Submitted batch job $((100 + $(grep -c ^submitted "$here/calls")))"
"""


class FakeSlurm:
    """A stand-in for sbatch that records its calls, and refuses as told."""

    def __init__(self, here: Path) -> None:
        self.here = here
        for name in ("judge", "refuse", "calls"):
            (here / name).touch()

    def refuse(self, *words: str) -> None:
        """Refuse to take submissions whose arguments have one of these in them."""
        (self.here / "refuse").write_text("".join(f"{word}\n" for word in words))

    def judge(self, **reasons: str) -> None:
        """Refuse, with a reason each, scripts with these words in them when they are shown."""
        (self.here / "judge").write_text("".join(f"{word} {reason}\n" for word, reason in reasons.items()))

    def calls(self) -> list[str]:
        return (self.here / "calls").read_text().splitlines()

    def submitted(self) -> list[str]:
        """The arguments of each submission, without directories."""
        lines = [line.removeprefix("submitted ") for line in self.calls() if line.startswith("submitted ")]
        return [" ".join(word.rpartition("/")[2] for word in line.split()) for line in lines]


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put it first in PATH; tests with such an sbatch are those that no job needs to run for."""
    programs, here = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    here.mkdir()
    (programs / "sbatch").write_text(_SBATCH.format(here=here))
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (programs / "python").write_text("#!/bin/bash\necho missing:\n")  # asked what it has not: nothing
    (programs / "python").chmod(0o755)
    (tmp_path / "slurm.conf").touch()
    return FakeSlurm(here)


def overrides(tmp_path: Path, *more: str) -> list[str]:
    """A tiny training that Slurm is to run, whose interpreter is one that does nothing."""
    # Nothing is missed of data that nobody prepares; a preparation alone has no such key.
    mock = [] if "stages=[data_preparation]" in more else ["training.model.data.data_impl=mock"]
    return [
        "training=gpt3/tiny",
        "cluster=sandbox",
        f"cluster.slurm_conf={tmp_path}/slurm.conf",
        f"cluster.python={tmp_path}/bin/python",
        f"base_results_dir={tmp_path}/results",
        *mock,
        *more,
    ]


def stages(tmp_path: Path, *more: str) -> list[str]:
    """The preparation of its text before it."""
    text = tmp_path / "text.txt"
    text.write_text("text\n")
    both = ["stages=[data_preparation,training]", f"data_preparation.inputs=[{text}]"]
    return overrides(tmp_path, *both, *more)
