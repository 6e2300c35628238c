"""What a machine, a cluster and its nodes have of what launches need."""
