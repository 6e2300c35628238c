"""Run the checks beside this file with any Python from 3.6 on: run_checks.py ARCHIVE SAMPLES."""

import os
import sys
import unittest

sys.path[:0] = [sys.argv[1], os.path.dirname(os.path.abspath(__file__))]

if __name__ == "__main__":
    suite = unittest.defaultTestLoader.discover(sys.path[1], pattern="check_*.py")
    result = unittest.TextTestRunner().run(suite)
    sys.exit(not result.wasSuccessful() or not result.testsRun)
