"""Check that the sizes of the parallel layout divide the nodes, the batch and the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from launcher.checks.findings import Check, Finding, check, error, warning
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import Stack, is_encoder_decoder, read_parallel_config, stacks_of
from launcher.estimates.values import Values, count, divisors, full, listed
from launcher.plan import Plan
from slipway.arithmetic.layout import (
    ParallelConfig,
    cuts_sequence,
    divides_batch,
    divides_world,
    experts_divide_world,
    interleaves,
    shares_sequence,
)

EXPERTS = "model.num_moe_experts"
# Sizes that tensor parallelism cuts into equal parts, with their names in messages.
_DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_query_groups": "key/value groups",
    "ffn_hidden_size": "hidden units of the MLP",
}


def problems_at(shape: ParallelConfig, nodes: int) -> Iterator[Finding]:
    """Yield the first broken rule of a layout, under the id of its check; the later ones are not applied."""
    gpus = f"{count(nodes, 'node')} × {count(shape.devices, 'GPU')} = {nodes * shape.devices}"
    copy = f"tensor {shape.tensor} × pipeline {shape.pipeline} × context {shape.context} = {shape.model}"
    if not divides_world(shape, nodes):
        finding = error(*offending_key(shape, nodes), f"{copy} does not divide {gpus}", also=(keys.NODES,))
        yield replace(finding, id="layout.world")
    elif not experts_divide_world(shape, nodes):
        text = (
            f"expert tensor {shape.expert_tensor} × expert {shape.expert} × pipeline {shape.pipeline}"
            f" = {shape.experts} does not divide {gpus}"
        )
        finding = error(keys.EXPERT, shape.expert, text, also=(keys.NODES,))
        yield replace(finding, id="layout.experts")
    elif not divides_batch(shape, nodes):
        data = shape.data(nodes)
        text = (
            f"not a multiple of micro batch {shape.micro} × data parallel {data} = {shape.micro * data};"
            f" data parallel {data} is {gpus} / ({copy})"
        )
        finding = error(keys.GLOBAL, shape.batch, text, also=(keys.MICRO, keys.NODES))
        yield replace(finding, id="batch.global")
    elif not interleaves(shape, nodes):
        text = (
            f"/ (micro batch {shape.micro} × data parallel {shape.data(nodes)}) is"
            f" {shape.micro_batches(nodes)} micro batches, and virtual pipeline {shape.virtual} wants them in"
            f" groups of {shape.group}"
        )
        finding = error(keys.GLOBAL, shape.batch, text, also=(keys.VIRTUAL, keys.NODES))
        yield replace(finding, id="batch.interleaved")


def offending_key(shape: ParallelConfig, nodes: int) -> tuple[str, int]:
    """Return the first size that does not divide the rest of the world, with its key."""
    world = nodes * shape.devices
    for key, size in ((keys.TENSOR, shape.tensor), (keys.PIPELINE, shape.pipeline)):
        if world % size:
            return key, size
        world //= size
    return keys.CONTEXT, shape.context


def node_count_problems(values: Values, plan: Plan, check_id: str) -> Iterator[Finding]:
    """Find the rule of one check that the plan's node count breaks; `elastic.counts` checks a range."""
    parallel = read_parallel_config(values)
    if parallel is not None and not plan.job.resources.is_elastic:
        yield from (
            finding for finding in problems_at(parallel, plan.job.resources.nodes) if finding.id == check_id
        )


def node_count_check(check_id: str, topic: str) -> Check[...]:
    return Check(check_id, topic, partial(node_count_problems, check_id=check_id))


@check(
    "layout.tensor",
    "tensor divides heads, key/value groups, the MLP's hidden size and an overridden vocabulary size",
)
def tensor_problems(values: Values) -> Iterator[Finding]:
    """Find heads, key/value groups, an MLP or a vocabulary that tensor does not divide.

    megatron/core/transformer/transformer_config.py for heads and groups (up to 0.12 the groups must be a
    multiple); megatron/core/tensor_parallel/layers.py cuts the rest with `divide`, which asserts.
    """
    tensor = values.whole(keys.TENSOR, 1)
    if tensor is None:
        return
    odd = {key: f"{size} {what} ({full(key)})" for key, size, what in _divided_sizes(values) if size % tensor}
    if odd:
        text = f"does not divide {', nor '.join(odd.values())}"
        fix = f"valid tensor sizes: {listed(tensor_sizes(values))}"
        yield error(keys.TENSOR, tensor, text, fix, also=[*odd])


