"""Seeing how runs are: what schedulers and trainers tell, shown as tables, lines, live panels and plots."""
