"""Checkpoints: sharded by megatron-core, complete or not there at all."""
