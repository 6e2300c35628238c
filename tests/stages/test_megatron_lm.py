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

# Options that describe a training, of Megatron-LM core_v0.12.3 and, but for the encoder's stages, of 0.16.1
# (megatron/training/arguments.py). tests/megatron_lm asks their parsers.
_NAMES = """
    adam-beta1 adam-beta2 adam-eps add-qkv-bias apply-layernorm-1p apply-query-key-layer-scaling
    attention-dropout bf16 clip-grad context-parallel-size cross-entropy-loss-fusion data-cache-path
    data-path decoder-num-layers decoder-seq-length defer-embedding-wgrad-compute disable-bias-linear
    encoder-num-layers encoder-pipeline-model-parallel-size encoder-seq-length eod-mask-loss eval-interval
    eval-iters exit-duration-in-mins exit-signal-handler ffn-hidden-size fp16 fp16-lm-cross-entropy
    fp32-residual-connection fp8-amax-compute-algo fp8-amax-history-len fp8-format fp8-margin
    global-batch-size group-query-attention hidden-dropout hidden-size hysteresis init-method-std
    initial-loss-scale kv-channels load log-interval log-throughput loss-scale-window lr lr-decay-iters
    lr-decay-style lr-warmup-iters make-vocab-size-divisible-by manual-gc manual-gc-interval mask-prob
    max-position-embeddings merge-file micro-batch-size min-lr mock-data no-bias-dropout-fusion
    no-bias-gelu-fusion no-bias-swiglu-fusion no-gradient-accumulation-fusion no-masked-softmax-fusion
    no-overlap-p2p-communication no-persist-layer-norm no-rope-fusion norm-epsilon normalization
    num-attention-heads num-layers num-layers-per-virtual-pipeline-stage num-query-groups num-workers
    overlap-grad-reduce overlap-param-gather override-opt_param-scheduler pipeline-model-parallel-size
    position-embedding-type recompute-granularity recompute-method recompute-num-layers reset-attention-mask
    reset-position-ids rope-scaling-factor rotary-base rotary-interleaved rotary-percent
    rotary-seq-len-interpolation-factor save save-interval seed seq-length sequence-parallel short-seq-prob
    split squared-relu swiglu tensor-model-parallel-size tensorboard-dir tokenizer-model tokenizer-type
    tp-comm-overlap train-iters transformer-impl untie-embeddings-and-output-weights use-cpu-initialization
    use-distributed-optimizer use-rope-scaling vocab-extra-ids vocab-file weight-decay wgrad-deferral-limit
"""
_NAMES += """
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers expert-model-parallel-size
    expert-tensor-parallel-size kv-lora-rank moe-aux-loss-coeff moe-ffn-hidden-size moe-grouped-gemm
    moe-layer-freq moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
    moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups moe-router-pre-softmax
    moe-router-score-function moe-router-topk moe-router-topk-scaling-factor
    moe-shared-expert-intermediate-size moe-token-dispatcher-type multi-latent-attention num-experts
    q-lora-rank recompute-modules qk-head-dim qk-layernorm qk-pos-emb-head-dim v-head-dim
"""
OPTIONS = {f"--{name}" for name in _NAMES.split()}


def job_of(*overrides: str) -> Job:
    config = compose(["engine=megatron_lm", "launcher_scripts_path=/shared", *overrides]).config
    return plan_launch(config, number=1, tag="x").job


def lines_of(argv: tuple[str, ...]) -> str:
    """Return a line for each option with its values."""
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


def test_experts_latent_attention_and_uneven_stages_have_arguments() -> None:
    argv = job_of("training=deepseek/deepseek_v3").payload.argv
    # Megatron-LM takes a list of digits without spaces.
    assert value_of(argv, "--moe-layer-freq") == f"[0,0,0{',1' * 58}]"
    assert value_of(argv, "--num-experts") == "256"
    assert value_of(argv, "--expert-model-parallel-size") == "32"
    assert value_of(argv, "--q-lora-rank") == "1536"
    assert value_of(argv, "--decoder-first-pipeline-num-layers") == "3"
    assert {"--multi-latent-attention", "--qk-layernorm", "--moe-grouped-gemm"} <= set(argv)
    assert argv[argv.index("--recompute-modules") + 1 :][:2] == ("mla_up_proj", "layernorm")
    assert "--q-lora-rank" not in job_of("training=deepseek/deepseek_v2_lite").payload.argv


