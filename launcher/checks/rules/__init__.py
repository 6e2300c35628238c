"""The rules: pure functions of a plan and of the facts."""
