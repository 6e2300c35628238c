"""Data torture: real and hostile sources and tokenizers, each next to its reference: `make data-torture`."""
