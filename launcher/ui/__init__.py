"""What the verbs print with: tables, plots, numbers and times in words, and the stream to the terminal."""
