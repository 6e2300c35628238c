"""engine=megatron_lm: the arguments that describe the same training to Megatron-LM's own scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose, list_options
from launcher.errors import UserError
from launcher.plan import Job
from launcher.stages.planning import plan_launch

HERE = Path(__file__).parent

_GELU = [f"training.model.{stack}.activation=gelu" for stack in ("encoder", "decoder")]

# T5's stock activation is one that Megatron-LM lacks.
REVIEWED = {
    "gpt3_126m": ["training=gpt3/126m"],
    "t5_220m": ["training=t5/220m", *_GELU],
}

# Options of Megatron-LM core_v0.12.3 (megatron/training/arguments.py) that describe a training.
_NAMES = """
    adam-beta1 adam-beta2 adam-eps add-qkv-bias apply-layernorm-1p apply-query-key-layer-scaling
    attention-dropout bf16 clip-grad context-parallel-size data-cache-path data-path decoder-num-layers
    decoder-seq-length disable-bias-linear encoder-num-layers encoder-pipeline-model-parallel-size
    encoder-seq-length eod-mask-loss eval-interval eval-iters exit-duration-in-mins exit-signal-handler
    ffn-hidden-size fp16 fp32-residual-connection fp8-amax-compute-algo fp8-amax-history-len fp8-format
    fp8-margin global-batch-size group-query-attention hidden-dropout hidden-size hysteresis init-method-std
    initial-loss-scale kv-channels load log-interval log-throughput loss-scale-window lr lr-decay-iters
    lr-decay-style lr-warmup-iters make-vocab-size-divisible-by mask-prob max-position-embeddings merge-file
    micro-batch-size min-lr mock-data no-bias-dropout-fusion no-bias-gelu-fusion
    no-gradient-accumulation-fusion no-masked-softmax-fusion no-persist-layer-norm norm-epsilon normalization
    num-attention-heads num-layers num-layers-per-virtual-pipeline-stage num-query-groups num-workers
    overlap-grad-reduce overlap-param-gather pipeline-model-parallel-size position-embedding-type
    rampup-batch-size recompute-granularity recompute-method recompute-num-layers reset-attention-mask
    reset-position-ids rotary-base rotary-percent save save-interval seed seq-length sequence-parallel
    short-seq-prob split squared-relu swiglu tensor-model-parallel-size tensorboard-dir tokenizer-model
    tokenizer-type tp-comm-overlap train-iters transformer-impl untie-embeddings-and-output-weights
    use-cpu-initialization use-distributed-optimizer vocab-extra-ids vocab-file weight-decay
"""
OPTIONS = {f"--{name}" for name in _NAMES.split()}


def job_of(*overrides: str) -> Job:
    config = compose(["engine=megatron_lm", "launcher_scripts_path=/shared", *overrides]).config
    return plan_launch(config, number=1, tag="x").job


def lines_of(argv: tuple[str, ...]) -> str:
    """One option with its values to a line."""
    return " ".join(argv).replace(" --", "\n--") + "\n"


@pytest.mark.parametrize("name", REVIEWED)
def test_arguments_are_the_reviewed_ones(name: str, request: pytest.FixtureRequest) -> None:
    reviewed = HERE / "megatron_lm" / f"{name}.txt"
    lines = lines_of(job_of(*REVIEWED[name]).payload.argv)
    if request.config.getoption("--write-golden"):
        reviewed.write_text(lines)
    assert lines == reviewed.read_text()


@pytest.mark.parametrize("size", list_options("training"))
def test_each_size_has_arguments_that_megatron_lm_knows_or_is_refused(size: str) -> None:
    try:
        argv = job_of(f"training={size}").payload.argv
    except UserError as error:
        assert "Megatron-LM" in error.message
        return
    assert {text for text in argv if text.startswith("--")} <= OPTIONS
    assert len({text for text in argv if text.startswith("--")}) == sum(
        text.startswith("--") for text in argv
    )


def value_of(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_parallel_layers_and_precision() -> None:
    job = job_of(
        "training=gpt3/5b",
        "training.trainer.precision=16",
        "training.model.tensor_model_parallel_size=2",
        "training.model.sequence_parallel=True",
        "training.model.pipeline_model_parallel_size=4",
        "training.model.virtual_pipeline_model_parallel_size=3",
        "training.model.data.data_impl=mock",
    )
    argv = job.payload.argv
    assert value_of(argv, "--tensor-model-parallel-size") == "2"
    assert value_of(argv, "--num-layers-per-virtual-pipeline-stage") == "2"  # of 24
    assert {"--fp16", "--sequence-parallel", "--mock-data", "--apply-query-key-layer-scaling"} <= set(argv)
    assert job.environment["NVTE_APPLY_QK_LAYER_SCALING"] == "1"
    assert "--data-path" not in argv


def test_a_pipelined_t5_has_its_stages_counted_apart() -> None:
    argv = job_of("training=t5/41b", *_GELU).payload.argv
    assert value_of(argv, "--encoder-pipeline-model-parallel-size") == "1"
    assert value_of(argv, "--pipeline-model-parallel-size") == "1"


def test_signals_and_places() -> None:
    payload = job_of("megatron_lm_path=/opt/Megatron-LM", "cluster.python=/opt/bin/python").payload
    assert payload.argv[:3] == ("/opt/bin/python", "-u", "/opt/Megatron-LM/pretrain_gpt.py")
    assert payload.save_signal == "TERM"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["training=t5/220m"], "training.model.encoder.activation"),
        (["training.model.optim.sched.name=PolynomialDecay"], "training.model.optim.sched.name"),
        (["training.trainer.precision=64"], "training.trainer.precision"),
        (["training.model.tokenizer.library=byte-level"], "training.model.tokenizer.library"),
        (["training.model.fsdp=True"], "training.model.fsdp"),
        (["training.trainer.max_time=90"], "training.trainer.max_time"),
        (["megatron_lm_path=Megatron-LM"], "megatron_lm_path"),
        (
            ["training=t5/220m", *_GELU, "training.model.decoder.hidden_size=512"],
            "training.model.decoder.hidden_size",
        ),
    ],
)
def test_what_megatron_lm_cannot_do_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError) as caught:
        job_of(*overrides)
    assert caught.value.key == key
