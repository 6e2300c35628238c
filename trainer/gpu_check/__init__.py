"""What the GPUs of one machine compute, as a table: ``python -m trainer.gpu_check``."""