def test_parallelism_and_precision_have_arguments() -> None:
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


def test_payload_has_the_save_signal_and_the_paths() -> None:
    payload = job_of("megatron_lm_path=/opt/Megatron-LM", "cluster.python=/opt/bin/python").payload
    launch_dir = "/shared/results/gpt3_126m/launches/1"
    start = ("/opt/bin/python", "-u", f"{launch_dir}/megatron_lm.py", "/opt/Megatron-LM", "gpt")
    assert payload.argv[:5] == start
    assert payload.save_signal == "TERM"


@pytest.mark.parametrize(
    ("overrides", "present", "absent"),
    [
        ([], ["--override-opt_param-scheduler"], ["--no-rope-fusion"]),
        (["training=llama/llama3_1_8b"], ["--use-rope-scaling", "--manual-gc"], ["--no-rope-fusion"]),
        (
            ["training=llama/llama1_7b"],
            ["--no-bias-swiglu-fusion", "--no-rope-fusion"],
            ["--use-rope-scaling"],
        ),
        (
            ["training=llama/llama3_1_405b"],
            ["--defer-embedding-wgrad-compute"],
            ["--no-overlap-p2p-communication"],
        ),
        (
            ["training=gpt3/175b", "training.model.overlap_p2p_comm=False"],
            ["--no-overlap-p2p-communication"],
            [],
        ),
        (["+training.model.activation=squared-relu"], ["--no-bias-gelu-fusion"], []),
        (["+training.model.layernorm_zero_centered_gamma=True"], ["--apply-layernorm-1p"], []),
        (
            ["training.exp_manager.create_checkpoint_callback=False"],
            ["--load"],
            ["--save", "--save-interval"],
        ),
        (["training.exp_manager.resume_if_exists=False"], ["--save"], ["--override-opt_param-scheduler"]),
        (["+training.model.calculate_per_token_loss=True"], ["--calculate-per-token-loss"], []),
        (
            [f"+training.model.account_for_{end}_in_pipeline_split=True" for end in ("embedding", "loss")],
            ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
            [],
        ),
        (["+training.model.add_qkv_bias=True"], ["--add-qkv-bias"], []),
        (["+training.model.qkv_bias=True"], ["--add-qkv-bias"], []),
        (["+training.model.attention_backend=auto"], [], ["--attention-backend"]),
        (["training.trainer.precision=32"], [], ["--use-distributed-optimizer", "--overlap-grad-reduce"]),
    ],
)
def test_switches_say_what_the_configuration_says(
    overrides: list[str], present: list[str], absent: list[str]
) -> None:
    argv = set(job_of(*overrides).payload.argv)
    assert set(present) <= argv
    assert not set(absent) & argv


@pytest.mark.parametrize(
    ("overrides", "option", "value"),
    [
        (["training.trainer.limit_val_batches=0.0"], "--eval-iters", "0"),
        (["training.trainer.gradient_clip_val=null"], "--clip-grad", "0.0"),
        # 100 steps, all of them of the warm-up
        (["training=gpt3/5b_16k"], "--lr-decay-iters", "116"),
        (["training=llama/llama3_1_8b", "+training.model.scale_factor=4"], "--rope-scaling-factor", "4"),
        (["training.model.data.dataloader_type=cyclic"], "--dataloader-type", "cyclic"),
        (["+training.model.attention_backend=flash"], "--attention-backend", "flash"),
        (["+training.model.attention_backend=unfused"], "--attention-backend", "unfused"),
        (
            ["+training.model.optim.sched.max_steps=1000", "training.model.optim.sched.constant_steps=0"],
            "--lr-decay-iters",
            "1000",
        ),
        (
            ["~training.model.optim.sched.constant_steps", "+training.model.optim.sched.constant_ratio=0.5"],
            "--lr-decay-iters",
            "300000",
        ),
        (["training=llama/llama3_1_405b"], "--wgrad-deferral-limit", "50"),
        (["training=llama/llama3_1_8b"], "--manual-gc-interval", "100"),
    ],
)
def test_values_say_what_the_configuration_says(overrides: list[str], option: str, value: str) -> None:
    assert value_of(job_of(*overrides).payload.argv, option) == value