def tensor_sizes(values: Values) -> list[int]:
    """Return the tensor sizes that divide every size that they cut."""
    sizes = [size for _, size, _ in _divided_sizes(values)]
    shared = divisors(min(sizes)) if sizes else [1]
    return [tensor for tensor in shared if not any(size % tensor for size in sizes)]


def _divided_sizes(values: Values) -> Iterator[tuple[str, int, str]]:
    for stack in stacks_of(values):
        sizes = (stack.heads, stack.groups, stack.ffn)
        for (name, what), size in zip(_DIVIDED.items(), sizes, strict=True):
            if size:
                yield f"{stack.node}.{name}", size, what
    for key, what in (
        ("model.moe_shared_expert_intermediate_size", "hidden units of the shared expert"),
        ("model.override_vocab_size", "tokens"),  # any other vocabulary is padded to a multiple
    ):
        width = values.whole(key)
        if width is not None:
            yield key, width, what


@check("layout.layers", "pipeline divides the layers, and virtual those of a stage")
def layer_problems(values: Values) -> Iterator[Finding]:
    """Find layers that pipeline does not divide, or layers of a stage that virtual does not.

    megatron/core/transformer/transformer_config.py; keys may give the first and last stage another number,
    or count the embedding and the loss as a layer. NeMo checks the same in megatron_base_model.py.
    """
    virtual = values.whole(keys.VIRTUAL)
    for stack in stacks_of(values):
        if not stack.layers or not stack.stages:
            continue
        layers, stages, how = _split_evenly(values, stack)
        if stages < 1 or layers < 1 or layers % stages:
            yield _report_uneven(values, stack, how)
        elif virtual is not None and layers // stages % virtual:
            yield _report_uneven_chunks(values, stack, layers // stages, virtual, how)


def layers_fit(values: Values) -> bool:
    return next(layer_problems(values), None) is None


def _split_evenly(values: Values, stack: Stack) -> tuple[int, int, str]:
    """Return the layers and the stages that share them evenly, and how they are counted."""
    layers, stages, how = stack.layers, stack.stages, count(stack.layers, "layer")
    for place in ("first", "last"):
        own = values.whole(f"{stack.node}.num_layers_in_{place}_pipeline_stage")
        if own is not None:
            layers, stages, how = layers - own, stages - 1, f"{how} - {own} in the {place} stage"
    for part in ("embedding", "loss"):
        if values.flag(f"{stack.node}.account_for_{part}_in_pipeline_split"):
            layers, how = layers + 1, f"{how} + 1 for the {part}"
    return layers, stages, how


def _report_uneven(values: Values, stack: Stack, how: str) -> Finding:
    layers_key, stages = f"{stack.node}.num_layers", stack.stages
    key, what = keys.SPLIT_RANK, f"pipeline stages of the {stack.node.removeprefix('model.')}"
    fix = f"{layers_key} by the {stack.stages} stages that it has"
    if stack.node == "model":
        key, what = keys.PIPELINE, "pipeline"
        fix = f"valid pipeline sizes: {listed(divisors(stack.layers))}"
        # Or the ends have room for the embedding and the loss.
        layers, are_set = stack.layers + 2, any(values.raw(end) for end in keys.COUNTED_ENDS)
        if stages > 1 and layers % stages == 0 and not are_set:
            pasted = " and ".join(f"+{full(end)}=True" for end in keys.COUNTED_ENDS)
            fix += f"; or {pasted} (NeMo), which count as a layer each: {layers} / {stages}"
    text = f"{what} {stack.stages} does not divide {how} ({full(layers_key)})"
    return error(key, values.raw(key), text, fix, also=(layers_key,))


def _report_uneven_chunks(values: Values, stack: Stack, per_stage: int, virtual: int, how: str) -> Finding:
    sizes = [size for size in divisors(per_stage) if size > 1]
    # Virtual stages need more than one real one, and a model that is no encoder-decoder: `virtual_problems`.
    offered = sizes and stack.node == "model" and values.whole(keys.PIPELINE, 1) != 1
    text = f"does not divide {per_stage} layers of a pipeline stage: {how} / pipeline {stack.stages}"
    fix = f"valid virtual sizes: null, {listed(sizes)}" if offered else "valid: null"
    return error(keys.VIRTUAL, virtual, text, fix, also=(f"{stack.node}.num_layers", keys.PIPELINE))


@check("layout.virtual", "virtual stages have a pipeline")
def virtual_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find virtual stages without a pipeline.

    megatron/core/parallel_state.py: more than one stage. Megatron-LM (training/arguments.py) wants more than
    two without `overlap_p2p_comm`: of two stages, each would send two chunks to the other in one batch, which
    NCCL matches by order alone. Our trainer overlaps there (slipway/trainer/model/transformer.py). NeMo
    (megatron_gpt_model.py): only with `megatron_amp_O2`. megatron-core 0.12 (schedules.py) asserts that
    interleaved models have no cross-attention.
    """
    virtual, pipeline = values.whole(keys.VIRTUAL), values.whole(keys.PIPELINE, 1)
    if virtual is None or virtual == 1 or pipeline is None:
        return
    without = f"{full(keys.VIRTUAL)}=null"
    if is_encoder_decoder(values):
        text = "Megatron has no virtual stages for an encoder-decoder: the decoder attends to the encoder"
        yield error(keys.VIRTUAL, virtual, text, without)
        return
    if pipeline == 1:
        text = "virtual stages are parts of pipeline stages, and pipeline is 1"
        yield error(
            keys.VIRTUAL, virtual, text, f"{without}, or a pipeline size of 2 or more", (keys.PIPELINE,)
        )
    elif pipeline == 2 and not values.flag("model.overlap_p2p_comm") and engine != "megatron":
        report = error if engine == "megatron_lm" else warning
        text = "with pipeline 2 the two stages exchange two chunks at a time; Megatron-LM refuses that"
        overlap, batched = full("model.overlap_p2p_comm"), full("model.batch_p2p_comm")
        fix = f"{overlap}=True and {batched}=False, or pipeline 4"
        yield report(keys.VIRTUAL, virtual, text, fix, (keys.PIPELINE,))
    if engine == "nemo" and values.raw("model.megatron_amp_O2") is False:
        text = f"NeMo supports virtual pipeline {virtual} only with True here"
        yield error("model.megatron_amp_O2", False, text, f"True, or {without}", (keys.VIRTUAL,))


@check("layout.sequence_parallel", "sequence parallel has tensor > 1, and sequences that it can cut")
def sequence_parallel_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find sequence parallel without tensor > 1, or with sequences that tensor does not divide.

    megatron/core/model_parallel_config.py raises, NeMo (megatron_base_model.py) switches it off and goes on.
    Korthikanti et al. 2022, arXiv 2205.05198.
    """
    tensor, key = values.whole(keys.TENSOR, 1), keys.SEQUENCE
    if not values.flag(key) or tensor is None:
        return
    if tensor == 1:
        report = warning if engine == "nemo" else error
        text = "it needs tensor > 1" + (": NeMo switches it off" if engine == "nemo" else "")
        yield report(key, True, text, f"{full(key)}=False", also=(keys.TENSOR,))
        return
    context = values.whole(keys.CONTEXT, 1) or 1
    parts = tensor * context
    for length_key in ("model.encoder_seq_length", "model.seq_length", "model.data.seq_length_dec"):
        length = values.whole(length_key)
        if length is not None and not shares_sequence(length, tensor, context):
            text = f"sequence parallel cuts it by tensor {tensor} × context {context} = {parts}"
            fix = f"a multiple of {parts}, or {full(key)}=False"
            yield error(length_key, length, text, fix, also=(keys.TENSOR,))


@check("layout.context", "sequences are a multiple of 2 × context")
def context_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find a sequence that cannot be cut into two chunks for each context rank, one from either end.

    NeMo: megatron_gpt_model.py, get_batch_on_this_context_parallel_rank; so does megatron/core/utils.py.
    """
    context, length = values.whole(keys.CONTEXT, 1), values.whole("model.encoder_seq_length")
    if engine == "megatron" and is_encoder_decoder(values) and context != 1:
        text = "an encoder-decoder's sequences are not cut (engine=megatron)"
        yield error(keys.CONTEXT, context, text, "1")
    elif context is not None and length is not None and not cuts_sequence(length, context):
        text = f"not a multiple of 2 × context {context} = {2 * context}"
        yield error("model.encoder_seq_length", length, text, also=(keys.CONTEXT,))


@check("layout.split_rank", "a T5's decoder begins in a pipeline stage")
def split_rank_problems(values: Values, engine: str) -> Iterator[Finding]:
    """Find a T5's decoder that begins in no stage (NeMo: megatron_lm_encoder_decoder_model.py).

    megatron-core 0.16, which our trainer runs, has no stages for an encoder-decoder any more.
    """
    pipeline, split = values.whole(keys.PIPELINE, 1), values.raw(keys.SPLIT_RANK)
    if not is_encoder_decoder(values) or pipeline is None:
        return
    if pipeline == 1:
        if engine == "megatron" and split not in (None, 0):
            yield error(keys.SPLIT_RANK, split, "there is one pipeline stage (engine=megatron)", "0 or null")
    elif engine == "megatron":
        text = "megatron-core 0.16 has no pipeline for an encoder-decoder (engine=megatron)"
        valid = f"1, and a larger {full(keys.TENSOR)}; or engine=nemo"
        yield error(keys.PIPELINE, pipeline, text, valid, also=(keys.SPLIT_RANK,))
    elif not (isinstance(split, int) and 1 <= split < pipeline):
        text = f"with pipeline {pipeline} the decoder begins in one of the stages 1 to {pipeline - 1}"
        fix = f"such as {pipeline // 2}: half of the stages each"
        yield error(keys.SPLIT_RANK, split, text, fix, also=(keys.PIPELINE,))


@check("layout.experts", "expert and expert tensor parallel divide the experts, and nodes × GPUs")
def expert_layout_problems(values: Values, plan: Plan, engine: str) -> Iterator[Finding]:
    """Find experts that cannot be shared out: they are whole on a rank, or cut by expert tensor parallel.

    megatron/core/transformer/moe/moe_layer.py and experts.py.
    """
    expert, experts = values.whole(keys.EXPERT, 1), values.whole(EXPERTS)
    if values.raw(EXPERTS) is not None:
        if expert is not None and experts is not None and experts % expert:
            valid = f"valid expert sizes: {listed(divisors(experts))}"
            yield error(keys.EXPERT, expert, f"does not divide {experts} experts", valid, also=(EXPERTS,))
        yield from _cut_experts(values)
        if engine == "nemo":
            yield from _find_nemo_limits(values, expert or 1)
    elif expert is not None and expert > 1:
        yield error(keys.EXPERT, expert, "the model has no experts", "1")
    yield from node_count_problems(values, plan, "layout.experts")


def _cut_experts(values: Values) -> Iterator[Finding]:
    tensor = values.whole(keys.TENSOR, 1)
    cut = values.whole(keys.EXPERT_TENSOR, tensor)
    key = "model.moe_ffn_hidden_size"
    if values.raw(key) is None:
        key = "model.ffn_hidden_size"
    width = values.whole(key)
    if cut is not None and width is not None and width % cut:
        named = keys.TENSOR if values.raw(keys.EXPERT_TENSOR) is None else keys.EXPERT_TENSOR
        message = f"does not divide {width} hidden units of an expert ({full(key)})"
        yield error(named, cut, message, f"valid expert tensor sizes: {listed(divisors(width))}", also=(key,))
    if tensor is not None and tensor > 1 and not values.flag(keys.SEQUENCE):  # moe/moe_layer.py raises
        message = f"experts with tensor {tensor} need sequence parallel"
        valid = f"True, or {full(keys.TENSOR)}=1"
        yield error(keys.SEQUENCE, values.raw(keys.SEQUENCE), message, valid, also=(keys.TENSOR,))


def _find_nemo_limits(values: Values, expert: int) -> Iterator[Finding]:
    """Find layouts that NeMo 2.4 does not support (nlp_overrides.py, megatron_gpt_model.py)."""
    cut, tensor = values.whole(keys.EXPERT_TENSOR), values.whole(keys.TENSOR, 1)
    if cut is not None and tensor is not None and cut != tensor:
        message = f"NeMo cuts experts by the tensor size, {tensor}"
        valid = f"{tensor} or null; or engine=megatron_lm"
        yield error(keys.EXPERT_TENSOR, cut, message, valid, also=(keys.TENSOR,))
    if expert == 1:
        return
    if values.raw("model.megatron_amp_O2") is False:
        message = f"NeMo supports expert parallel {expert} only with True here"
        yield error("model.megatron_amp_O2", False, message, "True", also=(keys.EXPERT,))
    if values.raw("model.optim.name") == "distributed_fused_adam":
        message = f"NeMo has no expert parallel {expert} with Apex's optimizer"
        valid = "mcore_distributed_optim"
        yield error("model.optim.name", "distributed_fused_adam", message, valid, also=(keys.EXPERT,))


CHECKS = (
    node_count_check("layout.world", "tensor × pipeline × context divides nodes × GPUs"),
    *(tensor_problems, layer_problems, virtual_problems, sequence_parallel_problems, context_problems),
    *(split_rank_problems, expert_layout_problems),
)
