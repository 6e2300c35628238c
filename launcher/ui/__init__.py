"""Output of the verbs: tables, plots, formatted numbers and times, and the terminal."""
