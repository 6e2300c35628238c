"""megatron-core's reading, writing and blending, next to ours: run with a directory, it prints JSON.

Every data set in the directory is read by both. Megatron's builder and our writer first add their own.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

from slipway.trainer.logs import silence_warnings

silence_warnings()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core.datasets import helpers  # noqa: E402
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder  # noqa: E402

from slipway.common.errors import UserError  # noqa: E402
from slipway.corpus.merging import Output  # noqa: E402
from slipway.corpus.shards import ORIGIN  # noqa: E402
from slipway.trainer.config.data import Blend, Data  # noqa: E402
from slipway.trainer.config.tokenizer import Tokenizer  # noqa: E402
from slipway.trainer.data.index import build_index  # noqa: E402
from slipway.trainer.data.interleave import Interleaving  # noqa: E402
from slipway.trainer.data.source import IndexedSource  # noqa: E402
from slipway.trainer.data.training_data import find_indices, open_training  # noqa: E402

WHOLE = (1.0, 0.0, 0.0)


def build(prefix: Path, documents: list[list[list[int]]], dtype: Any) -> None:
    """Write documents, each a list of sequences, with Megatron's builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = [token for sequence in document for token in sequence]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(part) for part in document])
    builder.finalize(f"{prefix}.idx")


def merge(prefix: Path, parts: list[Path], dtype: Any) -> None:
    """Join data sets as Megatron's tools/merge_datasets.py does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for part in parts:
        builder.add_index(str(part))
    builder.finalize(f"{prefix}.idx")


def write(prefix: Path, dtype: str) -> None:
    """Write three documents with our writer."""
    tokens = np.array([1, 2, 0, 7, 0, 9], dtype)
    output = Output(prefix, tokens.dtype, None)
    output.copy(io.BytesIO(tokens.tobytes()), tokens.nbytes)
    for lengths in ([3, 2], [1]):
        output.add(np.array(lengths, "<i4"), np.zeros(len(lengths), ORIGIN))
    output.finish()
    output.publish()


def read_by_megatron(prefix: Path) -> dict[str, Any]:
    """Return the documents that megatron-core reads."""
    dataset = IndexedDataset(str(prefix))
    rows = [dataset[number].tolist() for number in range(len(dataset))]
    bounds = dataset.document_indices.tolist()
    return {
        "dtype": np.dtype(dataset.index.dtype).name,
        "documents": [rows[first:last] for first, last in itertools.pairwise(bounds)],
    }


def read_by_us(prefix: Path) -> dict[str, Any]:
    """Return the tokens that our source reads, in windows of two that overlap by one; or its refusal."""
    try:
        source = IndexedSource(prefix, build_index(prefix, WHOLE), 0, 1)
        windows = [source.window(number).tolist() for number in range(source.windows)]
    except UserError as error:
        return {"refused": str(error)}
    return {"tokens": [windows[0][0], *(window[1] for window in windows)], "documents": source.documents}


def blending(number: int) -> dict[str, Any]:
    """Blend by random weights both ways; return how far each strays from the weights and from the other."""
    draw, size = random.Random(number), 4000
    weights = [10 ** draw.uniform(-3, 0) for _ in range(draw.randint(1, 12))]
    shares = np.array(weights) / sum(weights)
    theirs, within = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(theirs, within, shares, len(shares), size, False)
    interleaving = Interleaving([int(weight * 10**12) for weight in weights])
    ours = np.array([interleaving.place(sample)[0] for sample in range(size)])
    counts = [np.cumsum(sources[:, None] == np.arange(len(shares)), axis=0) for sources in (ours, theirs)]
    ideal = np.arange(1, size + 1)[:, None] * shares
    return {
        "sources": len(shares),
        "ours": float(abs(counts[0] - ideal).max()),
        "theirs": float(abs(counts[1] - ideal).max()),
        "apart": int(abs(counts[0] - counts[1]).max()),
    }


def changed_under_its_name(directory: Path) -> list[list[int]]:
    """Return the first window of a data set before and after it is written anew, with a cache of indices."""
    prefix, windows = directory / "changing", []
    data = Data(
        "mmap", Blend((prefix,), None), None, None, directory / "cache", False, False, False, Tokenizer()
    )
    for document in ([1, 2, 3, 4], [5, 6], [5, 6]):
        build(prefix, [[document]], DType.optimal_dtype(100))
        for _ in range(2):
            source = open_training(data, find_indices(data, False), 1)
            windows.append([source.windows, *source.window(0).tolist()])
    return windows


def main(arguments: list[str]) -> int:
    """Print the results as JSON."""
    directory = Path(arguments[0])
    build(directory / "builder_uint16", [[[1, 2, 3]], [[4], [5, 65499]], [[6]]], np.uint16)
    build(directory / "builder_int32", [[[70000, 2]], [[3, 4], [], [5]]], np.int32)
    merge(directory / "merged", [directory / "builder_uint16", directory / "hand_uint16"], np.uint16)
    write(directory / "ours_small", "<u2")
    write(directory / "ours_large", "<i4")
    prefixes = sorted(path.with_suffix("") for path in directory.glob("*.idx"))
    valid = [prefix for prefix in prefixes if not prefix.name.startswith("bad_")]
    print(
        json.dumps(
            {
                "megatron": {prefix.name: read_by_megatron(prefix) for prefix in valid},
                "we": {prefix.name: read_by_us(prefix) for prefix in prefixes},
                "blending": [blending(number) for number in range(40)],
                "changed": changed_under_its_name(directory),
            }
        )
    )
    # Objects that are collected late complain here, or never.
    gc.collect()
    return 0
