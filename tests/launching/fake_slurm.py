"""An sbatch that takes every job and records its calls; job ids count from 101."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# `calls` has a line for each call, in order; `refuse` and `judge` hold the words that are refused.
_SBATCH = """#!/bin/bash
here={here}
if [[ $1 == --test-only ]]; then
    script=$(grep '^#SBATCH' "$2")
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
    """A stand-in for sbatch that records its calls, and refuses jobs on request."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("judge", "refuse", "calls"):
            (directory / name).touch()

    def refuse(self, *words: str) -> None:
        """Refuse submissions whose arguments contain one of these words."""
        (self.directory / "refuse").write_text("".join(f"{word}\n" for word in words))

    def judge(self, **reasons: str) -> None:
        """Refuse to test scripts that contain one of these words, each with its reason."""
        (self.directory / "judge").write_text(
            "".join(f"{word} {reason}\n" for word, reason in reasons.items())
        )

    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()

    def submitted(self) -> list[str]:
        """Return the arguments of each submission, without directories."""
        lines = [line.removeprefix("submitted ") for line in self.calls() if line.startswith("submitted ")]
        return [" ".join(word.rpartition("/")[2] for word in line.split()) for line in lines]


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put the sbatch first in PATH, for tests in which no job needs to run."""
    programs, directory = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    directory.mkdir()
    (programs / "sbatch").write_text(_SBATCH.format(here=directory))
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (programs / "python").write_text("#!/bin/bash\necho missing:\n")  # reports no missing module
    (programs / "python").chmod(0o755)
    (tmp_path / "slurm.conf").touch()
    return FakeSlurm(directory)


def overrides(tmp_path: Path, *more: str) -> list[str]:
    """Return the overrides of a tiny training on Slurm, whose interpreter does nothing."""
    # Mock data cannot be missing, though no stage prepares any; a preparation alone has no such key.
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
    """Return the overrides of the training after the preparation of its text."""
    text = tmp_path / "text.txt"
    text.write_text("text\n")
    stage_overrides = ["stages=[data_preparation,training]", f"data_preparation.inputs=[{text}]"]
    return overrides(tmp_path, *stage_overrides, *more)
