"""Launches on disk and the jobs that they became: found, and asked about."""
