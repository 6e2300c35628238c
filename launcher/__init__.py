"""Slipway: a Slurm-native launcher for large-language-model pretraining (the login-node side)."""

__version__ = "0.1.0"
