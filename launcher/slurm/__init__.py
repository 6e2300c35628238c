"""Slurm's formats and words, and its commands behind one `run`."""
