"""A soak: real chains of real tiny trainings, a fault in each, and an oracle afterwards."""
