"""The gathering of facts, by reading alone."""
