"""The judge as the job has it, in bash, for many ends at once."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launcher.failures.rules import rules_file
from tests.failures.failure_samples import Sample

Verdicts = list[tuple[str, str, tuple[str, ...], str]]


@pytest.fixture
def judge_in_bash(tmp_path: Path, repository: Path) -> Callable[[Sequence[Sample]], Verdicts]:
    """Judge samples with the script's own functions: rule, verdict, the nodes at fault and the sentence."""
    (tmp_path / "rules.tsv").write_text(rules_file(), encoding="utf-8")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sinfo").write_text('#!/bin/bash\n[[ $DOWN ]] || exit 1\necho "$DOWN down*"\n')
    (programs / "sinfo").chmod(0o755)

    def judge(samples: Sequence[Sample]) -> Verdicts:
        script = [
            "set -euo pipefail",
            f"source {shlex.quote(str(repository / 'templates' / 'judging.sh'))}",
            f"PATH={shlex.quote(str(programs))}:$PATH",
        ]
        for number, sample in enumerate(samples):
            failures, log = tmp_path / f"failures{number}", tmp_path / f"{number}.out"
            failures.mkdir()
            if sample.left:
                (failures / "globalrank-0.json").write_text(f"{sample.left}\n", encoding="utf-8")
            log.write_text(sample.log, encoding="utf-8", newline="")
            sources = shlex.join(("1000", str(failures), str(log), "no-such-log.err"))
            words = (str(tmp_path / "rules.tsv"), str(sample.facts), " ".join(sample.hosts))
            script += [
                f"export DOWN={shlex.quote(' '.join(sample.down))}",
                f"evidence {sources} >evidence",
                f"judge {shlex.join(words)} {sample.tasks_per_node} evidence",
                'printf "%s\\t%s\\t%s\\t%s\\n" "$rule" "$verdict" "$blamed" "$means"',
            ]
        done = subprocess.run(
            ["bash"], input="\n".join(script), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        return [(rule, verdict, tuple(blamed.split()), means) for rule, verdict, blamed, means in rows]

    return judge
