"""The example in docs/architecture.md of a detector: the supervisor with it ends tasks whose loss is NaN."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from launcher.monitor.history import diagnose
from launcher.rendering.supervision import supervisor_archive
from launcher.schedulers.job_status import status_of_attempt
from slipway.common.node.marks import chain_end, read_attempts
from tests.resilience.scripted_chain import COMMANDS, ScriptedChain, write_chain

DIVERGES = """
trap 'exit 75' USR1
for step in {1..200}; do sleep 0.1; printf '{"kind": "train", "step": %%s, "loss": NaN}\\n' $step >>%s; done
"""


def supervisor_with_example(repository: Path, tmp_path: Path, **values: str) -> bytes:
    """Follow the guide in a copy of the supervisor, with other values in the example."""
    page = (repository / "docs/architecture.md").read_text()
    guide = page.partition("## How to add a detector")[2].partition("\n## ")[0]
    module, line = (textwrap.dedent(block) for block in re.findall(r" +```python\n(.*?) +```", guide, re.S))
    assert len(module.splitlines()) <= 30
    for name, value in {"every": "0.1", **values}.items():
        module, count = re.subn(rf"\b{name}=[\w.]+", f"{name}={value}", module)
        assert count == 1
    package = tmp_path / "copy/slipway/supervisor"
    shutil.copytree(repository / "slipway", package.parent)
    (package / "watch_loss.py").write_text(module)
    table = package / "detectors.py"
    lines = table.read_text().splitlines()
    name = line.partition(":")[0]
    (at,) = [number for number, each in enumerate(lines) if each.startswith(f"{name}: ")]
    lines[at] = f"from slipway.supervisor.watch_loss import watch_loss\n\n{line}"
    table.write_text("\n".join(lines))
    return supervisor_archive(package)


def diverging_chain(tmp_path: Path, archive: bytes, *overrides: str) -> ScriptedChain:
    chain = write_chain(tmp_path, *overrides)
    (chain.directory / "supervisor.pyz").write_bytes(archive)
    metrics = json.loads((chain.directory / "supervisor.json").read_text())["metrics"]
    assert metrics == str(chain.plan.paths.metrics)
    chain.plan.paths.results.mkdir(exist_ok=True)
    # As srun does, it passes signals on.
    chain.replace_command("srun", COMMANDS["srun"].replace('"$@"', 'exec "$@"'))
    chain.tasks(DIVERGES % metrics)
    return chain


@pytest.mark.parametrize(
    ("values", "verdict", "code"),
    [
        ({}, "stop", 143),
        ({"continues": "True"}, "continue", 143),
        ({"saves": "True"}, "stop", 1),  # its tasks leave with 75
    ],
)
def test_detector_ends_the_tasks_and_decides_for_the_chain(
    repository: Path, tmp_path: Path, values: dict[str, str], verdict: str, code: int
) -> None:
    archive = supervisor_with_example(repository, tmp_path, **values)
    chain = diverging_chain(tmp_path, archive)
    returned, output = chain.run()
    mark = chain.end_mark()
    why = "three losses in a row are NaN"
    assert (mark["rule"], mark["why"], mark["verdict"]) == ("nan_loss", why, verdict), output
    assert returned == mark["exit_code"] == code
    assert f"ends the tasks: {why}" in output
    end = chain_end(chain.directory)
    assert (end and end.why) == (why if verdict == "stop" else None)
    assert chain.calls_of("scancel") == (["scancel 18"] if verdict == "stop" else [])
    (attempt,) = read_attempts(chain.directory)
    assert status_of_attempt(attempt).why == why
    diagnosis = diagnose(attempt)
    assert diagnosis is not None
    assert (diagnosis.rule, diagnosis.verdict, diagnosis.first) == ("nan_loss", verdict, None)


def test_retries_of_a_detector_are_limited(repository: Path, tmp_path: Path) -> None:
    archive = supervisor_with_example(repository, tmp_path, continues="True")
    chain = diverging_chain(tmp_path, archive, "resilience.max_failures=1")
    _, output = chain.run()
    end = chain_end(chain.directory)
    assert end is not None, output
    assert end.why == "it ended without a new checkpoint: three losses in a row are NaN"


def test_detector_watches_a_command_without_slurm(repository: Path, tmp_path: Path) -> None:
    own = ["cluster=local", "stages=[command]", "command.argv=['true']", "resilience.links=1"]
    chain = diverging_chain(tmp_path, supervisor_with_example(repository, tmp_path), *own)
    assert chain.run(SLURM_JOB_ID="")[0] == 143
    (attempt,) = read_attempts(chain.directory)
    assert (attempt.rule, attempt.verdict, attempt.signal) == ("nan_loss", "stop", None)
