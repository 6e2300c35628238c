"""Step times that NVIDIA publishes (`published_steps.json`, with the source of each), as configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.attained import Attained, attained
from launcher.checks.facts import Facts
from launcher.checks.layout_search import LayoutSearch
from launcher.estimates.parallelism import Layout, layout_of, read_parallel_config
from launcher.estimates.speed import ModelWork, Speed, work_of
from launcher.estimates.values import Values
from slipway.arithmetic.gpus import GPUS
from slipway.arithmetic.layout import ParallelConfig
from tests.checks.plans import GPT, changed, plan_of

_TABLE = json.loads(Path(__file__).with_name("published_steps.json").read_text(encoding="utf-8"))
_MODELS = {
    name: dict(zip(_TABLE["model_columns"], row, strict=True)) for name, row in _TABLE["models"].items()
}
# GB200 and GB300 have four GPUs to a tray, which is a node.
_TRAYS = ("gb200", "gb300")


@dataclass(frozen=True)
class Published:
    """A row: the layout that NVIDIA ran a model in, and how long a step took."""

    half: str
    source: str
    model: str
    gpu: str
    precision: str
    gpus: int
    batch: int
    tensor: int
    pipeline: int
    virtual: int | None
    context: int
    micro: int
    seconds: float
    options: tuple[str, ...]

    def __str__(self) -> str:
        sizes = f"t{self.tensor}p{self.pipeline}v{self.virtual or 1}c{self.context}m{self.micro}"
        return f"{self.source} {self.model} {self.gpus} {self.gpu} {self.precision} {sizes}"

    @property
    def devices(self) -> int:
        return 4 if self.gpu.startswith(_TRAYS) else 8

    @property
    def nodes(self) -> int:
        return self.gpus // self.devices

    @cached_property
    def config(self) -> dict[str, Any]:
        """NeMo's configuration of this step, as far as it is known."""
        model, selective = _MODELS[self.model], "selective" in self.options
        overlaps = "no-tensor-overlap" not in self.options
        changes = {
            "num_layers": model["layers"],
            "hidden_size": model["hidden"],
            "num_attention_heads": model["heads"],
            "num_query_groups": model["groups"],
            "ffn_hidden_size": model["ffn"],
            "activation": "swiglu" if model["gated"] == 2 else "gelu",
            "override_vocab_size": model["vocabulary"],
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": self.model.startswith("gpt"),
            "encoder_seq_length": model["length"],
            "max_position_embeddings": model["length"],
            "data.seq_length": model["length"],
            "global_batch_size": self.batch,
            "micro_batch_size": self.micro,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "sequence_parallel": self.tensor > 1,
            "account_for_embedding_in_pipeline_split": "account" in self.options,
            "account_for_loss_in_pipeline_split": "account" in self.options,
            "activations_checkpoint_granularity": "selective" if selective else None,
            "transformer_engine": "no-flash" not in self.options,
            "ub_tp_comm_overlap": overlaps and self.tensor > 1,
            "overlap_p2p_comm": "no-pipeline-overlap" not in self.options,
            "batch_p2p_comm": False,
            "fp8": self.precision == "fp8",
            "fp8_params": self.precision == "fp8" and "fp8-copies" not in self.options,
            "optim.overlap_grad_sync": True,
            "optim.grad_sync_dtype": "bf16",
        }
        trainer = {"trainer.num_nodes": self.nodes, "trainer.devices": self.devices}
        return changed(GPT, {**{f"model.{name}": value for name, value in changes.items()}, **trainer})

    @cached_property
    def values(self) -> Values:
        return Values(self.config)

    @cached_property
    def work(self) -> ModelWork:
        work = work_of(self.values, self.devices, "nemo")
        assert work is not None
        return work

    @cached_property
    def shape(self) -> ParallelConfig:
        shape = read_parallel_config(self.values)
        assert shape is not None
        return shape

    @property
    def layout(self) -> Layout:
        return layout_of(self.values, self.shape)

    def estimate(self, constants: Attained | None = None) -> float:
        """Return the seconds that the speed model gives the step."""
        speed = Speed(self.work, GPUS[self.gpu], self.nodes, constants or attained())
        return speed.step(self.layout, self.shape)


def _read(row: list[Any]) -> Published:
    cells = dict(zip(_TABLE["columns"], row, strict=True))
    tokens, options = cells.pop("tokens_per_second"), cells.pop("options")
    if tokens is not None:
        length = _MODELS[cells["model"]]["length"]
        cells["seconds"] = cells["batch"] * length / tokens / cells["gpus"]
    return Published(**cells, options=tuple(options.split()))


STEPS = tuple(_read(row) for row in _TABLE["rows"])
CALIBRATION = tuple(step for step in STEPS if step.half == "calibration")
HELD_OUT = tuple(step for step in STEPS if step.half == "held-out")


def _distinct_layouts() -> tuple[Published, ...]:
    """Return the first row of each layout of NVIDIA's tables since NeMo 24.07."""
    layouts: dict[tuple[object, ...], Published] = {}
    for step in STEPS:
        if step.gpu != "a100-80gb":
            layouts.setdefault((step.model, step.gpu, step.precision, step.layout), step)
    return tuple(layouts.values())


LAYOUTS = _distinct_layouts()


def rating(step: Published) -> tuple[float, str]:
    """Return the ratio of a layout's seconds to those of the first suggestion, and the latter's sizes."""
    resources = {"nodes": step.nodes, "gpu": step.gpu, "tasks_per_node": step.devices}
    first = next(LayoutSearch(plan_of(step.config, engine="nemo", resources=resources), Facts()).best())
    assert first.seconds is not None
    layout = first.layout
    sizes = f"t{layout.tensor}p{layout.pipeline}v{layout.virtual or 1}c{layout.context}m{layout.micro}"
    return step.estimate() / first.seconds, sizes
