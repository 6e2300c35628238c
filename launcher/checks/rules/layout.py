"""The parallel layout: how its sizes divide the nodes, the batch and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from arithmetic.layout import (
    ParallelConfig,
    cuts_sequence,
    divides_batch,
    divides_world,
    experts_divide_world,
    interleaves,
    shares_sequence,
)
from launcher.checks.findings import Finding, error, warning
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import Stack, is_encoder_decoder, read_parallel_config, stacks_of
from launcher.estimates.values import Values, count, divisors, full, listed
from launcher.plan import Plan

Rule = Callable[[ParallelConfig, int], Finding | None]

# What tensor parallelism cuts into equal parts, with its name among people.
_DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_query_groups": "key/value groups",
    "ffn_hidden_size": "hidden units of the MLP",
}


def layout_problems(config: Mapping[str, Any], nodes: int) -> list[Finding]:
    """Return what keeps a configuration from running on a number of nodes, by arithmetic."""
    shape = read_parallel_config(Values(config))
    return [] if shape is None else list(problems_at(shape, nodes))


def problems_at(shape: ParallelConfig, nodes: int) -> Iterator[Finding]:
    """Yield the first broken rule of a layout; it keeps the later ones from being applied."""
    for rule in RULES:
        found = rule(shape, nodes)
        if found is not None:
            yield found
            return


def world_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if divides_world(shape, nodes):
        return None
    return error(
        "layout.world",
        *blamed(shape, nodes),
        f"{product(shape)} does not divide {gpus(shape, nodes)}",
        also=(keys.NODES,),
    )


def experts_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if experts_divide_world(shape, nodes):
        return None
    size = shape.experts
    return error(
        "layout.experts",
        keys.EXPERT,
        shape.expert,
        f"expert tensor {shape.expert_tensor} × expert {shape.expert} × pipeline {shape.pipeline} = {size}"
        f" does not divide {gpus(shape, nodes)}",
        also=(keys.NODES,),
    )


def batch_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if divides_batch(shape, nodes):
        return None
    data = shape.data(nodes)
    step = shape.micro * data
    return error(
        "batch.global",
        keys.GLOBAL,
        shape.batch,
        f"not a multiple of micro batch {shape.micro} × data parallel {data}"
        f" = {step}; data parallel {data} is {gpus(shape, nodes)} / ({product(shape)})",
        also=(keys.MICRO, keys.NODES),
    )


def interleaving_problem(shape: ParallelConfig, nodes: int) -> Finding | None:
    if interleaves(shape, nodes):
        return None
    micro_batches = shape.micro_batches(nodes)
    return error(
        "batch.interleaved",
        keys.GLOBAL,
        shape.batch,
        f"/ (micro batch {shape.micro} × data parallel {shape.data(nodes)}) is"
        f" {micro_batches} micro batches, and virtual pipeline {shape.virtual} wants them in groups of"
        f" {shape.group}",
        also=(keys.VIRTUAL, keys.NODES),
    )


RULES: tuple[Rule, ...] = (world_problem, experts_problem, batch_problem, interleaving_problem)


def product(shape: ParallelConfig) -> str:
    """Return the GPUs of one copy of the model, with their factors."""
    parts = f"tensor {shape.tensor} × pipeline {shape.pipeline} × context {shape.context}"
    return f"{parts} = {shape.model}"


def gpus(shape: ParallelConfig, nodes: int) -> str:
    """Return the world size, with its factors."""
    return f"{count(nodes, 'node')} × {count(shape.devices, 'GPU')} = {nodes * shape.devices}"


def blamed(shape: ParallelConfig, nodes: int) -> tuple[str, int]:
    """Return the first size that does not divide what the ones before leave, with its key."""
    world = nodes * shape.devices
    for key, size in ((keys.TENSOR, shape.tensor), (keys.PIPELINE, shape.pipeline)):
        if world % size:
            return key, size
        world //= size
    return keys.CONTEXT, shape.context


def node_count_problems(plan: Plan, check: str) -> Iterator[Finding]:
    """Find the rule of one check that the plan's node count breaks.

    Of a range of nodes `elastic` looks at every count.
    """
    parallel = read_parallel_config(Values(plan.job.config or {}))
    if parallel is not None and not plan.job.resources.is_elastic:
        yield from (found for found in problems_at(parallel, plan.job.resources.nodes) if found.id == check)


def tensor_problems(values: Values) -> Iterator[Finding]:
    """Find heads, key/value groups, an MLP or a vocabulary that tensor does not divide.

    megatron/core/transformer/transformer_config.py for heads and groups (up to 0.12 the groups must be a
    multiple); megatron/core/tensor_parallel/layers.py cuts the rest with `divide`, which asserts.
    """
    tensor = values.whole(keys.TENSOR, 1)
    if tensor is None:
        return
    odd = [
        (key, f"{value} {what} ({full(key)})")
        for key, value, what in _divided_sizes(values)
        if value % tensor
    ]
    if odd:
        text = f"does not divide {', nor '.join(text for _, text in odd)}"
        fix = f"valid tensor sizes: {listed(tensor_sizes(values))}"
        yield error("layout.tensor", keys.TENSOR, tensor, text, fix, also=[key for key, _ in odd])


def tensor_sizes(values: Values) -> list[int]:
    """Return the tensor sizes that divide everything that is cut into as many parts."""
    sizes = [value for _, value, _ in _divided_sizes(values)]
    return (
        [size for size in divisors(min(sizes)) if not any(value % size for value in sizes)] if sizes else [1]
    )


def _divided_sizes(values: Values) -> Iterator[tuple[str, int, str]]:
    for stack in stacks_of(values):
        sizes = (stack.heads, stack.groups, stack.ffn)
        for (name, what), size in zip(_DIVIDED.items(), sizes, strict=True):
            if size is not None:
                yield f"{stack.node}.{name}", size, what
    shared = values.whole("model.moe_shared_expert_intermediate_size")
    if shared is not None:
        yield "model.moe_shared_expert_intermediate_size", shared, "hidden units of the shared expert"
    vocabulary = values.whole("model.override_vocab_size")  # any other is padded to a multiple
    if vocabulary is not None:
        yield "model.override_vocab_size", vocabulary, "tokens"


def layer_problems(values: Values) -> Iterator[Finding]:
    """Find layers that pipeline does not divide, or layers of a stage that virtual does not.

    megatron/core/transformer/transformer_config.py; the first and the last stage may be told to hold another
    number, or to count the embedding and the loss as a layer. NeMo checks the same in megatron_base_model.py.
    """
    virtual = values.whole(keys.VIRTUAL)
    for stack in stacks_of(values):
        counted = _evenly_split(values, stack)
        if counted is None or stack.layers is None:
            continue
        layers, stages, how = counted
        if stages < 1 or layers < 1 or layers % stages:
            yield _uneven(values, stack, how)
        elif virtual is not None and layers // stages % virtual:
            yield _uneven_chunks(values, stack, layers // stages, virtual, how)


def layers_fit(values: Values) -> bool:
    return next(layer_problems(values), None) is None


def _evenly_split(values: Values, stack: Stack) -> tuple[int, int, str] | None:
    """Return the layers and the stages that share them evenly, and how they are counted."""
    if stack.layers is None or stack.stages is None:
        return None
    layers, stages, how = stack.layers, stack.stages, count(stack.layers, "layer")
    for place in ("first", "last"):
        own = values.whole(f"{stack.node}.num_layers_in_{place}_pipeline_stage")
        if own is not None:
            layers, stages, how = layers - own, stages - 1, f"{how} - {own} in the {place} stage"
    for part in ("embedding", "loss"):
        if values.flag(f"{stack.node}.account_for_{part}_in_pipeline_split"):
            layers, how = layers + 1, f"{how} + 1 for the {part}"
    return layers, stages, how


def _uneven(values: Values, stack: Stack, how: str) -> Finding:
    if stack.node == "model":
        key, what = keys.PIPELINE, "pipeline"
        fix = f"valid pipeline sizes: {listed(divisors(stack.layers or 1))}{_counting_ends(values, stack)}"
    else:
        key, what = keys.SPLIT_RANK, f"pipeline stages of the {stack.node.removeprefix('model.')}"
        fix = f"{stack.node}.num_layers by the {stack.stages} stages that it has"
    value = values.raw(key)
    text = f"{what} {stack.stages} does not divide {how} ({full(stack.node + '.num_layers')})"
    return error("layout.layers", key, value, text, fix, also=(f"{stack.node}.num_layers",))


def _counting_ends(values: Values, stack: Stack) -> str:
    """Return what makes a pipeline even whose ends have room for the embedding and the loss."""
    flags = [f"model.account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    layers, stages = stack.layers or 0, stack.stages or 1
    if stages == 1 or (layers + 2) % stages or any(values.raw(key) for key in flags):
        return ""
    pasted = " and ".join(f"+{full(key)}=True" for key in flags)
    return f"; or {pasted} (NeMo), which count as a layer each: {layers + 2} / {stages}"


def _uneven_chunks(values: Values, stack: Stack, per_stage: int, virtual: int, how: str) -> Finding:
    sizes = [size for size in divisors(per_stage) if size > 1]
    # Virtual stages need more than one real one, and a model that is no encoder-decoder: `virtual_problems`.
    offered = sizes and stack.node == "model" and values.whole(keys.PIPELINE, 1) != 1
    return error(
        "layout.layers",
        keys.VIRTUAL,
        virtual,
        f"does not divide {per_stage} layers of a pipeline stage: {how} / pipeline {stack.stages}",
        f"valid virtual sizes: null, {listed(sizes)}" if offered else "valid: null",
        also=(f"{stack.node}.num_layers", keys.PIPELINE),
    )


def virtual_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find virtual stages without a pipeline.

    megatron/core/parallel_state.py: more than one stage. Megatron-LM (training/arguments.py) wants more than
    two where `overlap_p2p_comm` is off: with two, a stage would send to and receive from the same other twice
    at a time, in one batch, which NCCL matches by order alone. Our trainer takes it as on there
    (trainer/model/transformer.py). NeMo (megatron_gpt_model.py): only with
    `megatron_amp_O2`. megatron-core 0.12 (schedules.py) asserts that nothing interleaved needs
    cross-attention.
    """
    virtual, pipeline = values.whole(keys.VIRTUAL), values.whole(keys.PIPELINE, 1)
    if virtual is None or virtual == 1 or pipeline is None:
        return
    if is_encoder_decoder(values):
        text = "Megatron has no virtual stages for an encoder-decoder, whose decoder attends to its encoder"
        yield error("layout.virtual", keys.VIRTUAL, virtual, text, f"{full(keys.VIRTUAL)}=null")
        return
    if pipeline == 1:
        yield error(
            "layout.virtual",
            keys.VIRTUAL,
            virtual,
            "virtual stages are parts of pipeline stages, and pipeline is 1",
            f"{full(keys.VIRTUAL)}=null, or a pipeline size of 2 or more",
            also=(keys.PIPELINE,),
        )
    elif pipeline == 2 and not values.flag("model.overlap_p2p_comm") and engine != "megatron":
        tell = error if engine == "megatron_lm" else warning
        yield tell(
            "layout.virtual",
            keys.VIRTUAL,
            virtual,
            "with pipeline 2 the two stages exchange two chunks at a time; Megatron-LM refuses that",
            f"{full('model.overlap_p2p_comm')}=True and {full('model.batch_p2p_comm')}=False, or pipeline 4",
            also=(keys.PIPELINE,),
        )
    if engine == "nemo" and values.raw("model.megatron_amp_O2") is False:
        yield error(
            "layout.virtual",
            "model.megatron_amp_O2",
            False,
            f"NeMo has virtual pipeline {virtual} with it alone",
            f"True, or {full(keys.VIRTUAL)}=null",
            also=(keys.VIRTUAL,),
        )


