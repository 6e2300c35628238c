"""The choices in the configuration trees: the tables of `slipway list`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arithmetic.parameters import count_parameters, vocabulary_size
from launcher.config.compose import BatchComposer, describe_option, list_options
from launcher.config.overrides import STAGES
from launcher.errors import UserError
from launcher.ui.tables import UNKNOWN, count, print_listing

Row = dict[str, Any]


def _stages(config_dir: Path | None) -> Iterator[Row]:
    for stage in STAGES:
        yield {"stage": stage, "choices": list_options(stage, config_dir)}


def _clusters(config_dir: Path | None) -> Iterator[Row]:
    for name in list_options("cluster", config_dir):
        yield {"cluster": name, "about": describe_option("cluster", name, config_dir)}


def _families(config_dir: Path | None) -> Iterator[Row]:
    by_family: dict[str, list[str]] = {}
    for size in list_options("training", config_dir):
        family, _, name = size.rpartition("/")
        by_family.setdefault(family or size, []).append(name)
    for family, names in by_family.items():
        yield {"family": family, "sizes": names}


def _training(config_dir: Path | None) -> Iterator[Row]:
    sweep = BatchComposer(["stages=[training]"], config_dir)
    for size in list_options("training", config_dir):
        try:
            training = sweep.compose([f"training={size}"]).config.training
        except UserError as error:
            yield {"size": size, "error": str(error)}
            continue
        assert training is not None
        yield {"size": size, **_shape(training.model, training.run.model_type), **_job(training.trainer)}


def _shape(model: dict[str, Any], model_type: str) -> Row:
    vocabulary = vocabulary_size(model)
    # T5's two stacks differ in a few keys only; the encoder's values are shown.
    stack = {**model, **(model.get("encoder") or {})}
    names = ("num_layers", "hidden_size", "num_attention_heads")
    return {
        "type": model_type,
        "parameters": count_parameters(model, vocabulary or 0, model_type),
        "vocabulary": vocabulary,
        **{name: stack.get(name) for name in names},
        "sequence_length": model.get("encoder_seq_length") or model.get("seq_length"),
        "global_batch_size": model.get("global_batch_size"),
    }


def _job(trainer: dict[str, Any]) -> Row:
    return {"num_nodes": trainer.get("num_nodes"), "devices": trainer.get("devices")}


LISTS: dict[str, Callable[[Path | None], Iterator[Row]]] = {
    "stages": _stages,
    "training": _training,
    "clusters": _clusters,
    "families": _families,
}


def print_choices(name: str, rows: list[Row]) -> None:
    if name == "stages":
        table = [(row["stage"], ", ".join(_few(row["choices"]))) for row in rows]
        print_listing(("STAGE", "CHOICES"), table)
    elif name == "families":
        table = [(row["family"], ", ".join(row["sizes"])) for row in rows]
        print_listing(("FAMILY", "SIZES"), table)
    elif name == "clusters":
        print_listing(("CLUSTER", "ABOUT"), [(row["cluster"], row["about"] or "") for row in rows])
    else:
        columns = ("SIZE", "PARAMETERS", "LAYERS", "HIDDEN", "HEADS", "SEQUENCE", "BATCH", "NODES×GPUS")
        print_listing(columns, [_cells(row) for row in rows], numbers=7)


def _few(choices: list[str]) -> list[str]:
    return choices if len(choices) <= 8 else [*choices[:3], f"… {len(choices)} in all: slipway list training"]


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return (row["size"], *([UNKNOWN] * 7))
    # Parameters are counted in billions, not giga.
    parameters = count(row["parameters"]).replace("G", "B") + ("" if row["vocabulary"] else "+")
    names = ("num_layers", "hidden_size", "num_attention_heads", "sequence_length", "global_batch_size")
    shape = (f"{row[name]:,}" if isinstance(row[name], int) else UNKNOWN for name in names)
    return (row["size"], parameters, *shape, f"{row['num_nodes']}×{row['devices']}")
