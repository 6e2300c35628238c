"""Checks of the computations of one machine's GPUs, as a table: ``python -m benchmarks.gpu_check``."""
