"""The facts that checks need, read from files; and a draft from its facts to its mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.checks.findings import Finding, Severity
from launcher.checks.gate import check_drafts, convert_to_mistakes, gather, refuse
from launcher.drafting import Draft, Request, draft
from launcher.errors import Mistakes
from tests.checks.plans import findings_of
from tests.checks.shelves import NFS, image, stock


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that machines share, with what a GPT reads."""
    stock(tmp_path / "data")
    image(tmp_path / "nemo.sqsh")
    (tmp_path / "mountinfo").write_text(NFS)
    monkeypatch.setattr("launcher.file_systems.MOUNTS", tmp_path / "mountinfo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draft_with(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> Draft:
    return draft(Request(overrides=overrides, command=["slipway"], config_dirs=config_dirs))


def reported_findings(launch_draft: Draft) -> list[Finding]:
    """Return the findings of a draft but those of the disk's space and of skipped checks."""
    skipped = ("space.checkpoints",)
    return [
        finding for finding in findings_of(launch_draft, skipped) if finding.severity is not Severity.SKIPPED
    ]


def make_run_with_script(directory: Path, name: str) -> None:
    """Make a run directory as a launch leaves it: its newest script is a link at the top."""
    (directory / "launches/1").mkdir(parents=True)
    (directory / f"{name}_submission.sh").symlink_to(f"launches/1/{name}_submission.sh")


def test_runs_with_the_same_job_name_are_found(workdir: Path) -> None:
    name = "nemo-megatron-gpt3_126m"
    make_run_with_script(workdir / "results/gpt3_126m", name)
    make_run_with_script(workdir / "results/elsewhere", name)
    make_run_with_script(workdir / "results/another", "nemo-megatron-another")
    # All nodes would fetch the image of a registry at once.
    launch_draft = draft_with(f"container={workdir}/nemo.sqsh")
    assert gather([launch_draft])[0].same_job_name == (str(workdir / "results/elsewhere"),)
    (finding,) = reported_findings(launch_draft)
    assert (finding.id, finding.severity) == ("run.singleton", Severity.WARNING)
    assert f"jobs of {workdir}/results/elsewhere are called {name} too" in finding.message


def test_runs_of_another_results_directory_are_found(workdir: Path) -> None:
    """A benchmark that has each launch in a directory of its own leaves such runs."""
    name = "nemo-megatron-gpt3_126m"
    for base in ("results", "results-20260101-120000", "data"):
        make_run_with_script(workdir / base / "gpt3_126m", name)
    launch_draft = draft_with(f"base_results_dir={workdir}/results-20260202-120000")
    others = [workdir / "results-20260101-120000/gpt3_126m", workdir / "results/gpt3_126m"]
    assert gather([launch_draft])[0].same_job_name == tuple(map(str, others))


def test_a_dry_run_looks_at_no_run_directories() -> None:
    facts = gather([draft_with()], look=False)[0]
    assert facts.same_job_name is None
    assert facts.added_keys == ()


def test_keys_that_an_override_adds_are_known() -> None:
    facts = gather([draft_with("+training.model.micro_batchsize=4", "++training.model.num_layers=6")])[0]
    assert facts.added_keys == ("model.micro_batchsize",)
    assert facts.shipped_keys is not None
    assert {"model.micro_batch_size", "model.optim.sched.min_lr", "trainer.num_nodes"} <= facts.shipped_keys


def test_keys_of_a_tree_of_the_users_own_are_known(workdir: Path) -> None:
    folder = workdir / "tree/training"
    folder.mkdir(parents=True)
    text = "defaults: [gpt3/126m@_here_, _self_]\nmodel:\n  optim:\n    weigth_decay: 0.1\n"
    (folder / "mine.yaml").write_text(text)
    launch_draft = draft_with(
        "training=mine", f"container={workdir}/nemo.sqsh", config_dirs=(workdir / "tree",)
    )
    assert gather([launch_draft])[0].added_keys == ("model.optim.weigth_decay",)
    (finding,) = reported_findings(launch_draft)
    (mistake,) = convert_to_mistakes(launch_draft, [finding])
    assert str(mistake) == (
        "training.model.optim.weigth_decay=0.1: no shipped configuration has this key [keys.unknown]\n"
        "  from tree/training/mine.yaml:4\n"
        "  did you mean training.model.optim.weight_decay?"
    )


def test_errors_are_refused_together_with_their_sources() -> None:
    launch_draft = draft_with("training.model.global_batch_size=100", "training.model.num_query_groups=5")
    with pytest.raises(Mistakes) as raised:
        refuse(launch_draft, reported_findings(launch_draft))
    first, second = raised.value.mistakes
    assert "[batch.global]" in first.message and "[model.heads]" in second.message
    assert first.source is not None
    assert first.source.startswith("from the command line: training.model.global_batch_size=100\n")
    refuse(launch_draft, findings_of(launch_draft, ["batch.global", "model.heads"]))


def test_secrets_that_others_may_read_are_found(workdir: Path) -> None:
    from dataclasses import replace

    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (workdir / name).touch()
        (workdir / name).chmod(mode)
    launch_draft = draft_with()
    files = {"A_TOKEN": str(workdir / "open"), "B_TOKEN": str(workdir / "closed"), "C_TOKEN": "/no/such/file"}
    job = replace(launch_draft.plan.job, environment_files=files)
    launch_draft = replace(launch_draft, plan=replace(launch_draft.plan, job=job))
    assert gather([launch_draft])[0].open_secrets == {"A_TOKEN": str(workdir / "open")}


@pytest.mark.parametrize(
    "size", ["gpt3/126m", "gpt2/124m", "llama/llama3_8b", "t5/3b", "mt5/3b", "bert/110m"]
)
def test_keys_of_a_shipped_size_are_known(size: str) -> None:
    """The keys of a T5's stacks are in a file that is included twice, below other nodes."""
    launch_draft = draft_with(f"training={size}", "+training.model.foo_bar=1")
    assert gather([launch_draft])[0].added_keys == ("model.foo_bar",)


def test_keys_that_checks_read_are_known() -> None:
    experts = ("num_moe_experts=8", "expert_model_parallel_size=2", "override_vocab_size=50304")
    launch_draft = draft_with(
        *(f"+training.model.{text}" for text in experts), "+training.model.num_moe_expert=8"
    )
    assert gather([launch_draft])[0].added_keys == ("model.num_moe_expert",)
    hints = [finding.fix for finding in findings_of(launch_draft) if finding.id == "keys.unknown"]
    assert hints == ["did you mean training.model.num_moe_experts?"]


@pytest.mark.parametrize(
    ("added", "unknown"),
    [
        ("model.foo=1", True),
        ("model.optim.foo=1", True),
        ("exp_manager.foo=1", True),
        ("trainer.foo=x", True),
        ("model.sharp=True", False),  # a shipped configuration has it
        ("model.foo=null", False),
        ("model.moe_extended_tp=True", True),
        ("model.qkv_bias=True", False),
        ("model.calculate_per_token_loss=True", False),
        ("model.account_for_loss_in_pipeline_split=True", False),
        ("model.optim.sched.max_steps=1000", False),
        ("model.fp8_recipe=delayed", False),
    ],
)
def test_keys_without_an_option_of_megatron_lm_are_refused(added: str, unknown: bool) -> None:
    key = added.partition("=")[0]
    text = added if key == "model.sharp" else f"+training.{added}"
    launch_draft = draft_with("engine=megatron_lm", text.replace("model.sharp", "training.model.sharp"))
    findings = [finding for finding in findings_of(launch_draft) if finding.id == "keys.unknown"]
    assert [finding.key for finding in findings] == ([f"training.{key}"] if unknown else [])
    assert all(finding.severity is Severity.ERROR for finding in findings)


def test_a_key_that_one_stack_alone_has_is_refused() -> None:
    gelu = [f"training.model.{stack}.activation=gelu" for stack in ("encoder", "decoder")]
    for stack in ("encoder", "decoder"):
        text = f"+training.model.{stack}.foo=1"
        launch_draft = draft_with("training=t5/220m", "engine=megatron_lm", *gelu, text)
        keys = [finding.key for finding in findings_of(launch_draft) if finding.id == "keys.unknown"]
        assert keys == [f"training.model.{stack}.foo"]


def test_missing_secrets_are_found(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("closed", "good"):
        (workdir / name).touch()
    os.mkfifo(workdir / "fifo")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")
    launch_draft = draft_with(
        f"env_files.A={workdir}/lost",
        f"env_files.B={workdir}",
        f"env_files.C={workdir}/closed",
        f"env_files.D={workdir}/good",
        f"env_files.E={workdir}/fifo",
        "wandb_api_key_file=/nonexist/x",
    )
    paths = gather([launch_draft])[0].paths
    secrets = paths.secrets if paths is not None else None
    assert secrets is not None
    assert [(secret.key, secret.why, secret.certain) for secret in secrets] == [
        ("env_files.A", "there is no such file", True),
        ("env_files.B", "a directory, not a file", True),
        ("env_files.C", "you may not read this file", True),
        ("env_files.E", "a FIFO or a device, not a file: the job would wait for it", True),
        ("wandb_api_key_file", "there is no such file on this machine; every node must have it", False),
    ]
    assert gather([launch_draft], look=False)[0].paths is None
    severities = [finding.severity for finding in findings_of(launch_draft) if finding.id == "secret.file"]
    assert severities == [Severity.ERROR] * 4 + [Severity.WARNING]


def test_gpus_per_task_are_compared_with_those_of_a_node() -> None:
    by_task = ("cluster=bcm", "cluster.gpu_request=gpus_per_task", "cluster.gpus_per_task=2")
    (error,) = (finding for finding in findings_of(draft_with(*by_task)) if finding.id == "layout.gpus")
    assert (error.severity, error.key) == (Severity.ERROR, "cluster.gpus_per_task")
    assert "need 16 GPUs; the node has 8" in error.message
    wider = draft_with(*by_task, "+stage_cluster.training={gpus_per_node: 16, gres: null}")
    assert gather([wider])[0].node_gpus == 16


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.model.optim.sched.name=Cosin",
            "'Cosin': expected one of CosineAnnealing, WarmupAnnealing",
        ),
        ("+training.model.attention_backend=sdap", "'sdap': expected one of auto, transformer_engine, sdpa"),
        ("+training.model.num_layer=3", "3: unknown key; did you mean 'training.model.num_layers'?"),
    ],
)
def test_configuration_that_the_trainer_refuses_becomes_no_job(override: str, message: str) -> None:
    launch_draft = draft_with("training=gpt3/tiny", "cluster=local", override)
    findings = [finding for finding in findings_of(launch_draft) if finding.severity is Severity.ERROR]
    assert [finding.id for finding in findings] == ["engine.megatron"]
    key = override.lstrip("+").partition("=")[0]
    assert (findings[0].key, findings[0].message) == (
        key,
        f"{key}={message}{findings[0].message.partition(message)[2]}",
    )


def test_trainer_is_not_asked_beside_other_errors_or_for_other_engines() -> None:
    mistakes = ("training.model.optim.sched.name=Cosin", "training.model.global_batch_size=33")
    ids = [
        finding.id for finding in findings_of(draft_with("training=gpt3/tiny", "cluster=local", *mistakes))
    ]
    assert "engine.megatron" not in ids
    assert "batch.global" in ids
    assert check_drafts([draft_with("training.model.optim.sched.name=Cosin")])[0].facts.trainer_verdict == ""


def test_trainer_is_not_shadowed_by_the_users_directory(workdir: Path) -> None:
    (workdir / "slipway").mkdir()
    (workdir / "json.py").write_text("raise SystemExit('not this one')")
    assert check_drafts([draft_with("training=gpt3/tiny", "cluster=local")])[0].facts.trainer_verdict == ""


def test_trainer_that_cannot_be_asked_skips_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python3")
    launch_draft = draft_with("training=gpt3/tiny", "cluster=local")
    assert check_drafts([launch_draft])[0].facts.trainer_verdict is None
    (skipped,) = [finding for finding in findings_of(launch_draft) if finding.id == "engine.megatron"]
    assert skipped.severity is Severity.SKIPPED
