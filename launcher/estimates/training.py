"""The model of a training: its kind, sizes and FLOPs, and the layers of each of its pipeline stages.

The interleaved order is that of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2): with v model chunks a
stage, stage i of p has chunks i, p + i, 2 p + i, ... Uneven stages as in megatron/core/transformer/
transformer_block.py, get_num_layers_to_build; a T5's stacks as in NeMo's
megatron_lm_encoder_decoder_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.estimates.parallelism import (
    COUNTED_ENDS,
    OWN_ENDS,
    Stack,
    is_encoder_decoder,
    read_parallel_config,
    stacks_of,
)
from launcher.estimates.values import Values, full
from slipway.arithmetic.flops import sample_flops, sample_tokens
from slipway.arithmetic.layout import ParallelConfig, fits
from slipway.arithmetic.parameters import (
    Parts,
    Size,
    StackParameters,
    count_parameters,
    has_learned_positions,
    parts_of,
    sparse_layers,
    vocabulary_size,
)

# Sizes that may be left out, and are whole numbers where they are not.
_OF_LAYERS = ("num_layers", "hidden_size", "num_attention_heads")
_OF_STACK = ("num_query_groups", "kv_channels", "relative_attention_num_buckets")
# Sizes of multi-latent attention: those that it needs, and one that may be missing.
LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENT_QUERY = "q_lora_rank"
_OF_MODEL = (
    "model.make_vocab_size_divisible_by",
    "model.override_vocab_size",
    "model.tensor_model_parallel_size",
    "model.data.seq_length_dec",
    "model.tokenizer.num_sentinel_tokens",
    "model.num_moe_experts",
    "model.moe_router_topk",
    "model.moe_ffn_hidden_size",
    "model.moe_shared_expert_intermediate_size",
)
_NODES = ("model.tokenizer", "model.data")
# The sizes of a teacher, which the launcher adds to the configuration of a student.
TEACHER_SIZES = "model.distillation.teacher_model"
# Optimizers that data parallel ranks share, and the types of gradients in 16 bits.
DISTRIBUTED = ("mcore_distributed_optim", "distributed_fused_adam")
HALF = ("bf16", "bfloat16")
_PRECISIONS = ("bf16", "16", "32")


def read_countable_model(values: Values) -> Mapping[str, Any] | None:
    """Return the `model` node; None if one of its sizes is missing or invalid: counting then never fails."""
    model, stacks = values.node("model"), stacks_of(values)
    if model is None or not stacks:
        return None
    needed: list[int | None] = []
    for stack in stacks:
        needed += [stack.layers, stack.hidden, stack.heads, stack.ffn, len(stack.attends_to)]
    # A T5's embedding is its encoder's.
    first = {**model, **(values.node(stacks[0].node) or {})}
    if has_learned_positions(first):
        needed.append(Values(first).whole("max_position_embeddings"))
    if latent := latent_switches(values):
        needed += [values.whole(f"model.{name}") for name in LATENT]
    nodes = ("model", *(stack.node for stack in stacks))
    optional = [f"{node}.{name}" for node in nodes for name in _OF_STACK]
    optional += [f"model.{LATENT_QUERY}"] if latent else []
    experts = values.raw("model.num_moe_experts")
    is_countable = (
        all(needed)
        # Megatron reads 0 as null.
        and all(values.raw(key) in (None, 0) or values.whole(key) for key in (*optional, *_OF_MODEL))
        and all(values.raw(key) is None or values.node(key) is not None for key in _NODES)
        and (model_type_of(values) == "gpt" or not (experts or latent))
        and has_layer_flags(values, "moe_layer_freq", experts)
        and has_layer_flags(values, "window_attn_skip_freq", values.raw("model.window_size"))
    )
    return model if is_countable else None


def latent_switches(values: Values) -> list[str]:
    """Return the keys, of the model and of a T5's stacks, that switch multi-latent attention on."""
    nodes = dict.fromkeys(("model", *(stack.node for stack in stacks_of(values))))
    return [key for node in nodes if values.raw(key := f"{node}.multi_latent_attention")]


def teacher_of(values: Values) -> Values | None:
    """Return the configuration of the teacher of our trainer as one of a training; None without a teacher.

    Sizes that are unknown are missing in it; what its files do not say it has in common with its student.
    """
    if values.raw("model.teacher") is None:
        return None
    sizes, model = values.node(TEACHER_SIZES) or {}, values.node("model") or {}
    own = ("teacher", "distillation", *_OF_LAYERS, "ffn_hidden_size", *_OF_STACK)
    shared = {name: value for name, value in model.items() if name not in own}
    return Values({**values.config, "model": {**shared, **sizes}})


def has_layer_flags(values: Values, name: str, is_used: object) -> bool:
    """Return True if a key that selects layers is a number, or has a flag for each layer."""
    value = values.raw(f"model.{name}")
    if not is_used or value is None or values.whole(f"model.{name}") is not None:
        return True
    are_flags = isinstance(value, (list, tuple)) and all(flag in (0, 1) for flag in value)
    return are_flags and len(value) == values.whole("model.num_layers")


