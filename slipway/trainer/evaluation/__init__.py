"""Measurements of checkpoints: held-out perplexity by our own model, and tasks of lm-eval."""
