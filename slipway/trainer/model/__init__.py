"""Models built from megatron-core's classes."""