def model_type_of(values: Values) -> str:
    """Return ``gpt``, ``t5`` or ``bert``, by the keys that only these have."""
    if is_encoder_decoder(values):
        return "t5"
    return "bert" if "bert_binary_head" in (values.node("model") or {}) else "gpt"


def precision_of(values: Values) -> str:
    """Return ``bf16``, ``16`` or ``32``."""
    precision = str(values.raw("trainer.precision") or 32)
    return next((name for name in _PRECISIONS if precision.startswith(name)), "32")


def has_fused_attention(values: Values, node: str, engine: str) -> bool:
    """Return True if a kernel computes the core of attention without writing its scores.

    Our trainer has PyTorch's fused attention on GPUs without Transformer Engine, unless the configuration
    asks for megatron-core's own. `node` is that of a stack.
    """
    if engine == "megatron":
        return bool(values.raw("model.attention_backend") != "local")
    switches = ("model.use_flash_attention", f"{node}.use_flash_attention", "model.transformer_engine")
    return precision_of(values) != "32" and any(values.flag(key) for key in switches)


class ModelSize(NamedTuple):
    """A model's sizes, all of them known.

    `flops` are the model FLOPs of one sample, forward and backward, and the forward ones of a teacher;
    `tokens` are those that it counts as.
    `parameters` include all experts of a mixture.
    """

    parameters: int
    flops: int
    tokens: int
    has_experts: bool = False


def model_size(values: Values) -> ModelSize | None:
    """Return the sizes of a job's model; None where one is missing or invalid, or the vocabulary unknown."""
    model, model_type = read_countable_model(values), model_type_of(values)
    vocabulary = vocabulary_size(model) if model is not None else None
    if model is None or vocabulary is None:
        return None
    flops, teacher = sample_flops(model, vocabulary, model_type), teacher_of(values)
    if teacher is not None:
        if (taught := model_size(teacher)) is None:
            return None
        flops += taught.flops // 3
    return ModelSize(
        count_parameters(model, vocabulary, model_type),
        flops,
        sample_tokens(model, model_type),
        bool(model.get("num_moe_experts")),
    )


# --- a training

# Features without a count of weights or activations, by their usual names.
_NOT_COUNTED = {
    "model.mtp_num_layers": "multi-token prediction is not counted yet",
    "model.moe_latent_size": "experts in a latent space are not counted yet",
    "model.pipeline_model_parallel_layout": "layers that are listed by stage are not counted yet",
    "model.fsdp": "FSDP is not counted yet",
    "model.cpu_offloading": "memory of the host is not counted yet",
}


class Training(NamedTuple):
    """A training that can be counted with: its values, its layout, and the parts of its model.

    `stacks` are those of the layout, in the order of `parts.stacks`. The `teacher` has the same layout.
    """

    values: Values
    engine: str
    parallel: ParallelConfig
    data: int
    micro_batches: int
    vocabulary: int
    parts: Parts
    stacks: tuple[Stack, ...]
    teacher: Training | None = None

    @property
    def sequence_parallel(self) -> bool:
        """True if tensor parallel ranks share norms and dropouts too."""
        return self.parallel.tensor > 1 and self.values.flag("model.sequence_parallel")

    @property
    def precision(self) -> str:
        """``bf16``, ``16`` or ``32``."""
        return precision_of(self.values)

    @property
    def element(self) -> int:
        """The bytes of an activation."""
        return 4 if self.precision == "32" else 2

    @property
    def has_fp8(self) -> bool:
        """True if Transformer Engine multiplies the matrices of the layers in FP8."""
        has_engine = self.values.flag("model.transformer_engine")
        return has_engine and self.values.flag("model.fp8") and self.precision != "32"

    @property
    def has_half_weights(self) -> bool:
        """True if weights are in 16 bits; NeMo without `megatron_amp_O2` casts 32-bit ones on the way."""
        if self.precision == "32":
            return False
        return self.engine != "nemo" or self.values.flag("model.megatron_amp_O2")


def training_of(config: Mapping[str, Any], nodes: int, engine: str) -> Training | None:
    """Return the training of a job's configuration; None if it cannot be counted with."""
    values = Values(config)
    parallel, model = read_parallel_config(values), read_countable_model(values)
    if parallel is None or model is None or not fits(parallel, nodes):
        return None
    if values.raw("trainer.accelerator") == "cpu" or values.reason(_NOT_COUNTED):
        return None
    stacks, vocabulary = tuple(stacks_of(values)), vocabulary_size(model)
    if vocabulary is None or not all(stack.stages for stack in stacks):
        return None
    parts = parts_of(model, vocabulary, model_type_of(values))
    counts, teacher = (parallel.data(nodes), parallel.micro_batches(nodes), vocabulary), teacher_of(values)
    taught = training_of(teacher.config, nodes, engine) if teacher is not None else None
    if teacher is not None and taught is None:
        return None
    return Training(values, engine, parallel, *counts, parts, stacks, taught)


