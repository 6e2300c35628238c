"""Sweeps: one training many times, each with other values, as a job array of Slurm's."""
