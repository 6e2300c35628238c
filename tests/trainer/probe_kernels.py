"""The functions that only GPUs use, run on a CPU for test_kernels.py, in one process for each rank."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from slipway.trainer import cpu_shim
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import RankContext, make_rank_context, process_group
from slipway.trainer.world import World

TOKENS, SEQUENCES, VOCABULARY = 24, 2, 2000
DTYPES = (torch.float32, torch.bfloat16)


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """The names of the operations that reach a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **kwargs or {})


def main(arguments: list[str]) -> int:
    cpu_shim.install()
    bases = [flatten(yaml.safe_load(Path(path).read_text())) for path in arguments[:-1]]
    world = World.from_environment(os.environ)
    sizes = {"model.tensor_model_parallel_size": world.size}
    with process_group(world, "auto") as device:
        settings = [read_settings({**base, **sizes}) for base in bases]
        rank_context = make_rank_context(world, make_layout(settings[0], world.size), device)
        result: dict[str, Any] = {
            "losses": [compare_losses(dtype, scale) for dtype in DTYPES for scale in (1.0, 30.0)],
            "trainings": [compare_trainings(each, rank_context) for each in settings[:2]],
        }
        if world.size == 1:
            result["lists"] = compare_lists()
            result["documents"] = compare_documents()
            result["kernels"] = name_kernels()
            result["flash"] = [count_flash(each, rank_context) for each in settings]
            result["lengths"] = {
                name: takes_lengths({**bases[0], **changes})
                for name, changes in json.loads(arguments[-1]).items()
            }
            result["operations"] = [
                count_operations(read_settings({**bases[0], "model.num_layers": layers}), rank_context)
                for layers in (2, 4)
            ]
    print(json.dumps(result))
    return 0


