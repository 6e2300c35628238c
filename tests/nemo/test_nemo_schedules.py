"""The learning rates that our schedules are held against are what NeMo's own schedulers give."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.nemo.conftest import HERE, Nemo

GOLDEN = HERE.parent / "trainer" / "data" / "nemo_schedules.json"


@pytest.mark.timeout(600)
def test_golden_file_has_the_rates_of_nemo(nemo: Nemo, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    command = [nemo.python, HERE / "record_schedules.py", again]
    environment = {**os.environ, "PYTHONPATH": str(HERE / "cpu")}
    subprocess.run(command, env=environment, capture_output=True, timeout=300, check=True)
    recorded, golden = json.loads(again.read_text()), json.loads(GOLDEN.read_text())
    assert len(recorded) == len(golden)
    for ours, theirs in zip(golden, recorded, strict=True):
        # A cosine's last bit is the mathematics library's.
        assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-15, abs=1e-19)
        assert {**ours, "rates": None} == {**theirs, "rates": None}
