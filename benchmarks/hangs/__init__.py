"""Hangs on a sandbox: the rank that the others wait for is to be named, and soon."""
