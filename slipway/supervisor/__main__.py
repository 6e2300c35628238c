"""The beginning of the program: what every Python can read."""

import gc
import sys

if sys.version_info < (3, 6, 2):
    sys.stderr.write("The job needs Python 3.6.2 or newer: this is " + sys.version.split()[0] + "\n")
    sys.exit(1)

gc.disable()  # until the tasks run: they start sooner

from slipway.supervisor.main import main

main(sys.argv[1:])
