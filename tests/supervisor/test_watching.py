"""A job watches its training: alerts go on record, reach people, and may end the tasks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slipway.watch.alerts import OPENED, RESOLVED, Message, read_messages
from tests.fakes.programs import write_program
from tests.resilience.scripted_chain import COMMANDS, ScriptedChain, write_chain

# A training of as many steps; `@` of a loss is the step.
TRAINS = """
trap 'exit 75' USR1
echo '{"kind": "start", "time": '$(date +%%s.%%N)', "step": 0, "max_steps": 1000}' >>%s
for step in {1..%s}; do
  sleep 0.02
  echo '{"kind": "train", "time": '$(date +%%s.%%N)', "step": '$step', "loss": %s, "grad_norm": 1.0}' >>%s
done
sleep %s
"""


def watched_chain(
    tmp_path: Path, watch: dict[str, Any], engine: str = "megatron", **tell: Any
) -> ScriptedChain:
    """Write a chain whose job looks ten times a second, and tells people with a program."""
    chain = write_chain(tmp_path)
    program = write_program(
        tmp_path / "tell", f'cat >>"{tmp_path}/told.jsonl"; echo >>"{tmp_path}/told.jsonl"'
    )
    path = chain.directory / "supervisor.json"
    settings = json.loads(path.read_text())
    settings |= {"engine": engine, "watch": watch, "tell": {"command": [str(program)], "every": 0.1, **tell}}
    path.write_text(json.dumps(settings))
    chain.plan.paths.results.mkdir(exist_ok=True)
    # As srun does, it passes signals on.
    chain.replace_command("srun", COMMANDS["srun"].replace('"$@"', 'exec "$@"'))
    return chain


def trains(chain: ScriptedChain, steps: int, loss: str = "3.0", pause: float | str = 0.0) -> None:
    metrics = chain.plan.paths.metrics
    chain.tasks(TRAINS % (metrics, steps, loss, metrics, pause))


def messages(chain: ScriptedChain) -> list[Message]:
    return read_messages(chain.plan.paths.run_dir)


def told(tmp_path: Path) -> list[str]:
    path = tmp_path / "told.jsonl"
    return [json.loads(line)["name"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(("reaction", "code"), [("stop", 143), ("save", 1)])
def test_a_loss_that_is_no_number_ends_the_job(tmp_path: Path, reaction: str, code: int) -> None:
    chain = watched_chain(tmp_path, {"non_finite": {"reaction": reaction}})
    trains(chain, 1000, loss="NaN")
    returned, output = chain.run()
    assert returned == code, output
    (message,) = messages(chain)  # one cause, one alert
    assert (message.detector, message.event, message.reaction) == ("non_finite", OPENED, reaction)
    assert (message.origin.launch, message.origin.link, message.origin.job) == (1, 1, "17")
    mark = chain.end_mark()
    assert (mark["rule"], mark["verdict"], mark["why"]) == ("non_finite", "stop", message.why)
    assert chain.calls_of("scancel") == ["scancel 18"]
    assert told(tmp_path) == ["non_finite-1.1"]


def test_a_reaction_may_hold_the_next_job_alone(tmp_path: Path) -> None:
    chain = watched_chain(tmp_path, {"non_finite": {"reaction": "hold"}})
    trains(chain, 40, loss="NaN", pause=0.5)
    _, output = chain.run()
    assert [call for call in chain.calls_of("scontrol") if "uhold" in call] == ["scontrol uhold 18"], output
    assert "holds job 18" in output


def test_an_alert_is_resolved_and_a_healthy_training_has_none(tmp_path: Path) -> None:
    chain = watched_chain(tmp_path, {"no_step": {"factor": 10, "least": 0.5, "pause": 0.5}})
    metrics = chain.plan.paths.metrics
    step = '{"kind": "train", "time": \'$(date +%s.%N)\', "step": \'$step\', "loss": 3.0}'
    chain.tasks(f"""