def test_a_t5_with_sentencepiece_has_masks() -> None:
    tokenizer = [
        f"training.model.tokenizer.{text}" for text in ("library=sentencepiece", "model=/d/t5.model")
    ]
    argv = job_of("training=t5/220m", *_GELU, *tokenizer).payload.argv
    assert value_of(argv, "--tokenizer-type") == "SentencePieceTokenizer"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["training.model.rampup_batch_size=[32,32,1000]"], "training.model.rampup_batch_size"),
        (["training.trainer.limit_val_batches=0.5"], "training.trainer.limit_val_batches"),
        (["training.trainer.val_check_interval=0.1"], "training.trainer.val_check_interval"),
        (["training=t5/220m", *_GELU, "training.model.data.data_impl=mock"], "training.model.data.data_impl"),
        (["training=t5/tiny", *_GELU], "training.model.tokenizer.type"),
        (["+training.model.headscale=True"], "training.model.headscale"),
        (["training.model.optim.name=muon"], "training.model.optim.name"),
        (["+training.model.attention_backend=sdpa"], "training.model.attention_backend"),
        (["+training.model.attention_backend=local"], "training.model.attention_backend"),
        (["training.trainer.precision=fp16"], "training.trainer.precision"),
        (["+training.model.override_vocab_size=512"], "training.model.override_vocab_size"),
        (
            ["training=t5/220m", *_GELU, "training.model.decoder.num_layers=6"],
            "training.model.decoder.num_layers",
        ),
        (["training=t5/220m"], "training.model.encoder.activation"),
        (["training.model.optim.sched.name=PolynomialDecay"], "training.model.optim.sched.name"),
        (["training.trainer.precision=64"], "training.trainer.precision"),
        (["training.model.tokenizer.library=byte-level"], "training.model.tokenizer.library"),
        (["training.model.fsdp=True"], "training.model.fsdp"),
        (
            ["training=mixtral/mixtral_8x7b", "+training.model.moe_token_dropping=True"],
            "training.model.moe_token_dropping",
        ),
        (
            ["training=deepseek/deepseek_v2_lite", "training.model.rope_type=yarn"],
            "training.model.rope_type",
        ),
        (["training.trainer.max_time=90"], "training.trainer.max_time"),
        (["training.trainer.max_steps=many"], "training.trainer.max_steps"),
        (["training.model.tokenizer=x"], "training.model.tokenizer"),
        (["training.model.pipeline_model_parallel_size=x"], "training.model.pipeline_model_parallel_size"),
        (["training.model.context_parallel_size=null"], "training.model.context_parallel_size"),
        (["training.model.optim.betas=[0.9]"], "training.model.optim.betas"),
        (["training.model.optim.sched=5"], "training.model.optim.sched"),
        (["~training.model.num_layers"], "training.model.num_layers"),
        (["~training.model.data.seq_length"], "training.model.data.seq_length"),
        (["~training.model.max_position_embeddings"], "training.model.max_position_embeddings"),
        (
            ["training=t5/220m", *_GELU, "~training.model.data.seq_length_dec"],
            "training.model.data.seq_length_dec",
        ),
        (
            ["training=t5/220m", *_GELU, "training.model.data.seq_length_dec=null"],
            "training.model.data.seq_length_dec",
        ),
        (
            ["training=t5/220m", *_GELU, "training.model.decoder.num_layers=x"],
            "training.model.decoder.num_layers",
        ),
        (["megatron_lm_path=Megatron-LM"], "megatron_lm_path"),
        (
            ["training=t5/220m", *_GELU, "training.model.decoder.hidden_size=512"],
            "training.model.decoder.hidden_size",
        ),
    ],
)
def test_keys_that_megatron_lm_cannot_follow_are_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError) as caught:
        job_of(*overrides)
    assert caught.value.mistakes[0].key == key
