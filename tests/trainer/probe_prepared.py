"""megatron-core's reader, and ours on top of it; run by test_prepared_data.py from a warm process."""

from __future__ import annotations

import json
import warnings
from hashlib import sha256
from pathlib import Path

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from trainer.data.index import build_index, split_documents
from trainer.data.source import IndexedSource
from trainer.errors import UserError


def main(arguments: list[str]) -> int:
    """Print the results as JSON."""
    warnings.simplefilter("ignore")
    prefix = Path(arguments[0])
    dataset = IndexedDataset(str(prefix))
    documents = [dataset[number].tolist() for number in range(len(dataset))]
    index = build_index(prefix, (80.0, 20.0, 0.0))
    windows = []
    for split in (0, 1):
        source = IndexedSource(prefix, index, split, 32)
        windows.append([source.window(index).tolist() for index in range(source.windows)])
    refusal = ""
    try:
        IndexedSource(prefix, index, 2, 32)
    except UserError as error:
        refusal = str(error)
    merged = prefix.with_name("joined")
    builder = IndexedDatasetBuilder(f"{merged}.bin", dtype=DType.optimal_dtype(300))
    for shard in arguments[1:]:
        builder.add_index(shard)
    builder.finalize(f"{merged}.idx")
    result = {
        "joined": [sha256(Path(f"{merged}{suffix}").read_bytes()).hexdigest() for suffix in (".bin", ".idx")],
        "documents": documents,
        "dtype": str(dataset.index.dtype),
        "boundaries": dataset.document_indices.tolist(),
        "windows": windows,
        "refused": refusal,
        "splits": [split_documents((99990.0, 8.0, 2.0), 40), split_documents((1.0, 1.0, 1.0), 40)],
    }
    print(json.dumps(result))
    return 0
