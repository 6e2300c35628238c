"""Checks of a plan before it costs anything: pure functions of the plan and of gathered facts."""
