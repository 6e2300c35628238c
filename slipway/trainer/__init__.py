"""The inside-the-job side of Slipway: pretrains megatron-core models from NeMo-style configuration."""