def compare_losses(dtype: Any, scale: float) -> dict[str, Any]:
    """Compare our cross entropy and megatron-core's with one in 64 bits."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from slipway.trainer.model.loss import compute_loss

    generator, rank, ranks = torch.Generator().manual_seed(3), dist.get_rank(), dist.get_world_size()
    whole = (torch.randn(TOKENS, SEQUENCES, VOCABULARY, generator=generator) * scale).to(dtype)
    labels = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    weights = torch.rand(SEQUENCES, TOKENS, generator=generator)
    exact = whole.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact.permute(1, 2, 0), labels, reduction="none")
    (expected * weights).sum().backward()
    slice_ = whole.chunk(ranks, dim=-1)[rank]
    results, kept = [], 0

    def pack(tensor: Any) -> Any:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    def theirs(labels: Any, logits: Any) -> Any:
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()

    for function in (theirs, compute_loss):
        kept, leaf = 0, slice_.clone().requires_grad_()
        # A copy, as the loss writes into its logits.
        logits = leaf.clone()
        logits.retain_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = function(labels, logits)
        (loss * weights).sum().backward()
        results.append((loss.detach(), leaf.grad))
    assert exact.grad is not None
    exact_gradient = exact.grad.chunk(ranks, dim=-1)[rank]
    return {
        "errors": [
            [float((loss - expected).abs().max()), float((gradient - exact_gradient).abs().max())]
            for loss, gradient in results
        ],
        "equal": all(map(torch.equal, *results)),
        "type": str(results[1][1].dtype) == str(dtype),
        "kept": kept / slice_.nbytes,
    }


def compare_trainings(settings: Settings, rank_context: RankContext) -> list[list[float]]:
    """Return two steps' losses and the sum of the squared weights, by megatron-core's loss and by ours."""
    from slipway.trainer.loop.session import open_session
    from slipway.trainer.model.loss import compute_loss
    from tests.trainer.looping import loop_of

    curves = []
    for is_ours in (False, True):
        session, curve = open_session(settings, rank_context), []
        for chunk in session.model.chunks if is_ours else ():
            module = chunk
            while hasattr(module, "module"):
                module = module.module
            module.compute_language_model_loss = compute_loss
        with loop_of(session) as loop:
            for _ in range(2):
                loop.step()
                curve.append(loop.loss)
        curve.append(float(sum(p.double().square().sum() for p in session.model.parameters())))
        curves.append(curve)
    return curves


def compare_documents() -> dict[str, float]:
    """Return by how much attention by lengths and its gradients differ from those by a mask."""
    from tests.trainer import variable_lengths

    variable_lengths.register()
    generator = torch.Generator().manual_seed(6)
    worst = {}
    for rows, groups, density, dtype in itertools.product((1, 3), (4, 2, 1), (0.0, 0.1, 0.5, 1.0), DTYPES):
        tokens = (torch.rand(rows, 37, generator=generator) < density).long()
        name = f"{rows} rows, {groups} groups, {density}, {dtype}"
        worst[name] = variable_lengths.difference_from_mask(tokens, groups, dtype, generator)
    return worst


def count_flash(settings: Settings, rank_context: RankContext) -> tuple[str, float]:
    """Return the text on a training's attention, and how often a micro batch ran PyTorch's flash kernel."""
    from slipway.trainer.loop.session import open_session
    from tests.trainer.looping import loop_of

    session = open_session(settings, rank_context)
    with loop_of(session) as loop, Recording() as recording:
        loop.step()
    count = recording.names.count("_scaled_dot_product_flash_attention_for_cpu")
    return session.attention, count / rank_context.layout.micro_batches


def takes_lengths(configuration: dict[str, Any]) -> bool:
    """Return whether a GPU like an A100 takes documents by their lengths."""
    from slipway.trainer.model import kernels

    originals = torch.cuda.get_device_capability, torch.backends.cuda.is_flash_attention_available
    torch.cuda.get_device_capability = lambda _: (8, 0)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    try:
        assert not kernels.takes_lengths(read_settings(configuration), torch.device("cpu"))
        return kernels.takes_lengths(read_settings(configuration), torch.device("cuda"))
    finally:
        torch.cuda.get_device_capability, torch.backends.cuda.is_flash_attention_available = originals


def name_kernels() -> dict[str, Any]:
    """Return the kernels of each GPU by their names, and those that hold in and after the context."""
    from slipway.trainer.model import kernels

    def names(order: Any) -> list[str]:
        return [kernels._name(torch.nn.attention.SDPBackend(kernel)) for kernel in order]

    def current() -> list[str]:
        return names(torch._C._get_sdp_priority_order())

    before = current()
    h100, a100 = ((9, 0), 91900), ((8, 0), 91900)
    orders = {
        "H100": kernels.order_kernels(*h100, False),
        "H100, deterministic": kernels.order_kernels(*h100, True),
        "H100, old cuDNN": kernels.order_kernels((9, 0), 91002, False),
        "A100": kernels.order_kernels(*a100, False),
        "RTX 5090": kernels.order_kernels((12, 0), 91900, False),
    }
    allowed, kernels._allowed = kernels._allowed, lambda _: orders["H100, deterministic"]
    with kernels.use_ordered_kernels(torch.device("cuda")):
        inside = current()[:3], torch.backends.cuda.cudnn_sdp_enabled()
    kernels._allowed = allowed
    return {
        **{name: names(order) for name, order in orders.items()},
        "inside": inside,
        "restored": before == current() and torch.backends.cuda.cudnn_sdp_enabled(),
    }


def compare_lists() -> dict[str, bool]:
    """Return whether norm, scale and copy of lists are megatron-core's to the last bit."""
    from megatron.core import utils

    from slipway.trainer.optim import build

    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(shape, generator=generator) for shape in ((), (7,), (300, 70), (1, 0), (65_537,))]
    scaled, expected = ([tensor.clone() for tensor in tensors] for _ in range(2))
    norm, expected_norm = (
        function(65_536, None, [tensors], False)[0]
        for function in (build._norm, utils.local_multi_tensor_l2_norm)
    )
    build._scale(65_536, None, [scaled, scaled], 0.123456789)
    utils.local_multi_tensor_scale(65_536, None, [expected, expected], 0.123456789)
    copies = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    build._copy(tensors, copies)
    build._copy([], [])
    return {
        "norm": norm.shape == (1,) and torch.equal(norm, expected_norm),
        "scale": all(map(torch.equal, scaled, expected)),
        "copy": all(
            torch.equal(copy, tensor.bfloat16()) for copy, tensor in zip(copies, tensors, strict=True)
        ),
    }


def count_operations(settings: Settings, rank_context: RankContext) -> dict[str, int]:
    """Count the operations of a step of the optimizer that launch kernels, and the parameters."""
    from slipway.trainer.model.build import build_model
    from slipway.trainer.optim.build import Optimizer

    model = build_model(settings, rank_context, 304)
    optimizer = Optimizer(settings, model, rank_context.device)
    for _ in range(2):
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.main_grad.fill_(1.0)
        with Recording() as recording:
            optimizer.step(1e-3)
        optimizer.zero_grad()
    others = {"detach", "view", "_record_function_enter_new", "_record_function_exit"}
    return {
        "parameters": len(list(model.parameters())),
        "launches": sum(name not in others for name in recording.names),
        "reads": recording.names.count("_local_scalar_dense"),
    }
