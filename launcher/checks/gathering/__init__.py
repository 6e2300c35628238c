"""Facts about files, this machine and the cluster, found out by reading alone."""
