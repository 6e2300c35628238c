"""Arithmetic of trainings that the launcher and the trainer share: FLOPs, GPUs, parameters, layouts.

The standard library alone. The launcher imports it, and a launch copies it beside the trainer.
"""
