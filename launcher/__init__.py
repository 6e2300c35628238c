"""Slipway: a Slurm-native launcher for large-language-model pretraining (the login-node side)."""

from slipway import __version__ as __version__
