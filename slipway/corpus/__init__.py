"""Data preparation: from a raw dump to tokens in Megatron's format."""