def find_unsupported_feature(values: Values) -> str | None:
    """Return why a training of a valid configuration cannot be counted with; None if it can."""
    reason, model = values.reason(_NOT_COUNTED), read_countable_model(values)
    if reason is None and model is not None and vocabulary_size(model) is None:
        key = "model.override_vocab_size"
        return f"the size of the tokenizer's vocabulary is not known here; {full(key)}=... says it"
    teacher = teacher_of(values)
    if reason is None and teacher is not None and read_countable_model(teacher) is None:
        reason = f"{full('model.teacher')}={values.raw('model.teacher')}: its sizes are not known here"
    return reason


class Chunk(NamedTuple):
    """A model chunk: the layers that a GPU computes in one go.

    `layers` are those of each stack. `embeds` is True if the embedding is in it, `closes` if the end of a
    stack is, with its norm; the end of the last stack has the output too. `sparse` of the layers, which are
    of one stack, have a mixture of experts.
    """

    layers: tuple[int, ...]
    embeds: bool
    closes: tuple[bool, ...]
    sparse: int = 0

    @property
    def has_output(self) -> bool:
        """True if the output layer is in it."""
        return self.closes[-1]


def stages_of(training: Training) -> tuple[tuple[Chunk, ...], ...] | None:
    """Return the chunks of each pipeline stage; None if the layers cannot be shared out."""
    pipeline = training.parallel.pipeline
    if len(training.stacks) == 1:
        return _split_one_stack(training)
    if pipeline == 1:
        layers = tuple(stack.layers for stack in training.stacks)
        return ((Chunk(layers, embeds=True, closes=(True, True)),),)
    return _split_two_stacks(training.stacks)


def parameters_of(parts: Parts, stage: tuple[Chunk, ...]) -> Size:
    """Return the parameters of a stage.

    The last stage has a copy of a tied embedding's words, unless it embeds itself.
    """
    embeds = any(chunk.embeds for chunk in stage)
    total = Size()
    for chunk in stage:
        for layers, closes, stack in zip(chunk.layers, chunk.closes, parts.stacks, strict=True):
            total += layers_of(stack, layers, chunk.sparse)
            if closes:
                total += stack.norm
        if chunk.embeds:
            total += parts.embedding
        if chunk.has_output:
            total += parts.output
            if parts.is_tied and not embeds:
                total += parts.words
    return total


def layers_of(stack: StackParameters, layers: int, sparse: int) -> Size:
    """Return the parameters of some layers of a stack, `sparse` of them with experts."""
    return stack.layer * (layers - sparse) + stack.sparse * sparse


def _split_one_stack(training: Training) -> tuple[tuple[Chunk, ...], ...] | None:
    values, pipeline, virtual = training.values, training.parallel.pipeline, training.parallel.virtual or 1
    first, last = ([] if end is None else [end] for end in map(values.whole, OWN_ENDS))
    # The embedding, or the loss, may take the place of a layer.
    embedding, loss = map(values.flag, COUNTED_ENDS)
    rest = training.stacks[0].layers + embedding + loss - sum(first) - sum(last)
    stages = pipeline - len(first) - len(last)
    if stages < 0 or rest < 0 or (rest % stages if stages else rest):
        return None
    per_stage = [*first, *[rest // stages if stages else 0] * stages, *last]
    if any(layers % virtual for layers in per_stage):
        return None
    counts = [[layers // virtual] * virtual for layers in per_stage]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    chunks: list[list[Chunk]] = [[] for _ in counts]
    model, start, ends = values.node("model") or {}, 0, (pipeline - 1, virtual - 1)
    for chunk in range(virtual):  # the first chunks of all stages come first
        for stage, layers in enumerate(counts):
            end, place = start + layers[chunk], (stage, chunk)
            sparse = sparse_layers(model, start, end)
            chunks[stage].append(Chunk((layers[chunk],), place == (0, 0), (place == ends,), sparse))
            start = end
    return tuple(map(tuple, chunks))


def _split_two_stacks(stacks: tuple[Stack, ...]) -> tuple[tuple[Chunk, ...], ...] | None:
    """Return the encoder's stages, then the decoder's; its first one embeds too."""
    encoder, decoder = stacks
    if encoder.layers % encoder.stages or decoder.layers % decoder.stages:
        return None
    first = encoder.layers // encoder.stages, 0
    second = 0, decoder.layers // decoder.stages
    ends = encoder.stages - 1, decoder.stages - 1
    return (
        *((Chunk(first, stage == 0, (stage == ends[0], False)),) for stage in range(encoder.stages)),
        *((Chunk(second, stage == 0, (False, stage == ends[1])),) for stage in range(decoder.stages)),
    )
