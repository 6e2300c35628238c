"""The facts that checks need, read from files; and a draft from its facts to its mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import as_mistakes, check_drafts, gather, refuse
from launcher.drafting import Draft, Request, draft
from launcher.errors import Mistakes
from tests.checks.plans import findings_of
from tests.checks.shelves import NFS, image, stock


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that machines share, with what a GPT reads."""
    stock(tmp_path / "data")
    image(tmp_path / "nemo.sqsh")
    (tmp_path / "mountinfo").write_text(NFS)
    monkeypatch.setattr("launcher.file_systems.MOUNTS", tmp_path / "mountinfo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def drafted(*overrides: str, config_dir: Path | None = None) -> Draft:
    return draft(Request(overrides=overrides, command=["slipway"], config_dir=config_dir))


def looked_at(made: Draft) -> list[Finding]:
    """Return the findings of a draft, without a question to a cluster or about the size of the disk."""
    skipped = ("space.checkpoints",)
    return [one for one in findings_of(made, skipped) if one.severity is not Severity.SKIPPED]


def run_with_script(directory: Path, name: str) -> None:
    """A run directory as a launch leaves it: its newest script is a link at the top."""
    (directory / "launches/1").mkdir(parents=True)
    (directory / f"{name}_submission.sh").symlink_to(f"launches/1/{name}_submission.sh")


def test_runs_with_the_same_job_name_are_found(here: Path) -> None:
    name = "nemo-megatron-gpt3_126m"
    run_with_script(here / "results/gpt3_126m", name)
    run_with_script(here / "results/elsewhere", name)
    run_with_script(here / "results/another", "nemo-megatron-another")
    made = drafted(f"container={here}/nemo.sqsh")  # that of a registry would be fetched by all nodes at once
    assert gather([made])[0].same_job_name == (str(here / "results/elsewhere"),)
    (found,) = looked_at(made)
    assert (found.id, found.severity) == ("run.singleton", Severity.WARNING)
    assert f"jobs of {here}/results/elsewhere are called {name} too" in found.message


def test_runs_of_another_results_directory_are_found(here: Path) -> None:
    """As a benchmark leaves them that has each launch in a directory of its own."""
    name = "nemo-megatron-gpt3_126m"
    for base in ("results", "results-20260101-120000", "data"):
        run_with_script(here / base / "gpt3_126m", name)
    made = drafted(f"base_results_dir={here}/results-20260202-120000")
    others = [here / "results-20260101-120000/gpt3_126m", here / "results/gpt3_126m"]
    assert gather([made])[0].same_job_name == tuple(map(str, others))


def test_a_dry_run_looks_at_no_run_directories() -> None:
    facts = gather([drafted()], look=False)[0]
    assert facts.same_job_name is None
    assert facts.added_keys == ()


def test_keys_that_an_override_adds_are_known() -> None:
    facts = gather([drafted("+training.model.micro_batchsize=4", "++training.model.num_layers=6")])[0]
    assert facts.added_keys == ("model.micro_batchsize",)
    assert facts.shipped_keys is not None
    assert {"model.micro_batch_size", "model.optim.sched.min_lr", "trainer.num_nodes"} <= facts.shipped_keys


def test_keys_of_a_tree_of_the_users_own_are_known(here: Path) -> None:
    folder = here / "tree/training"
    folder.mkdir(parents=True)
    text = "defaults: [gpt3/126m@_here_, _self_]\nmodel:\n  optim:\n    weigth_decay: 0.1\n"
    (folder / "mine.yaml").write_text(text)
    made = drafted("training=mine", f"container={here}/nemo.sqsh", config_dir=here / "tree")
    assert gather([made])[0].added_keys == ("model.optim.weigth_decay",)
    (found,) = looked_at(made)
    (mistake,) = as_mistakes(made, [found])
    assert str(mistake) == (
        "training.model.optim.weigth_decay=0.1: no shipped configuration has this key [keys.unknown]\n"
        "  from tree/training/mine.yaml:4\n"
        "  did you mean training.model.optim.weight_decay?"
    )


def test_errors_are_refused_together_with_their_sources() -> None:
    made = drafted("training.model.global_batch_size=100", "training.model.num_query_groups=5")
    with pytest.raises(Mistakes) as told:
        refuse(made, looked_at(made))
    first, second = told.value.mistakes
    assert "[batch.global]" in first.message and "[model.heads]" in second.message
    assert first.source is not None
    assert first.source.startswith("from the command line: training.model.global_batch_size=100\n")
    refuse(made, findings_of(made, ["batch.global", "model.heads"]))


def test_secrets_that_others_may_read_are_found(here: Path) -> None:
    from dataclasses import replace

    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (here / name).touch()
        (here / name).chmod(mode)
    made = drafted()
    files = {"A_TOKEN": str(here / "open"), "B_TOKEN": str(here / "closed"), "C_TOKEN": "/no/such/file"}
    job = replace(made.plan.job, environment_files=files)
    made = replace(made, plan=replace(made.plan, job=job))
    assert gather([made])[0].open_secrets == {"A_TOKEN": str(here / "open")}


@pytest.mark.parametrize(
    "size", ["gpt3/126m", "gpt2/124m", "llama/llama3_8b", "t5/3b", "mt5/3b", "bert/110m"]
)
def test_the_keys_of_a_shipped_size_are_no_news(size: str) -> None:
    """Those of a T5's stacks are in a file that is taken in twice, below other nodes."""
    made = drafted(f"training={size}", "+training.model.foo_bar=1")
    assert gather([made])[0].added_keys == ("model.foo_bar",)


def test_keys_that_checks_read_are_known() -> None:
    experts = ("num_moe_experts=8", "expert_model_parallel_size=2", "override_vocab_size=50304")
    made = drafted(*(f"+training.model.{text}" for text in experts), "+training.model.num_moe_expert=8")
    assert gather([made])[0].added_keys == ("model.num_moe_expert",)
    hints = [found.fix for found in findings_of(made) if found.id == "keys.unknown"]
    assert hints == ["did you mean training.model.num_moe_experts?"]


def test_secrets_that_are_not_there_are_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("closed", "good"):
        (here / name).touch()
    os.mkfifo(here / "fifo")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")
    made = drafted(
        f"env_files.A={here}/lost",
        f"env_files.B={here}",
        f"env_files.C={here}/closed",
        f"env_files.D={here}/good",
        f"env_files.E={here}/fifo",
        "wandb_api_key_file=/nonexist/x",
    )
    lost = gather([made])[0].missing_secrets
    assert lost is not None
    assert [(secret.key, secret.why, secret.certain) for secret in lost] == [
        ("env_files.A", "there is no such file", True),
        ("env_files.B", "a directory, not a file", True),
        ("env_files.C", "you may not read this file", True),
        ("env_files.E", "a FIFO or a device, not a file: the job would wait for it", True),
        ("wandb_api_key_file", "there is no such file", False),
    ]
    assert gather([made], look=False)[0].missing_secrets is None
    severities = [found.severity for found in findings_of(made) if found.id == "secret.file"]
    assert severities == [Severity.ERROR] * 4 + [Severity.WARNING]


def test_gpus_by_the_task_are_held_against_those_of_a_node() -> None:
    by_task = ("cluster=bcm", "cluster.gpu_request=gpus_per_task", "cluster.gpus_per_task=2")
    (found,) = (finding for finding in findings_of(drafted(*by_task)) if finding.id == "layout.gpus")
    assert (found.severity, found.key) == (Severity.ERROR, "cluster.gpus_per_task")
    assert "need 16 GPUs, and it has 8" in found.message
    wider = drafted(*by_task, "+stage_cluster.training={gpus_per_node: 16, gres: null}")
    assert gather([wider])[0].node_gpus == 16


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "training.model.optim.sched.name=Cosin",
            "'Cosin': expected one of CosineAnnealing, WarmupAnnealing",
        ),
        ("+training.model.attention_backend=sdap", "'sdap': expected one of auto, transformer_engine, sdpa"),
        ("+training.model.num_layer=3", "3: unknown key; did you mean 'training.model.num_layers'?"),
    ],
)
def test_configuration_that_the_trainer_refuses_becomes_no_job(override: str, told: str) -> None:
    made = drafted("training=gpt3/tiny", "cluster=local", override)
    found = [one for one in findings_of(made) if one.severity is Severity.ERROR]
    assert [one.id for one in found] == ["engine.megatron"]
    key = override.lstrip("+").partition("=")[0]
    assert (found[0].key, found[0].message) == (key, f"{key}={told}{found[0].message.partition(told)[2]}")


def test_the_trainer_is_not_heard_beside_other_mistakes_nor_by_other_engines() -> None:
    both = ("training.model.optim.sched.name=Cosin", "training.model.global_batch_size=33")
    ids = [one.id for one in findings_of(drafted("training=gpt3/tiny", "cluster=local", *both))]
    assert "engine.megatron" not in ids
    assert "batch.global" in ids
    assert check_drafts([drafted("training.model.optim.sched.name=Cosin")])[0].facts.trainer_verdict == ""


def test_the_trainer_is_ours_whatever_lies_in_the_users_directory(here: Path) -> None:
    (here / "trainer").mkdir()
    (here / "json.py").write_text("raise SystemExit('not this one')")
    assert check_drafts([drafted("training=gpt3/tiny", "cluster=local")])[0].facts.trainer_verdict == ""


def test_a_trainer_that_cannot_be_asked_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python3")
    made = drafted("training=gpt3/tiny", "cluster=local")
    assert check_drafts([made])[0].facts.trainer_verdict is None
    (found,) = [one for one in findings_of(made) if one.id == "engine.megatron"]
    assert found.severity is Severity.SKIPPED
