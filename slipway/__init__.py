"""The packages beside the launcher: the job's supervisor, its tasks, data preparation, and their floor."""

__version__ = "0.1.0"