def sequence_parallel_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find sequence parallel without tensor > 1, or with sequences that tensor does not divide.

    megatron/core/model_parallel_config.py raises, NeMo (megatron_base_model.py) switches it off and goes on.
    Korthikanti et al. 2022, arXiv 2205.05198.
    """
    tensor = values.whole(keys.TENSOR, 1)
    if not values.flag("model.sequence_parallel") or tensor is None:
        return
    key = "model.sequence_parallel"
    if tensor == 1:
        tell = warning if engine == "nemo" else error
        text = "it needs tensor > 1" + (": NeMo switches it off" if engine == "nemo" else "")
        yield tell("layout.sequence_parallel", key, True, text, f"{full(key)}=False", also=(keys.TENSOR,))
        return
    context = values.whole(keys.CONTEXT, 1) or 1
    for length_key in ("model.encoder_seq_length", "model.seq_length", "model.data.seq_length_dec"):
        length = values.whole(length_key)
        if length is not None and not shares_sequence(length, tensor, context):
            yield error(
                "layout.sequence_parallel",
                length_key,
                length,
                f"sequence parallel cuts it by tensor {tensor} × context {context} = {tensor * context}",
                f"a multiple of {tensor * context}, or {full(key)}=False",
                also=(keys.TENSOR,),
            )


def context_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find a sequence that cannot be cut into two chunks for each context rank, one from either end.

    NeMo: megatron_gpt_model.py, get_batch_on_this_context_parallel_rank; so does megatron/core/utils.py.
    """
    context, length = values.whole(keys.CONTEXT, 1), values.whole("model.encoder_seq_length")
    if engine == "megatron" and is_encoder_decoder(values) and context != 1:
        text = "an encoder-decoder's sequences are not cut (engine=megatron)"
        yield error("layout.context", keys.CONTEXT, context, text, "1")
        return
    if context is None or length is None or context_fits(values, context):
        return
    yield error(
        "layout.context",
        "model.encoder_seq_length",
        length,
        f"not a multiple of 2 × context {context} = {2 * context}",
        also=(keys.CONTEXT,),
    )


