"""The floor: what all sides share, of the standard library alone."""
