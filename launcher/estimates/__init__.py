"""Estimates of a training from its configuration alone: memory, time, cost and disk space."""