echo '{{"kind": "start", "time": '$(date +%s.%N)', "step": 0, "max_steps": 60}}' >>{metrics}
for step in {{1..60}}; do sleep 0.02; [ $step = 40 ] && sleep 2; echo '{step}' >>{metrics}; done
sleep 0.3
""")
    _, output = chain.run()
    events = [(each.alert, each.event) for each in messages(chain) if each.detector == "no_step"]
    assert events == [("no_step-1", OPENED), ("no_step-1", RESOLVED)], output
    assert [name for name in told(tmp_path) if name.startswith("no_step")] == ["no_step-1.1", "no_step-1.2"]
    assert {each.detector for each in messages(chain)} <= {"no_step", "ended"}


@pytest.mark.parametrize(
    ("tasks", "verdict", "expected"),
    [
        ("exit 3", "stop", ["ended-1.1"]),  # our trainer's, for a loss that is no number
        ("echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; exit 1", "continue", []),  # a link follows
        ("exit 0", "done", []),
    ],
)
def test_the_end_of_a_run_that_is_not_done_is_told(
    tmp_path: Path, tasks: str, verdict: str, expected: list[str]
) -> None:
    chain = watched_chain(tmp_path, {})
    chain.tasks(tasks)
    chain.run()
    mark = chain.end_mark()
    assert mark["verdict"] == verdict
    assert [each.name for each in messages(chain)] == told(tmp_path) == expected
    assert all(mark["why"] in each.why for each in messages(chain))


def test_a_run_that_somebody_cancels_ends_its_alerts_and_opens_none(tmp_path: Path) -> None:
    chain = watched_chain(tmp_path, {})
    trains(chain, 40, loss="NaN", pause="0.5; exit 143")
    _, output = chain.run(STATE="JobState=CANCELLED Reason=None PreemptTime=None")
    assert chain.end_mark()["rule"] == "cancelled", output
    events = [(each.detector, each.event) for each in messages(chain)]
    assert events == [("non_finite", OPENED), ("non_finite", RESOLVED)], output


def test_a_delivery_that_the_end_of_the_tasks_meets_is_made_once(tmp_path: Path) -> None:
    chain = watched_chain(tmp_path, {"non_finite": {"reaction": "stop"}})
    with (tmp_path / "tell").open("a") as program:
        program.write("sleep 2\n")  # it has told, and is not over
    trains(chain, 1000, loss="NaN")
    script = chain.plan.paths.task_script
    script.write_text(script.read_text().replace("trap", "trap 'sleep 1; exit 143' TERM\ntrap", 1))
    _, output = chain.run()
    assert told(tmp_path) == ["non_finite-1.1"], output
    assert "its messages" not in output


def test_a_receiver_that_hangs_holds_up_neither_tasks_nor_link(tmp_path: Path) -> None:
    chain = watched_chain(tmp_path, {}, command=["/bin/sleep", "60"], timeout=30.0)
    trains(chain, 40, loss="NaN", pause=0.5)
    began = time.monotonic()
    _, output = chain.run()
    assert time.monotonic() - began < 30, output
    # It is in the outbox, for whoever comes next.
    assert "non_finite-1.1" in [each.name for each in messages(chain)], output


def test_the_steps_of_megatron_lm_are_read_from_the_log(tmp_path: Path) -> None:
    chain = watched_chain(tmp_path, {}, engine="megatron_lm")
    line = " iteration %8d/ 1000 | consumed samples: %12d | elapsed time per iteration (ms): 20.0"
    line += " | learning rate: 1.0E-04 | global batch size: 8 | lm loss: %s | grad norm: 1.0 |"
    chain.tasks(f"""
for step in {{1..60}}; do
  sleep 0.02
  loss=3.0E+00; [ $step -gt 30 ] && loss=nan
  printf ' [%(%Y-%m-%d %H:%M:%S)T]'; printf '{line}\\n' $step $((8 * step)) $loss
done
sleep 0.5
""")
    _, output = chain.run()
    (opened,) = (each for each in messages(chain) if each.name == "non_finite-1.1")
    assert opened.step == 31, output
