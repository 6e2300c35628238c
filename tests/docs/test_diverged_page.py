"""The commands of the page about divergence, run as written: a run that diverges, and each way out."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forked_slipway import write_slipway

RATE = 0.1


def steps(run: Path, launch: int) -> dict[int, tuple[float, float, float, int]]:
    lines = map(json.loads, (run / f"launches/{launch}/results/metrics.jsonl").read_text().splitlines())
    keys = ("loss", "grad_norm", "lr", "consumed_samples")
    return {line["step"]: tuple(line[key] for key in keys) for line in lines if line["kind"] == "train"}


@pytest.mark.trainer
@pytest.mark.slow
def test_each_way_out_of_a_divergence_is_walked(repository: Path, tmp_path: Path, warm_python: Path) -> None:
    page = (repository / "docs/diverged.md").read_text()
    script = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    # Processes that have imported torch before; nothing else differs from the page.
    script = re.sub(r"^slipway launch ", rf"\g<0>cluster.python={warm_python} ", script, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-eux", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{write_slipway(tmp_path / 'bin')}:{os.environ['PATH']}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    run = tmp_path / "results/gpt3_tiny"
    first, shuffled, skipped, slower, reset, undone = (steps(run, launch) for launch in range(1, 7))
    assert list(first) == list(range(1, 121))
    before, last = min(loss for loss, *_ in first.values()), 120
    assert before < 2.5 < 2 * before < first[last][0]
    for way in (shuffled, skipped, slower, reset, undone):
        assert list(way) == list(range(41, 121))
    # The data are not the cause: another order is another loss, and diverges too.
    assert shuffled[41][0] != first[41][0] and shuffled[41][1:3] != first[41][1:3]
    assert {step: skipped[step] for step in range(41, 46)} == {step: first[step] for step in range(41, 46)}
    assert skipped[46][3] == 1920 + 32
    assert "gpt3_tiny step 46: samples 1,920 to 1,951," in done.stdout
    assert "passed over: samples 1,440 to 1,919" in done.stdout
    assert min(shuffled[last][0], skipped[last][0]) > 2 * before
    # A tenth of the rate is survived, with the optimizer's states and without.
    assert all(slower[step][2] == RATE * first[step][2] for step in slower)
    assert [step for step, (_, _, rate, _) in reset.items() if rate == 0] == list(range(41, 51))
    assert all(reset[step][2] == slower[step][2] for step in range(51, 121))
    assert max(slower[last][0], reset[last][0]) < before < first[last][0] / 2
    assert undone == {step: first[step] for step in range(41, 121)}
