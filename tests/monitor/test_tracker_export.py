"""`slipway export` to the real libraries: each step once, one run over all launches, forks, and no secret."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import (
    COMPLETED,
    FAILED,
    RUNNING,
    FakeScheduler,
    Runs,
    append,
    end,
    start,
    train,
    validation,
    whole_training,
)

from launcher.cli import export
from launcher.cli.app import main
from launcher.monitor import export as exporting

Capsys = pytest.CaptureFixture[str]
Steps = dict[int, dict[str, float]]

# In parts, as a launch keeps what differs from the commit.
ENVIRONMENT, NAMED = "Kx7" + "qkZ99wTq", "swordfish" + "-1"
CONFIG = f"""\
training: {{model: {{hidden_size: 64, optim: {{lr: 0.001}}}}, trainer: {{max_steps: 300}}}}
env_vars: {{HF_TOKEN: {NAMED}, PLAIN: x {ENVIRONMENT}}}
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let both trackers write below a directory of the test alone."""
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_API_KEY", ENVIRONMENT)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield tmp_path
    if module := sys.modules.get("wandb"):
        module.teardown()  # it reads its variables once in a process


# --- readers of what the trackers hold


def records(path: Path) -> Iterator[Any]:
    """Yield the records of wandb's file, which has LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_runs(place: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, float]]]]:
    """Return the configurations and rows of the runs in wandb's files, by their names; each name once."""
    runs = {}
    for path in sorted(place.glob("wandb/offline-run-*/*.wandb")):
        rows, name, config = [], "", {}
        for record in records(path):
            if record.HasField("run"):
                name = record.run.display_name
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert record.run.run_group == "gpt3_tiny"
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        assert name not in runs
        runs[name] = (config, rows)
    return runs


