"""What a training will take, told from its configuration alone: memory, time, money, space."""
