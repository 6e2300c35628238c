"""megatron-core's reader, and ours on top of it; run by test_prepared_data.py from a warm process."""

from __future__ import annotations

import json
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from slipway.arithmetic.indexed import FIRST_SPLIT_RULE, split_documents
from slipway.common.errors import UserError
from slipway.trainer.config.data import _splits
from slipway.trainer.config.values import Values
from slipway.trainer.data.index import build_index
from slipway.trainer.data.source import IndexedSource

STRINGS = (
    *(
        "99990,8,2",
        "900,50,50",
        "90,10,0",
        "100",
        "1,0,0",
        "980,10,10",
        "50,25,25",
        "1,1,1",
        "0,1,0",
        "0,0,7",
    ),
    *("0.9,0.05,0.05", "98,1,1", "99,0,1", "33.3,33.3,33.4", "3,0,1", "949,50,1", "8,1,1", "0.7,0.2,0.1"),
)
DOCUMENTS = (*range(1, 130), 999, 1000, 1001, 9999, 10_001, 123_457)


class Taken:
    """A data set of megatron-core's that knows nothing but the documents of its split."""

    def __init__(self, _low: int, _path: str, indices: Any, *_rest: object) -> None:
        self.ends = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)

    @staticmethod
    def build_low_level_dataset(path: str, _config: Any) -> int:
        return int(path)

    @staticmethod
    def numel_low_level_dataset(dataset: int) -> int:
        return dataset


def compare_splits() -> dict[str, Any]:
    """Return where the splits differ from megatron-core's, and how often those of the first rule do."""
    differing, by_first_rule = [], 0
    for text in STRINGS:
        weights = _splits(Values({"model.data.splits_string": text}))
        config = BlendedMegatronDatasetConfig(1, 1, (["one"], None), split=text)
        builder = BlendedMegatronDatasetBuilder(Taken, [1, 1, 1], lambda: True, config)
        for documents in DOCUMENTS:
            built = builder._build_megatron_dataset_splits(str(documents), config.split_matrix, [1, 1, 1])
            expected = [(0, 0) if split is None else split.ends for split in built]
            by_rule = [
                [(first, last) if first < last else (0, 0) for first, last in split_documents(*case)]
                for case in ((weights, documents), (weights, documents, FIRST_SPLIT_RULE))
            ]
            differing += [(text, documents, expected)] if by_rule[0] != expected else []
            by_first_rule += by_rule[1] != expected
    return {"differing": differing, "by_first_rule": by_first_rule, "compared": len(STRINGS) * len(DOCUMENTS)}


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
        **compare_splits(),
    }
    print(json.dumps(result))
    return 0
