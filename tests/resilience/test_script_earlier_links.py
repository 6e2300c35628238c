"""A link that begins while an earlier one is still there, as after `scontrol update dependency=`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.paths import submitted_name
from slipway.common.node import marks
from tests.resilience.scripted_chain import TAG, ScriptedChain, write_chain


def begun_chain(tmp_path: Path, state: str) -> ScriptedChain:
    """Return a chain whose first link, job 16, is in the queue until it was asked for twice."""
    chain = write_chain(tmp_path)
    marks.claim(chain.directory, "16")
    marks.claim(chain.directory, "17", 2)
    marks.leave(chain.directory, "16.0", marks.STARTED, TAG, {"started": 1, "nodes": "n1,n2", "link": 1})
    line = f"16|{state}|(null)|{submitted_name(chain.plan.paths.script, TAG, 1)}"
    ended = chain.plan.paths.marks / "16.0.ended.json"
    end = '{"job_id": "16", "exit_code": 75, "ended": 2, "verdict": "continue", "why": "it saved and left"}'
    chain.replace_command(
        "squeue",
        f"""[[ $* != *=%T* ]] || {{ echo RUNNING; exit; }}
if [[ {state} == PENDING || ! -e $0.asked ]]; then touch $0.asked; echo "{line}"; exit; fi
echo '{end}' >{ended}""",
    )
    return chain


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED"])
def test_link_waits_for_an_earlier_one_that_slurm_still_runs(tmp_path: Path, state: str) -> None:
    chain = begun_chain(tmp_path, state)
    chain.tasks("exit 75")
    code, output = chain.run("2", TAG, BEFORE="COMPLETED")
    word = f"waits for the end of job 16, which is {state}: its own dependency is lost"
    assert (code, word in output) == (75, True), output
    assert "left no word" not in output
    first, second = marks.read_attempts(chain.directory)
    assert (first.why, second.verdict) == ("it saved and left", "continue")
    assert marks.chain_end(chain.directory) is None
    assert len(chain.submissions()) == 1


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUE_HOLD"])
def test_link_judges_no_other_that_has_not_ended(tmp_path: Path, state: str) -> None:
    """The one before was requeued, and waits for this one; or squeue does not answer."""
    chain = begun_chain(tmp_path, "PENDING")
    chain.tasks("exit 75")
    code, output = chain.run("2", TAG, BEFORE=state)
    assert (code, "left no word" in output, "end of job 16" in output) == (75, False, False), output
    assert not (chain.plan.paths.marks / "16.0.ended.json").exists()
    assert marks.chain_end(chain.directory) is None
