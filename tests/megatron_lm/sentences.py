"""Write made-up sentences and their vocabulary; run with the interpreter that has Megatron-LM."""

from __future__ import annotations

import random
import sys
from pathlib import Path

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = 495


def main(directory: Path) -> None:
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    words = [*_SPECIAL, *(f"w{number}" for number in range(_WORDS))]
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    builder, chance = (
        IndexedDatasetBuilder(f"{directory}/sentences.bin", dtype=numpy.uint16),
        random.Random(1),
    )
    for _ in range(400):
        for _ in range(6):
            start, length = chance.randrange(len(_SPECIAL), 400), chance.randrange(8, 24)
            builder.add_item(torch.arange(start, start + length))
        builder.end_document()
    builder.finalize(f"{directory}/sentences.idx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
