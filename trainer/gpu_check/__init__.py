"""Checks of the computations of one machine's GPUs, as a table: ``python -m trainer.gpu_check``."""
