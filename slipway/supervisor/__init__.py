"""The program that keeps a job: it runs on the batch host of an allocation, outside the container.

It is shipped into each launch directory as one file, ``supervisor.pyz``, and needs Python 3.6 and its
standard library. Modules that start no process and signal nobody are pure: the launcher imports them as well,
so that each rule stands once.
"""