def mlflow_runs(place: Path) -> dict[str, tuple[dict[str, str], dict[str, list[tuple[int, float]]]]]:
    """Return the tags and parameters, and the metrics as they were appended, of the runs by their names."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (experiment,) = (each for each in client.search_experiments() if each.name == "slipway")
    runs = {}
    for run in client.search_runs([experiment.experiment_id]):
        history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        metrics = {key: [(metric.step, metric.value) for metric in each] for key, each in history.items()}
        assert run.info.run_name not in runs
        runs[run.info.run_name] = ({**run.data.params, **run.data.tags, "id": run.info.run_id}, metrics)
    return runs


def exported_steps(to: str, place: Path) -> dict[str, Steps]:
    """Return the values of each run by their steps; no step twice."""
    runs: dict[str, Steps] = {}
    if to == "wandb":
        for name, (_, rows) in wandb_runs(place).items():
            runs[name] = {int(row["_step"]): row for row in rows}
            assert len(runs[name]) == len(rows)
        return runs
    for name, (_, metrics) in mlflow_runs(place).items():
        runs[name] = {}
        for key, points in metrics.items():
            assert len(dict(points)) == len(points), key
            for step, value in points:
                runs[name].setdefault(step, {})[key] = value
    return runs


def bring(to: str, *words: str) -> None:
    assert main(["export", "gpt3_tiny", "--to", to, *words]) == 0


both = pytest.mark.parametrize("to", ["wandb", "mlflow"])


# --- tests


@both
def test_links_and_launches_are_one_run_and_nothing_doubles(
    to: str, runs: Runs, scheduler: FakeScheduler, places: Path, capsys: Capsys
) -> None:
    first = runs.launch()
    (first / "root_config.yaml").write_text(CONFIG)
    # A link that crashed at step 60; the next one went on from the checkpoint of step 50.
    append(first, [*whole_training(0, 60)[:-1], start(50), *map(train, range(51, 71))])
    scheduler.set("11", FAILED)
    bring(to)
    assert f"{'gpt3_tiny'}: 70 new steps, up to 70: " in capsys.readouterr().out
    # A second launch went on from step 55, and saw step 75 with a validation.
    second = runs.launch(number=2, overrides=["training.run.time_limit=1:00:00"])
    events = [start(55), *map(train, range(56, 76)), validation(75, 5.5), *map(train, range(76, 81))]
    append(second, events)
    scheduler.set("12", RUNNING)
    bring(to)
    # The last step waits, as its validation may come.
    assert sorted(exported_steps(to, places)["gpt3_tiny"]) == list(range(1, 80))
    append(second, [validation(80, 5.25), end(80, 2000.0)])
    scheduler.set("12", COMPLETED)
    for _ in range(2):
        bring(to)
    (steps,) = exported_steps(to, places).values()
    assert sorted(steps) == list(range(1, 81))
    assert {key: value for key, value in steps[80].items() if not key.startswith("_")} == {
        "train/loss": train(80)["loss"],
        "train/learning_rate": 6e-4,
        "train/grad_norm": 1.5,
        "train/tokens_per_second": 4096.0,
        "validation/loss": 5.25,
    }
    assert steps[75]["validation/loss"] == 5.5
    if to == "wandb":
        assert steps[80]["_timestamp"] == train(80)["time"]
    assert "80" in capsys.readouterr().out.splitlines()[-1]


@both
def test_a_run_that_went_back_forks(to: str, runs: Runs, scheduler: FakeScheduler, places: Path) -> None:
    append(runs.launch(), whole_training(0, 100))
    back = "training.resume.checkpoint=step=40"
    append(runs.launch(number=2, overrides=[back]), [start(40), *map(train, range(41, 61))])
    # The same intervention again: the second launch's training goes on.
    append(runs.launch(number=3, overrides=[back]), [start(50), *map(train, range(51, 71))])
    other = {"launch": 3, "changes": [{"key": "training.model.optim.lr", "old": 1, "new": 2}]}
    append(runs.launch(number=4, overrides=[back], differs=other), [start(65), train(66)])
    # Another length, from the end of what came before.
    append(runs.launch(number=5, overrides=["x=1"]), [start(66), train(67)])
    for number in range(1, 6):
        scheduler.set(str(10 + number), COMPLETED)
    for _ in range(2):
        bring(to)
    expected = {
        "gpt3_tiny": range(1, 101),
        "gpt3_tiny from step 40, launch 2": range(41, 71),
        "gpt3_tiny from step 65, launch 4": [66],
        # To leave out `training.resume` is to intervene, too, but nothing went back.
    }
    found = exported_steps(to, places)
    expected["gpt3_tiny from step 65, launch 4"] = [66, 67]
    assert {name: sorted(steps) for name, steps in found.items()} == {
        name: list(steps) for name, steps in expected.items()
    }
    names = list(expected)
    if to == "wandb":
        ours = {name: config["slipway"] for name, (config, _) in wandb_runs(places).items()}
        files = places.glob("wandb/offline-run-*/*.wandb")
        keys = {path.stem.removeprefix("run-") for path in files}
        assert {ours[name]["parent"] for name in names[1:]} < keys
        assert [ours[name].get("parent_step") for name in names] == [None, 40, 65]
    else:
        tags = {name: tags for name, (tags, _) in mlflow_runs(places).items()}
        assert [tags[name].get("slipway.parent_step") for name in names] == [None, "40", "65"]
        assert [tags[name].get("mlflow.parentRunId") for name in names[1:]] == [
            tags[name]["id"] for name in names[:2]
        ]


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of mlflow's own code
@both
def test_configuration_and_provenance_are_there_and_no_secret_is(
    to: str,
    runs: Runs,
    scheduler: FakeScheduler,
    places: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{places}/mlflow.db")  # as is its default
    words = ["slipway", "launch", f"env_vars.HF_TOKEN={NAMED}"]
    launch = runs.launch(command=words, image=f"docker://me:{NAMED}@registry.example#x/y:1")
    (launch / "root_config.yaml").write_text(CONFIG)
    append(launch, whole_training(0, 3))
    scheduler.set("11", COMPLETED)
    bring(to)
    if to == "wandb":
        ((config, _),) = wandb_runs(places).values()
        assert config["training"]["model"]["optim"]["lr"] == 0.001
        assert (config["slipway"]["user"], config["slipway"]["jobs"]) == ("u", ["11"])
        assert config["env_vars"] == {"HF_TOKEN": "***", "PLAIN": "x ***"}
    else:
        ((params, _),) = mlflow_runs(places).values()
        assert params["training.model.optim.lr"] == "0.001"
        assert (params["slipway.user"], params["slipway.launch"]) == ("u", "1")
        assert (params["env_vars.HF_TOKEN"], params["env_vars.PLAIN"]) == ("***", "x ***")
    files = [path for path in places.rglob("*") if path.is_file() and "results" not in path.parts]
    assert any(path.suffix in (".wandb", ".db") for path in files)
    for secret in (ENVIRONMENT, NAMED):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert ENVIRONMENT not in capsys.readouterr().out


def test_an_export_to_mlflow_that_was_interrupted_doubles_nothing(
    runs: Runs, scheduler: FakeScheduler, places: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    append(runs.launch(), whole_training(0, 300))
    scheduler.set("11", COMPLETED)
    send, calls = MlflowClient.log_batch, []

    def fail_once(client: MlflowClient, run_id: str, metrics: Any = (), **options: Any) -> None:
        if metrics:
            calls.append(len(metrics))
            if len(calls) == 2:
                send(client, run_id, metrics=metrics[:77])
                raise MlflowException("https://me:hunter2secret@tracker.example does not answer")
        send(client, run_id, metrics=metrics, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", fail_once)
    assert main(["export", "gpt3_tiny", "--to", "mlflow"]) == 1
    message = capsys.readouterr().err
    assert "slipway: mlflow: https://me:***@tracker.example does not answer" in message
    assert "the same command goes on" in message
    bring("mlflow")
    (steps,) = exported_steps("mlflow", places).values()
    assert sorted(steps) == list(range(1, 301))
    assert all(len(values) == 4 + (step % 25 == 0) for step, values in steps.items())


@pytest.mark.parametrize(
    ("to", "name"), [("wandb", "WANDB_BASE_URL"), ("mlflow", "MLFLOW_TRACKING_URI")], ids=["wandb", "mlflow"]
)
def test_a_tracker_that_does_not_answer_is_named(
    to: str, name: str, runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    append(runs.launch(), whole_training(0, 3))
    scheduler.set("11", COMPLETED)
    monkeypatch.setenv(name, f"http://me:{NAMED}@127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(exporting, "_BEGIN_SECONDS", 2)
    assert main(["export", "gpt3_tiny", "--to", to]) == 1
    message = capsys.readouterr().err
    assert f"slipway: {to}: " in message
    assert NAMED not in message
    assert "Traceback" not in message


@both
def test_follow_goes_on_until_the_job_has_ended(
    to: str, runs: Runs, scheduler: FakeScheduler, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = runs.launch()
    append(launch, [start(), *map(train, range(1, 11))])
    scheduler.set("11", RUNNING, RUNNING, RUNNING, COMPLETED)
    scheduler.events = {
        2: lambda: append(launch, [validation(10, 5.0), *map(train, range(11, 21))]),
        4: lambda: append(launch, [validation(20, 4.5), end(20, 2000.0)]),
    }
    monkeypatch.setattr(export, "_SECONDS", 0.01)
    bring(to, "--follow")
    (steps,) = exported_steps(to, places).values()
    assert sorted(steps) == list(range(1, 21))
    assert (steps[10]["validation/loss"], steps[20]["validation/loss"]) == (5.0, 4.5)
    assert len(scheduler.questions) == 4


def test_two_exports_at_once_are_refused(
    runs: Runs, scheduler: FakeScheduler, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(runs.launch(), [start(), train(1)])
    scheduler.set("11", RUNNING)
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: float) -> None:
        begun.set()
        go_on.wait(60)
        scheduler.set("11", COMPLETED)

    monkeypatch.setattr(export, "time", type("Clock", (), {"sleep": staticmethod(wait)}))
    first = threading.Thread(target=main, args=(["export", "gpt3_tiny", "--to", "mlflow", "--follow"],))
    first.start()
    assert begun.wait(60)
    assert main(["export", "gpt3_tiny", "--to", "mlflow"]) == 2
    assert "gpt3_tiny: another export is under way" in capsys.readouterr().err
    go_on.set()
    first.join()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt3_tinny", "--to", "wandb"], "did you mean 'gpt3_tiny'?"),
        (["gpt3_tiny", "--to", "mlflow"], "has no training step yet"),
        (["gpt3_tiny", "other", "--to", "mlflow", "--follow"], "--follow: it takes one run, not 2"),
    ],
)
def test_mistakes(
    words: list[str], message: str, runs: Runs, scheduler: FakeScheduler, places: Path, capsys: Capsys
) -> None:
    runs.launch()
    runs.launch("other")
    scheduler.set("11", COMPLETED)
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(
        path.name == "meta.yaml" and path.parent.parent.name != "mlruns" for path in places.rglob("*")
    )


def test_a_library_that_is_missing_is_named(
    runs: Runs, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    append(runs.launch(), whole_training(0, 3))
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["export", "gpt3_tiny", "--to", "wandb"]) == 2
    message = capsys.readouterr().err
    assert "--to wandb needs wandb, which is not installed" in message
    assert "[wandb]" in message
