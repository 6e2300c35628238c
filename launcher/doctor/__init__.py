"""The examination of a machine, a cluster and its nodes for everything that launches need."""
