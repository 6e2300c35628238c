"""`slipway check`: what it prints, and how it exits."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checks.registry import CHECKS
from launcher.cli.app import main
from launcher.file_systems import Room
from launcher.sandbox.lifecycle import Sandbox
from launcher.slurm.commands import NO_SLURM, Unreachable
from launcher.slurm.questions import Reply
from tests.checks.shelves import NFS, image, manifest, stock

TWO_NODES = ["training=gpt3/175b", "training.trainer.num_nodes=2"]


@pytest.fixture(autouse=True)
def workdir(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory that machines share, with the data alone in it, on a machine without Slurm."""
    bare = tmp_path_factory.mktemp("no-slurm")
    monkeypatch.setenv("PATH", str(bare))
    (bare / "mountinfo").write_text(NFS)
    monkeypatch.setattr("launcher.file_systems.MOUNTS", bare / "mountinfo")
    monkeypatch.setattr("launcher.checks.gathering.paths.room_at", lambda path: Room(10**14, "file system"))
    data = stock(tmp_path / "data")
    manifest(data / "corpus_text_document", [data / "bpe/vocab.json", data / "bpe/merges.txt"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_launch_passes(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image(workdir / "nemo-25.07.sqsh")  # that of a registry would be fetched by all of its nodes at once
    overrides = [
        "training=gpt3/126m",
        "cluster=bcm",
        "cluster.gpu=a100-80gb",
        f"container={workdir}/nemo-25.07.sqsh",
    ]
    assert main(["check", *overrides]) == 0
    layout, memory, stage, time, compute, space, cluster, script, verdict = (
        capsys.readouterr().out.splitlines()
    )
    assert layout == (
        "gpt3_126m: 8 nodes × 8 = 64 tasks: tensor 1 × pipeline 1 × context 1 × data 64;"
        " global batch 256 = micro batch 4 × data 64 × 1, 524,288 tokens a step"
    )
    assert memory.startswith("memory: ")
    assert memory.endswith(" GiB of 80.0 GiB, 4.0 GiB of it kept free (a100-80gb; cluster.gpu)")
    assert stage.startswith("  stage 0 (12 layers): ") and " GiB = weights 0.2 + gradients 0.5 + " in stage
    assert time.startswith("time: ") and ": 600,000 steps of " in time
    assert compute.startswith("compute: 125M parameters, 315G tokens, ") and " on 64 GPUs at MFU " in compute
    assert space.startswith("space: a checkpoint 1.")
    # Each check of the cluster was skipped for the same reason, which is printed once.
    assert cluster.startswith("skipped: not checked: ") and "there is no Slurm here" in cluster
    assert "[cluster.partition, cluster.time_limit, " in cluster
    assert script.startswith(
        "skipped: not checked: Slurm takes the script, by `sbatch --test-only` (sbatch is not"
    )
    skipped = sum(line[line.rindex("[") :].count(",") + 1 for line in (cluster, script))
    applicable = len(CHECKS) - 3  # no image of a registry, no sources of data, no file of nodes to avoid
    assert verdict == f"{applicable - skipped} of {applicable} checks passed; {skipped} skipped"
    assert sorted(path.name for path in workdir.iterdir()) == ["data", "nemo-25.07.sqsh"]


def test_overflow_is_printed_with_its_size_and_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["check", "training=gpt3/40b", "cluster=bcm", "cluster.gpu=a100-40gb"]
    assert main(command) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("memory: stage 0 is the fullest of 4: ")
    assert " GiB more than the 40.0 GiB of a GPU (a100-40gb; cluster.gpu)" in lines[1]
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert "pipeline stage 0 of 4" in line and line.endswith("[memory.fits]")
    assert any(line.startswith("  would fit: ") for line in lines)


def test_json_has_the_estimates_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "training=gpt3/40b", "cluster=bcm", "estimates.mfu=0.4", "estimates.gpu_hour_price=2"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    memory, cost = report["memory"], report["cost"]
    assert memory["gpu"]["name"] == "a100-80gb" and memory["gpu"]["assumed"] is True
    assert [stage["stage"] for stage in memory["stages"]] == [0, 1, 2, 3]
    for stage in memory["stages"]:
        parts = ("weights", "gradients", "optimizer", "activations", "logits")
        assert stage["total"] == sum(stage[part] for part in parts) > stage["parameters"]
    assert (cost["mfu"], cost["mfu_source"], cost["gpus"]) == (0.4, "estimates.mfu", 1024)
    assert cost["price"] == pytest.approx(2 * cost["gpu_hours"])
    assert cost["seconds"] == pytest.approx(cost["flops"] / (1024 * 0.4 * 312e12))


def test_the_memory_is_drawn_into_a_file(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "training=gpt3/40b", "cluster=bcm", "--json"]
    assert main([*command, "--plot", "memory.png"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["memory"] is not None
    assert printed.err == "plot: memory.png\n"
    assert (workdir / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_plotting_libraries_are_not_imported_in_a_pipe(workdir: Path) -> None:
    program = "import sys; from launcher.cli.app import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", program, "check", "training=gpt3/126m", "cluster=bcm"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "memory: " in process.stdout
    modules = {name.partition(".")[0] for name in process.stdout.splitlines()[-1].split()}
    assert "launcher" in modules and not {"rich", "matplotlib", "numpy"} & modules


def test_checks_that_need_slurm_are_skipped_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def validate(scheduler: object, script: str) -> None:
        raise Unreachable(NO_SLURM)

    no_answer = Reply(why=NO_SLURM)
    monkeypatch.setattr("launcher.schedulers.slurm.SlurmScheduler.validate", validate)
    monkeypatch.setattr("launcher.slurm.questions._reply", lambda *args: no_answer)
    assert main(["check", "training=gpt3/126m", "cluster=bcm"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped: ")]
    assert line.startswith("skipped: not checked: no Slurm found on this machine [cluster.partition, ")
    assert line.endswith(", scheduler]")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("estimates.mfu=40", "expected a part of the GPUs' peak, above 0 and up to 1; did you mean 0.4?"),
        ("estimates.mfu=nan", "expected a part of the GPUs' peak, above 0 and up to 1"),
        ("estimates.memory_margin=5", "expected a part of the whole, from 0 to below 1; did you mean 0.05?"),
        ("estimates.gpu_hour_price=inf", "expected a finite number"),
        ("estimates.gpu_hour_price=-1", "expected 0 or more"),
    ],
)
def test_values_that_estimates_cannot_count_with_are_refused(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "training=gpt3/126m", "cluster=bcm", override]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"slipway: {override}: {message}",
        f"  from the command line: {override}",
    ]


@pytest.fixture
def no_gathering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail each attempt to gather facts beside the configuration; the data are missing too."""
    monkeypatch.chdir(tmp_path / "data")

    def look(*args: object, **options: object) -> None:
        raise AssertionError("an estimate looks at nothing")

    for name in (
        "gathering.host.ask_cluster",
        "gathering.earlier._entries",
        "gathering.earlier._read_newest",
        "gathering.host._interpreter",
        "gathering.host.supervisor_python_problem",
        "gathering.paths._why_lost",
        "gathering.paths.find_local_paths",
        "gathering.paths.room_at",
    ):
        monkeypatch.setattr(f"launcher.checks.{name}", look)
    monkeypatch.setattr("launcher.schedulers.scheduler_for", look)


ESTIMATE = ["check", "training=gpt3/5b", "--estimate"]


@pytest.mark.usefixtures("no_gathering")
def test_an_estimate_looks_at_nothing_but_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ESTIMATE, "cluster.gpu=b200"]) == 0
    output = capsys.readouterr().out
    names = [line.partition(":")[0] for line in output.splitlines()]
    assert names[:6] == ["gpt3_5b", "memory", "  stage 0 (24 layers)", "time", "compute", "space"]
    applicable = sum(not check.needs for check in CHECKS) + 2  # keys.unknown and engine.megatron
    assert output.splitlines()[6:] == [f"{applicable} of {applicable} checks passed"]
    assert " of 179.1 GiB" in output and "(b200-180gb; cluster.gpu)" in output
    assert {path.name for path in tmp_path.iterdir()} == {"data"}


@pytest.mark.usefixtures("no_gathering")
def test_estimate_has_no_findings_on_the_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ESTIMATE, "cluster.gpu=b200", "container=nvcr.io#nvidia/nemo:26.04"]) == 0
    assert "image." not in capsys.readouterr().out


@pytest.mark.usefixtures("no_gathering")
def test_an_estimate_says_which_gpu_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ESTIMATE) == 0
    output = capsys.readouterr().out
    assert "warning: cluster.gpu=null: the estimates assume a100-80gb [layout.gpus]\n" in output
    assert main([*ESTIMATE, "cluster.gres=gpu:mi300x:8", "cluster.gpu_request=gres"]) == 0
    output = capsys.readouterr().out
    assert "warning: cluster.gpu=null: cluster.gres=gpu:mi300x is no GPU that is known here; " in output
    assert output.count("warning: ") == 1


@pytest.mark.usefixtures("no_gathering")
def test_estimate_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*ESTIMATE, "cluster.gpu=gb300", "training.model.micro_batch_size=3", "--json"]
    assert main(command) == 2
    report = json.loads(capsys.readouterr().out)
    assert [(item["id"], item["severity"]) for item in report["findings"]] == [("batch.global", "error")]
    assert main([*ESTIMATE, "cluster.gpu=gb300", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory"]["gpu"]["name"] == "gb300-279gb" and report["memory"]["gpu"]["assumed"] is False
    assert report["cost"]["peak"] == 2500e12 and report["findings"] == []


def test_stage_without_a_training_has_no_estimate(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preparation = ["stages=[data_preparation]", f"data_preparation.inputs=[{workdir}]"]
    assert main(["check", *preparation, "--estimate"]) == 2
    assert "--estimate: stages=[data_preparation] trains nothing" in capsys.readouterr().err


def test_plot_without_gpus_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "training=gpt3/tiny", "cluster=local", "--plot", "memory.png"]) == 2
    message = capsys.readouterr().err
    assert "--plot memory.png: not drawn: the memory is not known (no GPUs are asked for)" in message


def test_plot_that_cannot_be_drawn_fails_the_command(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preparation = ["stages=[data_preparation]", f"data_preparation.inputs=[{workdir}]", "cluster=bcm"]
    assert main(["check", *preparation, "--plot", "memory.png"]) == 2
    assert "memory.png: not drawn" in capsys.readouterr().err
    assert not (workdir / "memory.png").exists()
    assert main(["check", *preparation, "--plot", "memory.jpeg"]) == 2
    printed = capsys.readouterr()
    assert "--plot 'memory.jpeg': unknown picture format" in printed.err and printed.out == ""


def test_175b_on_two_nodes_is_refused_within_one_screen(
    workdir: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *TWO_NODES]) == 2
    output = capsys.readouterr().out
    assert output.startswith(
        "error: training.model.pipeline_model_parallel_size=8: tensor 4 × pipeline 8 × context 1 = 32"
        " does not divide 2 nodes × 8 GPUs = 16 [layout.world]\n"
    )
    assert f"  from {repository}/conf/training/gpt3/175b.yaml:" in output
    assert "  training.trainer.num_nodes is from the command line: training.trainer.num_nodes=2\n" in output
    assert "  node counts that would do: 4, 8, 16, 32, 64, 128, 256, 512, 1024\n" in output
    # Layouts that fit come before layouts that only divide.
    best, alone, counts = map(
        output.index, ("would fit on 6 nodes: ", "by arithmetic alone, ", "node counts that")
    )
    assert best < alone < counts
    assert len(output.splitlines()) < 24
    assert [path.name for path in workdir.iterdir()] == ["data"]


def test_json_has_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *TWO_NODES, "training.trainer.max_steps=100", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["choices"]["training"] == "gpt3/175b"
    assert report["layout"] is None
    assert report["errors"] == 1
    by_id = {item["id"]: item for item in report["findings"]}
    assert by_id["layout.world"]["severity"] == "error"
    assert by_id["layout.world"]["key"] == "training.model.pipeline_model_parallel_size"
    assert "node counts that would do: 4, 8" in by_id["layout.world"]["fix"]
    assert by_id["schedule.warmup"]["severity"] == "warning"
    assert by_id["scheduler"]["severity"] == "skipped"


def test_json_has_the_layout_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "training=gpt3/175b", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["world"], layout["data"], layout["micro_batches"]) == (1024, 32, 64)
    assert layout["tokens"] == 2048 * 2048


def test_layout_of_a_node_range_is_printed_at_both_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["check", "training=gpt3/126m", "cluster=bcm", "resilience.nodes={min: 1, max: 2}"]
    assert main(command) == 0
    least, most, *_ = capsys.readouterr().out.splitlines()
    assert least.startswith("gpt3_126m: 1 node × 8 = 8 tasks:")
    assert most.startswith("gpt3_126m: up to 2 nodes × 8 = 16 tasks:")
    assert "micro batch 4 × data 16 × 4" in most
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"]["world"], report["layout_at_most"]["world"]) == (8, 16)


def test_a_range_with_numbers_that_do_not_fit_is_refused_with_its_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Our trainer checks both ends too, and the error that it would repeat is reported once."""
    command = ["check", "training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf=null"]
    assert main([*command, "resilience.nodes={min: 1, max: 3}"]) == 2
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert line.startswith("error: resilience.nodes={min: 1, max: 3}: with 3 nodes")
    assert "  from the command line: resilience.nodes={min: 1, max: 3}" in lines
    assert "  'resilience.nodes={min: 1, max: 2}'" in lines


def test_skipped_check_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *TWO_NODES, "--no-check=layout.world", "--no-check", "time.max_time"]) == 0
    output = capsys.readouterr().out
    assert "skipped: --no-check=layout.world [layout.world]\n" in output
    assert "skipped: --no-check=time.max_time [time.max_time]\n" in output


@pytest.mark.parametrize("name", ["machine", "scheduler"])
def test_mandatory_checks_can_be_skipped_by_check_but_not_by_launch(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = f"cluster.python={workdir}/no-such-python"
    overrides = ["training=gpt3/tiny", "cluster=bcm", "container=null", "engine=megatron", mistake]
    assert main(["check", *overrides, f"--no-check={name}"]) == (0 if name == "machine" else 2)
    output = capsys.readouterr().out
    assert f"skipped: --no-check={name} [{name}]\n" in output
    assert ("Slurm takes the script" in output) == (name == "machine")
    assert main(["launch", *overrides, f"--no-check={name}"]) == 2
    output = capsys.readouterr().err
    assert (
        f"--no-check={name}: a launch always applies this check\n  slipway check --no-check={name}" in output
    )


def test_missing_file_of_this_machine_is_an_error(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image(workdir / "nemo-24.07.sqsh")
    assert main(["check", f"container={workdir}/nemo-24.7.sqsh"]) == 2
    output = capsys.readouterr().out
    assert "there is no such file [path.image]\n" in output
    assert "nemo-24.07.sqsh" in output


def test_data_preparation_has_no_layout(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["stages=[data_preparation]", f"data_preparation.inputs=[{workdir}]", "cluster=bcm"]
    assert main(["check", *overrides]) == 0
    assert "tensor" not in capsys.readouterr().out


@pytest.mark.slurm
def test_a_real_slurm_judges_the_script(
    plain_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in plain_sandbox.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
    overrides = ["training=gpt3/tiny", "cluster=sandbox", "cluster.python=/bin/true", "--json"]
    verdicts = {}
    for name, more in {"good": [], "no partition": ["cluster.partition=no_such"]}.items():
        code = main(["check", *overrides, *more])
        findings = json.loads(capsys.readouterr().out)["findings"]
        verdicts[name] = (code, [item["message"] for item in findings if item["id"] == "scheduler"])
    assert verdicts["good"] == (0, [])
    code, (refusal,) = verdicts["no partition"]
    assert code == 2
    assert refusal.startswith("Slurm would refuse this job: ")


def test_the_table_of_checks_is_current(repository: Path) -> None:
    script = runpy.run_path(str(repository / "scripts/checks_page.py"))
    page = (repository / "docs/checks.md").read_text(encoding="utf-8")
    assert script["page"](page) == page, "write it anew: .venv/bin/python -m scripts.checks_page"
    rows = page.partition("| id |")[2].split("\n\n")[0].splitlines()[2:]
    unfinished = [row for row in rows if not all(cell.strip(" |") for cell in row.split(" | "))]
    assert unfinished == [], "write into these rows what the check finds, and its severity"
    assert len(rows) == len(CHECKS)
