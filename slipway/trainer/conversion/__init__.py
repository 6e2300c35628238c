"""Weights between formats: ours, and those of other programs. Needs no GPU, and no megatron-core."""