def context_fits(values: Values, context: int) -> bool:
    """Return True if a sequence can be cut for as many context ranks."""
    length = values.whole("model.encoder_seq_length")
    return length is None or cuts_sequence(length, context)


def split_rank_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find a T5's decoder that begins in no stage (NeMo: megatron_lm_encoder_decoder_model.py).

    megatron-core 0.16, which our trainer runs, has no stages for an encoder-decoder any more.
    """
    pipeline, split = values.whole(keys.PIPELINE, 1), values.raw(keys.SPLIT_RANK)
    if not is_encoder_decoder(values) or pipeline is None:
        return
    if pipeline == 1:
        if engine == "megatron" and split not in (None, 0):
            text = "there is one pipeline stage (engine=megatron)"
            yield error("layout.split_rank", keys.SPLIT_RANK, split, text, "0 or null")
        return
    if engine == "megatron":
        text = "megatron-core 0.16 has no pipeline for an encoder-decoder (engine=megatron)"
        valid = f"1, and a larger {full(keys.TENSOR)}; or engine=nemo"
        yield error("layout.split_rank", keys.PIPELINE, pipeline, text, valid, also=(keys.SPLIT_RANK,))
        return
    if isinstance(split, int) and 1 <= split < pipeline:
        return
    yield error(
        "layout.split_rank",
        keys.SPLIT_RANK,
        split,
        f"with pipeline {pipeline} the decoder begins in one of the stages 1 to {pipeline - 1}",
        f"such as {pipeline // 2}: half of the stages each",
        also=(keys.PIPELINE,),
    )


def width_problems(values: Values) -> Iterator[Finding]:
    """Find a hidden size that heads do not divide, where `kv_channels` does not say how wide a head is."""
    for stack in stacks_of(values):
        if stack.kv_channels is not None or stack.hidden is None or stack.heads is None:
            continue
        if stack.hidden % stack.heads:
            yield error(
                "model.heads",
                f"{stack.node}.num_attention_heads",
                stack.heads,
                f"does not divide hidden size {stack.hidden}",
                f"valid: {listed(divisors(stack.hidden))}; or say how wide a head is:"
                f" {full(stack.node)}.kv_channels",
                also=(f"{stack.node}.hidden_size",),
            )
        if stack.groups is not None and stack.heads % stack.groups:
            yield error(
                "model.heads",
                f"{stack.node}.num_query_groups",
                stack.groups,
                f"does not divide {stack.heads} attention heads",
                f"valid: {listed(divisors(stack.heads))}",
                also=(f"{stack.node}.num_attention_heads",),
            )
