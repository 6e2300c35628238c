"""The tokenizer that a conversion writes, as transformers reads it, next to the ids of the training."""

from __future__ import annotations

from benchmarks.torture.cases import Case

CASES: list[Case] = []
