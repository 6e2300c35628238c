"""The command stage: a site's own program, with its arguments as they stand, checked and tracked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher.checks.gathering.paths import path_facts
from launcher.cli.app import main
from launcher.config.compose import compose
from launcher.drafting import Draft, Request, draft
from launcher.plan import Job
from launcher.stages.planning import plan_launch

ODD = '$(touch made); it\'s "b"\\ * ${HOME}'
PROGRAM = """\
import json, os, sys
with open(os.environ["RANK"], "x") as file:
    json.dump([sys.argv[1:], os.environ["WORLD_SIZE"], os.environ["EXTRA"], os.getcwd()], file)
sys.exit(int(sys.argv[2]))
"""


def job(*overrides: str) -> Job:
    composition = compose(["stages=[command]", "cluster=bcm", "command.argv=[bench]", *overrides])
    return plan_launch(composition.config, number=1, tag="tag").job


def odd_arguments(tmp_path: Path, code: int) -> list[str]:
    """Return the command line of a program whose arguments are in a file, where no shell's rules apply."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "tree/command").mkdir(parents=True, exist_ok=True)
    argv = json.dumps([sys.executable, str(program), ODD, str(code)])
    text = f"defaults: [/command/default@_here_, _self_]\nargv: {argv.replace('${', chr(92) * 2 + '${')}\n"
    (tmp_path / "tree/command/odd.yaml").write_text(text)
    return [
        f"--config-dir={tmp_path / 'tree'}",
        "stages=[command]",
        "command=odd",
        "cluster=local",
        f"base_results_dir={tmp_path / 'results'}",
        "command.env_vars.EXTRA=a 'b'",
        f"command.writable=[{tmp_path / 'written'}]",
    ]


