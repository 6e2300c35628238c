"""Training data: sources of token windows, their order, and the tools that make them."""
