"""The records of a job that its node and the launcher share: Python 3.6 and its standard library alone."""
