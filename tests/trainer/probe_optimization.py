"""Our steps and ramps next to torch's and Megatron's; run by test_optimization.py from a warm process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.rampup import Rampup
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.world import World

# The learning rates of three steps, and the scales of the gradient, whose norm is about 140 times that.
RATES = (1e-2, 3e-3, 5e-3)
SCALES = (1.0, 1e-3, 1e-5)


def main(arguments: list[str]) -> int:
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    world = World.from_environment({"MASTER_PORT": arguments[1]})
    with process_group(world, "auto") as device:
        rank_context = make_rank_context(world, make_layout(read_settings(base), 1), device)
        steps = {
            name: three_steps(read_settings({**base, **changes}), rank_context)
            for name, changes in json.loads(arguments[2]).items()
        }
    print(json.dumps({"steps": steps, "ramps": [ramp(*sizes) for sizes in json.loads(arguments[3])]}))
    return 0


def three_steps(settings: Settings, rank_context: Any) -> dict[str, Any]:
    """Take three steps with made-up gradients, and the same with torch's AdamW and groups chosen by name.

    Returns
    -------
    dict
        ``differing``, parameters that are not equal to the last bit; ``far``, the largest difference as a
        share of the largest change of that parameter; ``norms`` and ``expected``, of the gradients.
    """
    from slipway.trainer.model.build import build_model
    from slipway.trainer.optim.build import Optimizer

    model = build_model(settings, rank_context, 304)
    optimizer = Optimizer(settings, model, rank_context.device)
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    masters = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    reference = reference_optimizer(settings, masters)
    generator = torch.Generator().manual_seed(5)
    norms, expected = [], []
    for lr, scale in zip(RATES, SCALES, strict=True):
        model.zero_grad_buffer()
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator) * scale
            parameter.main_grad.copy_(gradient)
            masters[name].grad = gradient.clone()
        norms.append(optimizer.step(lr))
        optimizer.zero_grad()
        limit = settings.optimization.gradient_clip or float("inf")
        expected.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    ours = {name: parameter.detach().float() for name, parameter in parameters.items()}
    theirs = {name: master.detach().to(parameters[name].dtype).float() for name, master in masters.items()}
    far = [
        float((ours[name] - theirs[name]).abs().max() / (theirs[name] - before[name]).abs().max())
        for name in parameters
    ]
    return {
        "differing": [name for name in parameters if not torch.equal(ours[name], theirs[name])],
        "far": max(far),
        "norms": norms,
        "expected": expected,
    }


def reference_optimizer(settings: Settings, masters: dict[str, Any]) -> torch.optim.AdamW:
    """Return torch's AdamW; biases and norms are recognised by their names."""
    chosen = settings.optimization
    plain = [name for name in masters if name.endswith("bias") or "norm" in name]
    assert 0 < len(plain) < len(masters)
    groups = [
        {
            "params": [master for name, master in masters.items() if name not in plain],
            "weight_decay": chosen.weight_decay,
        },
        {
            "params": [masters[name] for name in plain],
            "weight_decay": chosen.weight_decay if chosen.decay_all else 0.0,
        },
    ]
    return torch.optim.AdamW(groups, betas=chosen.betas, eps=chosen.eps, fused=True)


def ramp(start: int, increment: int, samples: int, end: int) -> dict[str, Any]:
    """Compare a ramp with megatron-core's, after every number of samples, and list a training's batches."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    ours = Rampup(start, increment, samples, end)
    theirs = RampupBatchsizeNumMicroBatchesCalculator(end, 1, 1, False, 1, start, increment, samples)

    def batch(consumed: int) -> int:
        theirs.update(consumed, consistency_check=True)
        assert theirs.get() == theirs.get_current_running_global_batch_size()
        return int(theirs.get())

    consumed, batches = 0, []
    while consumed <= samples + end:
        batches.append(ours(consumed))
        consumed += batches[-1]
    dense = range(samples + 2 * end)
    return {"differing": [n for n in dense if ours(n) != batch(n)], "points": len(dense), "batches": batches}
