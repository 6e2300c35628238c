"""Detectors of what goes wrong in a run: pure functions over a bounded memory of its events and facts.

They run in the supervisor of a job and on the login node: Python 3.6 and the standard library alone.
"""
