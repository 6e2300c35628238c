"""The configuration of a GPU for sizes and drawn layouts; run by test_gpu_layouts.py from a warm process."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
import yaml

from slipway.trainer import cpu_shim
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.model import backends, transformer
from slipway.trainer.world import World
from tests.trainer.megatron_rules import CUDA, broken_rules, configure, pretend_engine

EXAMPLES = 200
OVERLAPPED = {
    "model.tensor_model_parallel_size": 2,
    "model.sequence_parallel": True,
    "model.ub_tp_comm_overlap": True,
    "model.transformer_engine": True,
}


@st.composite
def layouts(draw: Any) -> tuple[int, dict[str, Any]]:
    """Draw processes, and keys with which the trainer lays a model out over them."""
    tensor, pipeline = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 2, 3, 4, 8)))
    virtual = draw(st.sampled_from((None, 2, 3))) if pipeline > 1 else None
    context, data, micro = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 3), (1, 2)))
    groups = draw(st.integers(1, 3)) * (pipeline if virtual else 1)
    gathers = draw(st.booleans())
    is_half = draw(st.sampled_from((True, True, False)))
    recompute = draw(st.sampled_from((None, "selective", "full")))
    has_fp8 = is_half and draw(st.booleans())
    keys: dict[str, Any] = {
        "trainer.devices": None,
        "trainer.num_nodes": None,
        "model.tensor_model_parallel_size": tensor,
        "model.pipeline_model_parallel_size": pipeline,
        "model.virtual_pipeline_model_parallel_size": virtual,
        "model.context_parallel_size": context,
        "model.sequence_parallel": draw(st.booleans()),
        "model.num_layers": pipeline * (virtual or 1) * draw(st.integers(1, 2)),
        "model.micro_batch_size": micro,
        "model.global_batch_size": micro * data * groups,
        "model.num_query_groups": draw(st.sampled_from((None, 4))),
        "model.position_embedding_type": draw(st.sampled_from(("learned_absolute", "rope"))),
        "model.apply_rope_fusion": draw(st.booleans()),
        "model.activation": draw(st.sampled_from(("gelu", "swiglu", "squared-relu"))),
        "model.bias": draw(st.booleans()),
        "model.transformer_engine": has_fp8 or draw(st.booleans()),
        "model.fp8": has_fp8,
        "model.fp8_hybrid": True,
        "model.fp8_recipe": draw(st.sampled_from((None, "tensorwise", "mxfp8"))),
        "model.overlap_p2p_comm": draw(st.booleans()),
        "model.cross_entropy_loss_fusion": draw(st.booleans()),
        "model.ub_tp_comm_overlap": draw(st.booleans()),
        "model.gradient_accumulation_fusion": draw(st.booleans()),
        "model.deterministic_mode": draw(st.sampled_from((True, False, False))),
        "model.activations_checkpoint_granularity": recompute,
        "model.activations_checkpoint_method": "uniform" if recompute == "full" else None,
        "model.optim.name": draw(st.sampled_from(("mcore_distributed_optim", "adamw"))),
        "model.optim.overlap_grad_sync": gathers or draw(st.booleans()),
        "model.optim.overlap_param_sync": gathers,
        "model.optim.align_param_gather": draw(st.booleans()),
        "trainer.gradient_clip_val": draw(st.sampled_from((0.0, 1.0))),
        "trainer.precision": "bf16" if is_half else 32,
        "model.megatron_amp_O2": is_half,
    }
    return tensor * pipeline * context * data, keys


def main(arguments: list[str]) -> int:
    cpu_shim.install()
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    sizes: dict[str, Any] = json.loads(Path(arguments[1]).read_text())
    result: dict[str, Any] = {"applied": {}, "sizes": {}}
    with (
        process_group(World.from_environment({"MASTER_PORT": arguments[2]}), "auto") as cpu,
        pretend_engine(),
    ):
        rank_context = make_rank_context(World.from_environment({}), make_layout(read_settings(base), 1), cpu)
        for size, flat in sizes.items():
            world = flat["trainer.num_nodes"] * flat["trainer.devices"]
            gpu = configure(read_settings(flat), rank_context, world)
            result["sizes"][size] = broken_rules(gpu, result["applied"])

        @hypothesis.settings(
            max_examples=EXAMPLES,
            database=None,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(layouts())
        def holds(layout: tuple[int, dict[str, Any]]) -> None:
            world, keys = layout
            gpu = configure(read_settings({**base, **keys}), rank_context, world)
            result["examples"] = result.get("examples", 0) + 1
            assert not (broken := broken_rules(gpu, result["applied"])), broken

        result["kernels"] = kernels(read_settings({**base, **OVERLAPPED}), rank_context)
        result["drawn"] = error_of(holds)
        # An earlier version let two stages with virtual ones exchange in one batch.
        transformer.overlaps_p2p = lambda parallel: parallel.virtual > 1 and parallel.overlap_p2p
        result["swapped"] = error_of(holds)
    print(json.dumps(result))
    return 0


def kernels(settings: Any, rank_context: Any) -> dict[str, Any]:
    """Return the requests to Transformer Engine, by a stand-in for its tensor-parallel buffers."""
    calls: list[Any] = []
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    base.UserBufferQuantizationMode = SimpleNamespace(FP8="fp8", NONE="none")  # type: ignore[attr-defined]
    base.initialize_ub = lambda **options: calls.append(options)  # type: ignore[attr-defined]
    sys.modules[base.__name__] = base
    plain = replace(settings, parallel=replace(settings.parallel, sequence=False))
    overlaps = [backends.overlaps_tensor(case, CUDA) for case in (settings, plain)]
    backends.start_tensor_overlap(settings)
    layer = torch.nn.Linear(2, 2)
    layer.fuse_wgrad_accumulation = False
    head = torch.nn.Linear(2, 2)
    backends.fuse_accumulation([torch.nn.Sequential(layer, head)])
    return {
        "asked": overlaps,
        "buffers": calls,
        "fused": [getattr(part, "fuse_wgrad_accumulation", None) for part in (layer, head)],
        "lacks": error_of(lambda: transformer.check_device(settings, CUDA)),
        "without": error_of(lambda: transformer.check_device(without_engine(settings), CUDA)),
        "on a CPU": error_of(lambda: transformer.check_device(settings, torch.device("cpu"))),
    }


def without_engine(settings: Any) -> Any:
    return replace(settings, architecture=replace(settings.architecture, transformer_engine=False))


def error_of(check: Any) -> str | None:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
