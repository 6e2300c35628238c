"""Watching a run, from its jobs and from the login node: detectors, alerts, and their delivery."""
