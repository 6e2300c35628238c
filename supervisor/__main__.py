"""The beginning of the program; what every Python reads comes first."""

import sys

if sys.version_info < (3, 6):
    sys.stderr.write(
        "The job needs Python 3.6 or newer: %s is %s\n" % (sys.executable, sys.version.split()[0])
    )
    sys.exit(1)

from supervisor.main import main

sys.exit(main(sys.argv[1:]))
