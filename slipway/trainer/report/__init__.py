"""Reports of a training: lines for people, lines for programs, TensorBoard events."""
