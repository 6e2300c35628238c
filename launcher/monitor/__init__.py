"""The state of runs: what schedulers and trainers report, as tables, lines, live panels and plots."""
