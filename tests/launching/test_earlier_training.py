"""A launch under the name of another training, on other data, or from a checkpoint that is not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checks.shelves import data_set, stock
from tests.forked_slipway import run_forked
from tests.integration.conftest import SLIPWAY, run_command

pytestmark = pytest.mark.timeout(300)

# The job does nothing: the tests are about the checks before it.
MOCK = "training.model.data.data_impl=mock"
FAST = ("cluster=local", "cluster.python=/bin/true", "training=gpt3/tiny", "training.run.name=mine")


def launch(cwd: Path, *overrides: str, code: int = 0, job: tuple[str, ...] = FAST) -> str:
    """Launch, wait for the job's end, and return the stderr of the launch."""
    done = run_forked(["launch", *job, *overrides], cwd=cwd, env=dict(os.environ), timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    deadline = time.monotonic() + 60
    while code == 0 and not list(newest(cwd).glob("marks/*.ended.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return done.stderr


def launches(cwd: Path) -> list[str]:
    return sorted(path.name for path in (cwd / "results/mine/launches").iterdir())


def newest(cwd: Path) -> Path:
    return cwd / "results/mine/launches" / launches(cwd)[-1]


def manifest(cwd: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((newest(cwd) / "launcher.json").read_text())
    return content


def checkpoint(cwd: Path, name: str, serial: int = 1, **marker: Any) -> Path:
    """Write a checkpoint that is complete as far as the launcher looks; return its path."""
    path = cwd / "results/mine/checkpoints" / name
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"weights")
    content = {"step": serial, "serial": serial, "files": {"weights": 7}, **marker}
    (path / "complete.json").write_text(json.dumps(content))
    return path


# --- another training


def test_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    launch(tmp_path, MOCK)
    message = launch(tmp_path, MOCK, "training.model.num_layers=4", "training.model.hidden_size=256", code=2)
    assert "training.run.name='mine': launch 1 of this run trains another model or tokenizer" in message
    assert "training.model.num_layers 2 → 4" in message
    assert "training.model.hidden_size 128 → 256" in message
    assert "training.run.name=..." in message and "[run.training]" in message
    assert launches(tmp_path) == ["1"]
    launch(tmp_path, MOCK, "training.model.num_layers=4", "--no-check=run.training")
    assert manifest(tmp_path)["differs"]["changes"] == [
        {"key": "training.model.num_layers", "old": 2, "new": 4}
    ]


def test_checkpoints_of_a_run_of_the_nemo_launcher_are_not_passed_over(tmp_path: Path) -> None:
    old, new = (tmp_path / "results/mine" / name for name in ("results/checkpoints", "checkpoints"))
    (old / "megatron_gpt--val_loss=2.0-step=4000-last").mkdir(parents=True)
    message = launch(tmp_path, MOCK, code=2)
    assert "the NeMo launcher saved this run in" in message
    assert f"mv -T {old} {new}" in message
    assert not (tmp_path / "results/mine/launches").exists()
    old.rename(new)
    launch(tmp_path, MOCK)


def test_other_tensor_parallel_size_is_refused_for_a_checkpoint_in_shards(tmp_path: Path) -> None:
    sizes = {f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "virtual_pipeline")}
    saved = checkpoint(tmp_path, "m-step=1", optimizer="dp_reshardable", **sizes)
    tensor = ("training.model.tensor_model_parallel_size=2", "training.trainer.devices=2")
    message = launch(tmp_path, MOCK, *tensor, code=2)
    assert "the optimizer states of the checkpoint m-step=1 are in shards of 1 [run.shards]" in message
    assert f"python -m slipway.trainer.checkpoint.reshard {saved}" in message
    launch(tmp_path, MOCK, *tensor, "training.resume.load_optimizer=False")


@pytest.mark.parametrize(
    "changed",
    [
        "training.model.tokenizer.library=sentencepiece",
        "engine=megatron_lm",
        "+training.model.position_embedding_type=rope",
        "training.trainer.precision=bf16",
    ],
)
def test_another_tokenizer_engine_or_precision_is_refused(tmp_path: Path, changed: str) -> None:
    launch(tmp_path, MOCK)
    skipped = [f"--no-check={name}" for name in ("path.tokenizer", "engine.megatron", "type.flag")]
    message = launch(tmp_path, MOCK, changed, *skipped, code=2)
    assert "trains another model or tokenizer" in message
    assert launches(tmp_path) == ["1"]


def test_another_rate_seed_or_batch_is_reported_and_recorded(tmp_path: Path) -> None:
    launch(tmp_path, MOCK)
    assert manifest(tmp_path)["differs"] is None
    message = launch(
        tmp_path,
        MOCK,
        "training.model.optim.lr=0.05",
        "training.model.seed=7",
        "training.model.global_batch_size=64",
    )
    assert "warning: training.run.name='mine': launch 1 of this run had other settings" in message
    assert "training.model.optim.lr 0.006 → 0.05" in message
    assert "training.model.seed 1234 → 7" in message
    assert "continues from its checkpoints" in message
    recorded = manifest(tmp_path)["differs"]
    assert recorded["launch"] == 1
    keys = {change["key"] for change in recorded["changes"]}
    assert keys == {"training.model.optim.lr", "training.model.seed", "training.model.global_batch_size"}


KEEPS = "+training.model.optim.sched.max_steps=200"


@pytest.mark.parametrize(
    ("step", "overrides", "rates"),
    [
        (200, ("training.trainer.max_steps=400",), "of step 201 from 0.0006 to 0.0035"),
        (100, ("training.trainer.max_steps=150",), "of step 101 from 0.0038 to"),
        (None, ("training.trainer.max_steps=400",), "of step 22 from"),
        (200, ("training.trainer.max_steps=400", KEEPS), None),
        (200, (), None),
    ],
)
def test_a_longer_training_says_how_the_rate_moves(
    tmp_path: Path, step: int | None, overrides: tuple[str, ...], rates: str | None
) -> None:
    launch(tmp_path, MOCK)
    if step is not None:
        checkpoint(tmp_path, f"m-step={step}", serial=step)
    message = launch(tmp_path, MOCK, *overrides)
    assert ("changes the learning rate" in message) is (rates is not None)
    if rates is not None:
        assert f"launch 1 of this run had 200: it changes the learning rate {rates}" in message
        assert f"to keep it: {KEEPS}" in message


@pytest.mark.parametrize("key", ["shuffle_documents", "dataloader_type"])
def test_a_key_that_moves_the_order_of_the_data_is_reported(tmp_path: Path, key: str) -> None:
    launch(tmp_path, MOCK)
    changed = f"+training.model.data.{key}=cyclic".replace("+", "" if key == "dataloader_type" else "+")
    message = launch(tmp_path, MOCK, changed, "--no-check=engine.megatron")
    assert f"had other settings: training.model.data.{key}" in message


def test_a_finished_training_says_before_it_is_launched_that_nothing_is_left(tmp_path: Path) -> None:
    launch(tmp_path, MOCK)
    checkpoint(tmp_path, "megatron_gpt-step=200", step=200)
    assert "nothing left to do: the run has a checkpoint of step 200 already" in launch(tmp_path, MOCK)
    assert "nothing left" not in launch(tmp_path, MOCK, "training.trainer.max_steps=201")


def test_changes_allowed_within_a_training_are_not_reported(tmp_path: Path) -> None:
    launch(tmp_path, MOCK)
    message = launch(
        tmp_path,
        MOCK,
        "training.trainer.max_steps=700",
        "training.trainer.devices=2",
        "training.trainer.log_every_n_steps=3",
        "training.trainer.val_check_interval=50",
        "training.run.time_limit=02:00:00",
        "training.exp_manager.checkpoint_callback_params.save_top_k=3",
        "training.model.micro_batch_size=2",
        "resilience.exclude_hours=2",
        "training.resume.lr_scale=0.5",
    )
    assert "another training" not in message
    assert manifest(tmp_path)["differs"] is None


def test_another_model_is_allowed_while_there_is_no_checkpoint(tmp_path: Path) -> None:
    """After too little memory the user tries fewer layers: no checkpoint conflicts with them."""
    failing = (FAST[0], "cluster.python=/bin/false", *FAST[2:])
    launch(tmp_path, MOCK, job=failing)
    message = launch(tmp_path, MOCK, "training.model.num_layers=1")
    assert "warning:" in message and "training.model.num_layers 2 → 1" in message
    assert "continues from its checkpoints" not in message
    checkpoint(tmp_path, "m-step=1")
    launch(tmp_path, MOCK, "training.model.num_layers=2", code=2)


# --- other data


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A working directory with data/, and a first launch that read it."""
    stock(tmp_path / "data")
    launch(tmp_path)
    return tmp_path


def test_the_manifest_has_the_identity_of_the_data(workdir: Path) -> None:
    files = {Path(file["name"]).name: file for file in manifest(workdir)["data"]}
    data = workdir / "data"
    assert set(files) == {"corpus_text_document.bin", "corpus_text_document.idx", "vocab.json", "merges.txt"}
    assert files["corpus_text_document.bin"]["size"] == (data / "corpus_text_document.bin").stat().st_size
    assert files["vocab.json"]["key"] == "model.tokenizer.vocab_file"
    assert all(file["checksum"].startswith("sha256:") for file in files.values())


def test_touched_and_moved_data_are_the_same(workdir: Path) -> None:
    for path in workdir.glob("data/**/*.*"):
        os.utime(path)
    assert "another training" not in launch(workdir)
    for suffix in (".bin", ".idx"):
        shutil.move(f"{workdir}/data/corpus_text_document{suffix}", f"{workdir}/data/moved{suffix}")
    shutil.move(workdir / "data/bpe", workdir / "data/moved_bpe")
    message = launch(
        workdir,
        f"training.model.data.data_prefix=[{workdir}/data/moved]",
        f"training.model.tokenizer.vocab_file={workdir}/data/moved_bpe/vocab.json",
        f"training.model.tokenizer.merge_file={workdir}/data/moved_bpe/merges.txt",
    )
    assert "another training" not in message
    assert manifest(workdir)["differs"] is None


@pytest.mark.parametrize("name", ["corpus_text_document.bin", "corpus_text_document.idx", "bpe/vocab.json"])
def test_exchanged_files_are_refused_until_they_are_accepted(workdir: Path, name: str) -> None:
    path = workdir / "data" / name
    content, old_stat = bytearray(path.read_bytes()), path.stat()
    if name.endswith(".idx"):
        data_set(workdir / "data/corpus_text_document", (2200, 2000, *(2100,) * 6298))  # as large
    else:
        content[-1 if name.endswith(".bin") else -2] ^= 1
        path.write_bytes(content)
    # As after `cp -p` and `rsync -t`: neither the size nor the time shows the change.
    os.utime(path, ns=(old_stat.st_atime_ns, old_stat.st_mtime_ns))
    message = launch(workdir, code=2)
    assert "launch 1 of this run was trained on other data" in message
    assert f"{path} (model." in message and "same size" in message
    assert launches(workdir) == ["1"]
    accept = message.partition("training.resume.accept_data=data-")[2].split()[0]
    launch(workdir, "training.resume.accept_data=data-000000000000", code=2)
    message = launch(workdir, f"training.resume.accept_data=data-{accept}")
    assert "you accepted data that differ" in message
    launch(workdir)
    assert launches(workdir) == ["1", "2", "3"]


def write_manifest(prefix: Path, source: str) -> None:
    """Write the manifest of a data set, of one source with that SHA-256, beside it."""
    data = prefix.with_name(f"{prefix.name}.bin")
    output = {"path": data.name, "size": data.stat().st_size, "sha256": hash_of(data)}
    content = {
        "version": 1,
        "sources": [{"name": "s3://raw/a.jsonl", "sha256": source * 64}],
        "tokenizer": {"sha256": "f" * 64},
        "options": {"seed": 1},
        "outputs": [output],
    }
    prefix.with_name(f"{prefix.name}.manifest.json").write_text(json.dumps(content))


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_origin_of_the_data_is_recorded_and_its_changes_are_reported(tmp_path: Path) -> None:
    stock(tmp_path / "data")
    prefix = tmp_path / "data/corpus_text_document"
    write_manifest(prefix, "a")
    launch(tmp_path)
    files = {Path(file["name"]).name: file for file in manifest(tmp_path)["data"]}
    origin = files["corpus_text_document.bin"]["origin"]
    assert origin["sha256"] == hash_of(Path(f"{prefix}.bin"))
    assert origin["sources"] == [["s3://raw/a.jsonl", "a" * 64]]
    assert (origin["tokenizer"], origin["options"]) == ("f" * 64, {"seed": 1})
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[0] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    write_manifest(prefix, "b")
    message = launch(tmp_path, code=2)
    assert "source s3://raw/a.jsonl changed (aaaaaaaaaaaa → bbbbbbbbbbbb)" in message
    assert launches(tmp_path) == ["1"]


def test_the_data_of_the_checkpoint_count_and_not_those_of_the_launch(workdir: Path) -> None:
    """Data that were accepted for a launch that saved nothing are not those of the checkpoint."""
    data = manifest(workdir)["data"]
    (workdir / "data/bpe/vocab.json").write_text('{"<|endoftext|>":  0}')
    launch(workdir, "--no-check=data.identity")
    launch(workdir)
    checkpoint(workdir, "m-step=1", data=data)
    assert "the checkpoint m-step=1 was trained on other data" in launch(workdir, code=2)


def test_another_runs_checkpoint_is_compared_too(workdir: Path) -> None:
    other_checkpoint = workdir / "theirs/m-step=1"
    other_checkpoint.parent.mkdir()
    checkpoint(workdir, "m-step=1", data=manifest(workdir)["data"]).rename(other_checkpoint)
    new = ("training.run.name=new", f"training.resume.checkpoint='{other_checkpoint}'")
    run_command(SLIPWAY, "launch", *FAST, *new, cwd=workdir)
    (workdir / "data/bpe/vocab.json").write_text('{"<|endoftext|>":  0}')
    message = run_command(
        SLIPWAY, "launch", *FAST, *new, "training.run.name=newer", cwd=workdir, check=2
    ).stderr
    assert "the checkpoint m-step=1 was trained on other data" in message
    assert not (workdir / "results/newer").exists()


def test_other_engines_take_accept_data_too(workdir: Path) -> None:
    message = launch(workdir, "engine=nemo", "nemo_path=/nemo", "--no-check=run.training")
    assert "accept" not in message
    (workdir / "results/mine/checkpoints/nemo-step=100-last").mkdir(parents=True)
    (workdir / "data/bpe/merges.txt").write_text("#version: 0.3\n")
    message = launch(workdir, "engine=nemo", "nemo_path=/nemo", code=2)
    accept = message.partition("training.resume.accept_data=data-")[2].split()[0]
    launch(workdir, "engine=nemo", "nemo_path=/nemo", f"training.resume.accept_data=data-{accept}")


# --- a checkpoint to go on from


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    message = launch(tmp_path, MOCK, "training.resume.checkpoint=nope", code=2)
    assert "training.resume.checkpoint='nope': there is no such checkpoint" in message
    assert not (tmp_path / "results").exists()
    for serial, name in enumerate(("m-step=100", "m-step=200"), start=1):
        checkpoint(tmp_path, name, serial)
    message = launch(tmp_path, MOCK, "training.resume.checkpoint='m-step=1000'", code=2)
    assert "did you mean 'm-step=100'?" in message
    assert "the newest first: m-step=200, m-step=100" in message
    launch(tmp_path, MOCK, "training.resume.checkpoint='m-step=100'")


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "m-step=100")
    (path / "weights").write_bytes(b"short")
    message = launch(tmp_path, MOCK, f"training.resume.checkpoint='{path}'", code=2)
    assert "weights has 5 bytes of 7" in message
    (path / "complete.json").unlink()
    message = launch(tmp_path, MOCK, "training.resume.checkpoint='m-step=100'", code=2)
    assert "not a complete checkpoint: no complete.json" in message


def test_a_finished_intervention_no_longer_needs_its_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, "m-step=300", 3, resume={"checkpoint": "m-step=100"})
    launch(tmp_path, MOCK, "training.resume.checkpoint='m-step=100'")


@pytest.mark.parametrize(
    "key",
    [
        "training.model.resume_from_checkpoint",
        "+training.model.restore_from_path",
        "+training.exp_manager.resume_from_checkpoint",
    ],
)
def test_nemos_keys_of_a_checkpoint_are_checked(tmp_path: Path, key: str) -> None:
    nemo = ("engine=nemo", "nemo_path=/nemo", MOCK, "--no-check=path.tokenizer")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/base.nemo").touch()
    message = launch(tmp_path, *nemo, f"{key}={tmp_path}/saved/bose.nemo", code=2)
    assert "there is no such checkpoint" in message and "base.nemo" in message
    assert not (tmp_path / "results").exists()
    launch(tmp_path, *nemo, f"{key}={tmp_path}/saved/base.nemo")
    (tmp_path / "saved/tp_rank_00_pp_rank_000").mkdir()
    (tmp_path / "saved/tp_rank_00_pp_rank_000/old.ckpt").touch()
    launch(tmp_path, *nemo, f"{key}={tmp_path}/saved/old.ckpt", "training.run.name=other", job=FAST[:3])


def test_weights_to_start_from_are_checked(tmp_path: Path) -> None:
    (tmp_path / "weights/gpt2").mkdir(parents=True)
    message = launch(tmp_path, MOCK, f"training.restore_from_path={tmp_path}/weights/gtp2", code=2)
    assert f"training.restore_from_path='{tmp_path}/weights/gtp2': there is no such checkpoint" in message
    assert "/weights: gpt2" in message
    (tmp_path / "weights/gpt2/config.json").write_text("{}")
    message = launch(tmp_path, MOCK, f"training.restore_from_path={tmp_path}/weights/gpt2", code=2)
    assert "slipway convert" in message and "--to slipway" in message
    (tmp_path / "weights/gpt2/weights").write_bytes(b"weights")
    marker: dict[str, Any] = {"step": 0, "serial": 1, "files": {"weights": 7}}
    marker["model"] = {"decoder": {"num_layers": 12, "hidden_size": 768}, "encoder": None}
    (tmp_path / "weights/gpt2/complete.json").write_text(json.dumps(marker))
    for path in ("weights/gpt2", "weights"):
        message = launch(tmp_path, MOCK, f"training.restore_from_path={tmp_path}/{path}", code=2)
        assert "it has model.num_layers=12, and this run 2" in message
    assert not (tmp_path / "results").exists()


def test_a_teacher_is_checked_and_may_not_change(tmp_path: Path) -> None:
    path, vocabulary = tmp_path / "models/gpt2", tmp_path / "vocab.json"
    path.mkdir(parents=True)
    key = "training.model.teacher"
    words = (MOCK, f"+{key}={path}", f"training.model.tokenizer.vocab_file={vocabulary}")
    message = launch(tmp_path, MOCK, f"+{key}={tmp_path}/models/gtp2", code=2)
    assert f"{key}='{tmp_path}/models/gtp2': there is no such directory" in message
    assert "/models: gpt2" in message
    message = launch(tmp_path, *words, code=2)
    assert "no complete.json in it that can be read, and no config.json of Hugging Face's" in message
    sizes = {"n_layer": 3, "n_embd": 12, "n_head": 4, "n_positions": 64, "vocab_size": 2}
    (path / "config.json").write_text(json.dumps(sizes))
    assert "no .safetensors file" in launch(tmp_path, *words, code=2)
    (path / "model.safetensors").touch()
    vocabulary.write_text('{"a": 0}')
    message = launch(tmp_path, *words, code=2)
    assert "it has 2 tokens, and training.model.tokenizer.vocab_file 1" in message
    vocabulary.write_text('{"a": 0, "b": 1}')
    # The trainer's own rules, by the sizes that the launcher read.
    message = launch(tmp_path, *words, code=2)
    assert f"{key}={path}: its max_position_embeddings is 64: expected at least" in message
    message = launch(tmp_path, *words, "engine=nemo", "nemo_path=/nemo", code=2)
    assert f"{key}='{path}': engine=nemo has no such option; engine=megatron has" in message
    assert not (tmp_path / "results").exists()
    (path / "config.json").write_text(json.dumps({**sizes, "n_positions": 128}))
    launch(tmp_path, *words)
    (config,) = newest(tmp_path).glob("*_hydra.yaml")
    assert yaml.safe_load(config.read_text())["model"]["distillation"]["teacher_model"] == {
        "num_layers": 3,
        "hidden_size": 12,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "max_position_embeddings": 128,
        "vocabulary": 2,
    }
    checkpoint(tmp_path, "m-step=1")
    (path / "model.safetensors").write_bytes(b"other")
    message = launch(tmp_path, *words, code=2)
    assert f"{path}/model.safetensors (model.teacher/model.safetensors): 0 → 5 bytes" in message


def test_weights_to_start_from_reach_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/complete.json").write_text(json.dumps({"step": 0, "serial": 1, "files": {}}))
    launch(tmp_path, MOCK, f"training.restore_from_path={tmp_path}/weights")
    (config,) = newest(tmp_path).glob("*_hydra.yaml")
    assert yaml.safe_load(config.read_text())["restore_from_path"] == f"{tmp_path}/weights"
    # A run with a checkpoint of its own goes on from that.
    checkpoint(tmp_path, "m-step=100")
    (tmp_path / "weights/complete.json").unlink()
    launch(tmp_path, MOCK, f"training.restore_from_path={tmp_path}/weights")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user")
@pytest.mark.parametrize("key", ["", "resume.checkpoint=kept", "restore_from_path"])
def test_checkpoint_of_another_user_is_refused_before_the_job(key: str, tmp_path: Path) -> None:
    saved = checkpoint(tmp_path, "kept")
    words = [f"training.{key}"] if "=" in key else []
    if key == "restore_from_path":
        saved = saved.rename(tmp_path / "weights")
        words = [f"training.{key}={saved}"]
    os.chown(saved / "weights", 65534, 65534)
    message = launch(tmp_path, MOCK, *words, code=2)
    assert f"{saved}/weights belongs to nobody (user 65534), neither to you nor to root" in message
    assert "training.resume.trust_owner=nobody trusts that user" in message
    assert not (tmp_path / "results/mine/launches").exists()
    launch(tmp_path, MOCK, *words, "training.resume.trust_owner=nobody")


def test_megatron_lm_starts_from_no_such_weights(tmp_path: Path) -> None:
    lm = ("engine=megatron_lm", "megatron_lm_path=/megatron", "training.restore_from_path=/weights")
    message = launch(tmp_path, MOCK, *lm, code=2)
    assert "training.restore_from_path='/weights': engine=megatron_lm has no such option" in message


@pytest.mark.parametrize("engine", ["megatron", "nemo", "megatron_lm"])
def test_a_directory_without_a_required_checkpoint_is_refused(tmp_path: Path, engine: str) -> None:
    options = (
        f"engine={engine}",
        "nemo_path=/nemo",
        "megatron_lm_path=/megatron",
        MOCK,
        "--no-check=path.tokenizer",
    )
    message = launch(tmp_path, *options, "training.exp_manager.resume_ignore_no_checkpoint=False", code=2)
    assert "there is no complete checkpoint in it" in message
    assert "training.exp_manager.resume_ignore_no_checkpoint=True starts from step 0" in message


def test_megatron_lms_record_must_name_an_existing_iteration(tmp_path: Path) -> None:
    lm = ("engine=megatron_lm", "megatron_lm_path=/megatron", MOCK, "--no-check=path.tokenizer")
    saved = tmp_path / "results/mine/checkpoints"
    saved.mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("200\n")
    (saved / "iter_0000100").mkdir()
    message = launch(tmp_path, *lm, code=2)
    assert "says '200', and there is no iter_0000200" in message and "iter_0000100" in message
    (saved / "iter_0000200").mkdir()
    launch(tmp_path, *lm)


def test_check_says_the_same_and_a_dry_run_skips_it(tmp_path: Path) -> None:
    command = (SLIPWAY, "check", *FAST, MOCK, "training.resume.checkpoint=nope", "--no-check=machine")
    done: subprocess.CompletedProcess[str] = run_command(*command, cwd=tmp_path, check=2)
    assert "[path.checkpoint]" in done.stdout + done.stderr
    launch(tmp_path, MOCK)
    dry = (SLIPWAY, "launch", *FAST, MOCK, "training.model.num_layers=4", "--dry-run")
    assert run_command(*dry, cwd=tmp_path).stderr == ""
