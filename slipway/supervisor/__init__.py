"""The program that keeps a job: it runs on the batch host of an allocation, outside the container.

It is shipped into each launch directory as one file, ``supervisor.pyz``, and needs Python 3.6 and its
standard library.
"""
