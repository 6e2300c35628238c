"""Arithmetic that the launcher and the trainer share: FLOPs, peaks of GPUs, parameters, layout rules.

It needs the standard library alone. The launcher imports it, and a launch copies it with the trainer.
"""