@pytest.mark.parametrize(("code", "tasks"), [(0, 2), (3, 1)])
def test_program_gets_its_arguments_as_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, tasks: int
) -> None:
    exit_code = main(
        ["launch", *odd_arguments(tmp_path, code), f"command.tasks_per_node={tasks}", "--follow"]
    )
    run_dir = tmp_path / "results/command"
    results = run_dir / "launches/1/results"
    assert exit_code == (0 if code == 0 else 1)
    assert (tmp_path / "written").is_dir()
    ranks = {path.name: json.loads(path.read_text()) for path in results.iterdir()}
    expected = [[ODD, str(code)], str(tasks), "a 'b'", str(results)]
    assert ranks == {str(rank): expected for rank in range(tasks)}
    capsys.readouterr()
    assert main(["status", "--json", str(run_dir)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["run"]) == ("FAILED" if code else "COMPLETED", "command")
    assert main(["verify", str(run_dir)]) == (1 if code else 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("command.argv=[]", "at least 1"),
        ("command.argv=/bin/true", "expected a list"),
        ("command.argv={a: b}", "expected a list"),
        ("command.argv=[[a]]", "expected text"),
        ("command.argv=[./bench]", "its name or a whole path"),
        ("command.argv=['']", "its name or a whole path"),
        ("command.workdir=here", "a whole path is needed"),
        ("command.writable=[here]", "a whole path is needed"),
        ("command.env_vars.RANK=1", "sets this variable"),
        ("command.nodes=0", "1 or more"),
        ("resilience.links=5", "only a training is a chain of jobs"),
        ("resilience={links: 5}", "only a training is a chain of jobs"),
        ("resilience.nodes={min: 1, max: 2}", "only a training"),
        ("resilience.save_before_end=60", "only a training"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    results = tmp_path / "results"
    arguments = ["stages=[command]", "cluster=local", f"base_results_dir={results}", "command.argv=[true]"]
    assert main(["launch", *arguments, override]) == 2
    message = capsys.readouterr().err
    assert words in message and override.partition("=")[0] in message
    assert not results.exists()


@pytest.mark.parametrize("override", ["resilience.links=1", "resilience.save_before_end=null"])
def test_settings_of_a_chain_that_ask_for_nothing_are_taken(override: str) -> None:
    arguments = ("stages=[command]", "cluster=bcm", "command.argv=[bench]", override)
    assert draft(Request(overrides=arguments, command=[])).plan.job.stage == "command"


def test_numbers_stay_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "command").mkdir()
    text = "defaults: [/command/default@_here_, _self_]\nargv: [sleep, 1.10, 0042, 1_0]\n"
    (tmp_path / "command/sleep.yaml").write_text(text)
    overrides = ["stages=[command]", "command=sleep", "cluster=local", f"base_results_dir={tmp_path}"]
    payload = draft(Request(overrides, [], config_dirs=(tmp_path,))).plan.job.payload
    assert payload.argv == ("sleep", "1.10", "0042", "1_0")


def test_gpus_are_requested_in_the_words_of_the_cluster() -> None:
    none = job().resources
    assert (none.gpus_per_node, none.gpus_per_task, none.gres, none.exclusive) == (None, None, None, False)
    four = job("command.gpus_per_node=4").resources
    assert (four.gpus_per_node, four.exclusive) == (4, True)
    as_training = job("command.gpus_per_node=null").resources
    assert as_training.gpus_per_node == 8
    by_gres = ("cluster.gpus_per_node=null", "cluster.gres='gpu:h100:8,shard:1'")
    assert job("command.gpus_per_node=2", *by_gres).resources.gres == "gpu:h100:2,shard:1"


def test_stage_cluster_wins() -> None:
    requested = ("command.mem=1G", "command.cpus_per_task=3")
    assert (job(*requested).resources.memory, job(*requested).resources.cpus_per_task) == ("1G", 3)
    resources = job(*requested, "stage_cluster.command={mem: 2G, gpus_per_node: 1}").resources
    assert (resources.memory, resources.cpus_per_task, resources.gpus_per_node) == ("2G", 3, 1)


def test_image_of_a_command_is_its_own(tmp_path: Path) -> None:
    overrides = ["stages=[command]", "cluster=bcm", "command.argv=[bench]", f"base_results_dir={tmp_path}"]
    images = {
        key: draft(Request([*overrides, *more], [])).plan.job.container
        for key, more in {
            "launch": ["container=/apps/a.sqsh"],
            "own": ["container=/apps/a.sqsh", "command.container=/apps/b.sqsh"],
            "none": ["container=/apps/a.sqsh", "command.container=null"],
        }.items()
    }
    assert images["launch"] is not None and images["launch"].image == "/apps/a.sqsh"
    assert images["own"] is not None and images["own"].image == "/apps/b.sqsh"
    assert images["none"] is None


def test_container_without_gpus_asks_for_no_driver() -> None:
    name, image = "NVIDIA_VISIBLE_DEVICES", "container=/apps/x.sqsh"
    assert job(image, "command.gpus_per_node=0").environment[name] == "void"
    assert name not in job(image, "command.gpus_per_node=null").environment
    assert name not in job("container=null", "command.gpus_per_node=0").environment
    assert job(image, "command.gpus_per_node=0", f"command.env_vars.{name}=all").environment[name] == "all"


def test_writable_directory_is_named_by_its_key(tmp_path: Path) -> None:
    words = ["stages=[command]", "cluster=bcm", "command.argv=[true]", "command.writable=[/x/]"]
    words += [f"base_results_dir={tmp_path}", "data_dir=/d"]
    launch = draft(Request(words, ["slipway", "launch"]))
    assert launch.directory_key(Path("/x")) == "command.writable"


def findings_of(*overrides: str) -> list[tuple[str, bool]]:
    composition = compose(["stages=[command]", "cluster=local", "container=null", *overrides])
    plan = plan_launch(composition.config, number=1, tag="tag")
    facts = path_facts(Draft(composition, plan, composition.config, "base_results_dir"))
    return [(path.why, path.certain) for path in facts.script or ()]


def test_missing_program_is_a_finding(tmp_path: Path) -> None:
    script = tmp_path / "bench"
    assert findings_of(f"command.argv=[{script}]") == [("there is no such program", True)]
    script.touch()
    assert findings_of(f"command.argv=[{script}]") == [("it may not be executed", True)]
    script.chmod(0o755)
    assert findings_of(f"command.argv=[{script}]") == []
    assert findings_of(f"command.argv=[{tmp_path}]") == [("a directory, not a program", True)]
    assert findings_of("command.argv=[no-such-bench]") == [("there is no such program", True)]
    # The nodes of a cluster may have what this machine lacks, and nothing is known of an image.
    assert findings_of("command.argv=[no-such-bench]", "cluster=bcm") == [
        ("there is no such program on this machine; every node must have it", False)
    ]
    assert findings_of("command.argv=[/no/such]", "cluster=bcm", "container=/apps/x.sqsh") == []
