"""NeMo-style configuration: loading, the table of keys, and typed settings. Imports no torch."""
