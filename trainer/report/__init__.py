"""What a training tells: lines for people, lines for programs, TensorBoard events."""
