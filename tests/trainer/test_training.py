"""Real trainings of a very small GPT on CPUs, each in processes of its own."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trainer

DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
TENSOR_2 = {"model.tensor_model_parallel_size": 2}
BITWISE = ("loss", "grad_norm", "lr", "consumed_samples")


def ended_well(outcome: Any) -> bool:
    assert outcome.codes == [0] * len(outcome.codes), "\n".join(outcome.stderr)
    assert not any(outcome.stderr), outcome.stderr
    return True


@pytest.fixture(scope="module")
def plain(trainings: Any) -> Any:
    """Return a training of one process without dropout."""
    outcome = trainings("plain")
    assert ended_well(outcome)
    return outcome


@pytest.fixture(scope="module")
def tensor_parallel(trainings: Any) -> Any:
    """Return a training of two tensor-parallel processes without dropout."""
    outcome = trainings("tensor_parallel", TENSOR_2, world=2)
    assert ended_well(outcome)
    return outcome


def test_loss_falls_and_all_events_are_written(plain: Any) -> None:
    (start,) = plain.lines("start")
    assert {key: start[key] for key in ("step", "max_steps", "world_size", "tensor", "data")} == {
        "step": 0,
        "max_steps": 6,
        "world_size": 1,
        "tensor": 1,
        "data": 1,
    }
    assert start["tokens_per_step"] == 256
    assert start["resumed_from"] is None
    assert start["attention"] == "sdpa (flash)"
    # 304 x 32 embeddings, 32 x 32 positions, 2 layers of 12 h^2 + 13 h, the last norm's 2 h.
    assert start["parameters"] == 304 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    steps = plain.lines("train")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["consumed_samples"] for line in steps] == [8, 16, 24, 32, 40, 48]
    assert abs(steps[0]["loss"] - math.log(304)) < 0.2
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert [line["lr"] for line in steps[:3]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    for line in steps:
        flops = start["model_flops_per_sample"] * 8 / line["step_time"]
        assert line["tflops_per_gpu"] == pytest.approx(flops / 1e12)
        assert line["mfu"] is None
        assert 0 < line["data_wait"] < 1
        assert line["memory_bytes"] > 100 << 20
    assert [line["step"] for line in plain.lines("validation")] == [4, 6]
    (data,) = plain.lines("data")
    # Whole windows, but not whole batches: the last one is padded, and differently in each world.
    assert data["tokens"] % 32 == 0
    assert data["tokens"] % (8 * 32) != 0
    assert 1 < data["unigram_entropy"] < math.log(300)
    assert [line["reason"] for line in plain.lines("end")] == ["max_steps"]


def test_log_directory_has_its_files(plain: Any) -> None:
    names = {path.name for path in plain.log_dir.iterdir()}
    expected = {"nemo_log_globalrank-0_localrank-0.txt", "cmd-args.log", "hparams.yaml", "metrics.jsonl"}
    assert expected <= names
    assert {"nemo_error_log.txt", "failures"}.isdisjoint(names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    # After each validation, and at the end.
    checkpoints = [(line["step"], Path(line["path"]).name) for line in plain.lines("checkpoint")]
    assert checkpoints == [
        (
            line["step"],
            f"megatron_gpt--val_loss={line['val_loss']:.2f}-step={line['step']}-"
            f"consumed_samples={8 * line['step']}",
        )
        for line in plain.lines("validation")
    ]
    assert (plain.log_dir / "checkpoints" / "latest").readlink() == Path(checkpoints[-1][1])
    lines = plain.stdout[0].splitlines()
    assert sum(line.startswith("step ") and "| loss" in line and "eta" in line for line in lines) == 6
    assert any(
        line.startswith("checkpoints: after every 4 steps and at the end, in ")
        and line.endswith(" | kept: the best 3 by val_loss (min) and the newest")
        for line in lines
    )
    log = (plain.log_dir / "nemo_log_globalrank-0_localrank-0.txt").read_text()
    assert "WARNING" not in log


def test_tensorboard_has_nemos_names(plain: Any) -> None:
    import struct

    from tensorboard.compat.proto.event_pb2 import Event

    (path,) = plain.log_dir.glob("events.out.tfevents.*")
    content, offset, scalars = path.read_bytes(), 0, {}
    while offset < len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        event = Event.FromString(content[offset + 12 : offset + 12 + length])
        offset += 12 + length + 4
        for value in event.summary.value:
            scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert set(scalars) == {
        "reduced_train_loss",
        "val_loss",
        "lr",
        "global_step",
        "consumed_samples",
        "epoch",
        "train_step_timing in s",
        "tflops_per_sec_per_gpu",
        "tokens_per_second",
        "data_wait",
        "memory_bytes",
        "validation_step_timing in s",
        "grad_norm",
    }
    assert scalars["global_step"] == [(step, step) for step in range(1, 7)]
    assert [step for step, _ in scalars["val_loss"]] == [4, 6]


def test_tensor_parallelism_changes_no_loss(plain: Any, tensor_parallel: Any) -> None:
    ours, theirs = tensor_parallel.curve("loss", "grad_norm"), plain.curve("loss", "grad_norm")
    assert [value for step in ours for value in step] == pytest.approx(
        [value for step in theirs for value in step], rel=1e-4
    )
    assert tensor_parallel.lines("start")[0]["parameters"] == plain.lines("start")[0]["parameters"]
    assert tensor_parallel.stdout[1] == ""


def test_data_parallelism_changes_no_loss(plain: Any, trainings: Any) -> None:
    outcome = trainings("data_parallel", world=2)
    assert ended_well(outcome)
    assert [value for step in outcome.curve("loss", "grad_norm") for value in step] == pytest.approx(
        [value for step in plain.curve("loss", "grad_norm") for value in step], rel=1e-4
    )
    assert outcome.lines("validation")[-1]["val_loss"] == pytest.approx(
        plain.lines("validation")[-1]["val_loss"], rel=1e-4
    )
    assert outcome.lines("data")[0]["tokens"] == plain.lines("data")[0]["tokens"]


def test_a_resumed_training_is_bitwise_the_same_with_dropout(trainings: Any) -> None:
    whole = trainings("whole", DROPOUT)
    half = trainings("halves", DROPOUT, arguments=["--stop-after", "3"])
    assert ended_well(whole)
    assert ended_well(half)
    assert [line["reason"] for line in half.lines("end")] == ["stop_after"]
    checkpoints = half.log_dir / "checkpoints"
    (checkpoints / "megatron_gpt--step=5").mkdir()
    (checkpoints / ".unfinished-megatron_gpt--step=4").mkdir()
    metrics = half.log_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("sdpa (math)", "sdpa (cudnn)", 1))
    resumed = trainings("halves", DROPOUT)
    assert ended_well(resumed)
    assert "attention: sdpa (math); when this run began: sdpa (cudnn)" in resumed.stdout[0]
    assert "when this run began" not in whole.stdout[0]
    assert resumed.curve(*BITWISE) == whole.curve(*BITWISE)
    assert resumed.lines("validation")[-1]["val_loss"] == whole.lines("validation")[-1]["val_loss"]
    assert "step=3" in resumed.lines("start")[1]["resumed_from"]
    for torn in ("megatron_gpt--step=5", ".unfinished-megatron_gpt--step=4"):
        assert f"{torn}: it is not a complete checkpoint" in resumed.stdout[0]


def test_a_resumed_tensor_parallel_training_is_bitwise_the_same(tensor_parallel: Any, trainings: Any) -> None:
    half = trainings("tensor_halves", TENSOR_2, world=2, arguments=["--stop-after", "3"])
    resumed = trainings("tensor_halves", TENSOR_2, world=2)
    assert ended_well(half)
    assert ended_well(resumed)
    assert resumed.curve(*BITWISE) == tensor_parallel.curve(*BITWISE)


def test_a_complete_training_is_left_alone_and_another_size_is_refused(
    tensor_parallel: Any, trainings: Any
) -> None:
    other = trainings("tensor_parallel", {"model.ffn_hidden_size": 64})
    assert other.codes == [2]
    assert "the model has ffn_hidden_size=64, but the checkpoint" in other.stderr[0]
    assert "has 128: keep it, or train into another" in other.stderr[0]
    assert "Traceback" not in other.stderr[0]
    again = trainings("tensor_parallel", TENSOR_2, world=2)
    assert ended_well(again)
    assert [line["reason"] for line in again.lines("end")] == ["max_steps", "already_complete"]
    assert [line["step"] for line in again.lines("checkpoint")] == [4, 6]


def test_bf16_with_master_weights_as_the_stock_sizes_have_it(trainings: Any) -> None:
    stock = {
        "trainer.precision": "bf16",
        "trainer.accelerator": "auto",
        "trainer.max_time": "00:23:30:00",
        "model.megatron_amp_O2": True,
        "model.transformer_engine": True,
        "model.optim.name": "mcore_distributed_optim",
        "model.apply_query_key_layer_scaling": True,
        "model.data.data_impl": "mock",
        "trainer.limit_val_batches": 1,
        "model.tokenizer.vocab_file": "/absent/vocab.json",
        "exp_manager.create_checkpoint_callback": False,
        "model.make_vocab_size_divisible_by": 128,
        # A quarter of the tokens, each of which has 50,304 logits.
        "model.micro_batch_size": 1,
        "model.global_batch_size": 2,
        **DROPOUT,
    }
    outcome = trainings("stock", stock)
    assert ended_well(outcome)
    losses = [loss for _, loss in outcome.curve("loss")]
    assert losses[-1] < losses[0] - 0.3
    assert outcome.lines("checkpoint") == outcome.lines("data") == []
    assert not (outcome.log_dir / "checkpoints").exists()
    output = outcome.stdout[0]
    assert "bf16 weights, fp32 masters" in output
    assert "50,257 padded to 50,304" in output
    assert (
        "Transformer Engine needs CUDA"
        in (outcome.log_dir / "nemo_log_globalrank-0_localrank-0.txt").read_text()
    )
    assert "CPU (gloo)" in output
    assert "every rank keeps whole optimizer states" in output


def test_a_diverging_loss_exits_with_3_and_saves_nothing(trainings: Any) -> None:
    outcome = trainings("diverging", {"model.optim.lr": 1e30, "model.optim.sched.min_lr": 1e29})
    assert outcome.codes == [3]
    assert "stopping without a checkpoint" in outcome.stdout[0]
    assert "Traceback" not in outcome.stderr[0]
    assert {path.name for path in (outcome.log_dir / "checkpoints").iterdir()} == {".lock"}
    assert outcome.lines("end") == []


def test_dead_rank_ends_the_job_and_the_other_names_it(trainings: Any) -> None:
    changes = {**TENSOR_2, "trainer.max_steps": 100000}
    processes, log_dir = trainings.start("dying", changes, 2, [])
    for line in processes[0].stdout:
        if line.startswith("step"):
            break
    processes[1].send_signal(signal.SIGKILL)
    outcome = trainings.finish(processes, log_dir)
    assert outcome.codes == [1, -signal.SIGKILL]
    assert outcome.stderr[0].startswith("rank 0 (local rank 0): rank 1 on ")
    assert len(outcome.stderr[0].splitlines()) == 1
    assert (log_dir / "nemo_error_log.txt").read_text() == outcome.stderr[0]
    assert "Traceback" in (log_dir / "nemo_log_globalrank-0_localrank-0.txt").read_text()


def test_mistakes_exit_with_2_and_one_line(trainings: Any) -> None:
    misspelt = trainings("misspelt", {"model.hiden_size": 3}, world=2)
    assert misspelt.codes == [2, 2]
    assert misspelt.stderr == [
        "error: model.hiden_size=3: unknown key; did you mean 'model.hidden_size'?\n",
        "",
    ]
    short = trainings("short", {"model.data.splits_string": "1,99,0", "model.encoder_seq_length": 512})
    assert short.codes == [2]
    assert "the training split of" in short.stderr[0]
    assert "Traceback" not in short.stderr[0]
    nothing = trainings("nothing", {"exp_manager.resume_ignore_no_checkpoint": False})
    assert nothing.codes == [2]
    assert "there is no complete checkpoint" in nothing.stderr[0]


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="there may be a usable GPU")
def test_missing_gpu_is_a_mistake(trainings: Any) -> None:
    outcome = trainings("no_gpu", {"trainer.accelerator": "gpu"})
    assert outcome.codes == [2]
    assert outcome.stderr[0].startswith("error: trainer.accelerator=gpu: ")
    assert outcome.stderr[0].endswith("to train on the CPU: training.trainer.accelerator=cpu\n")
