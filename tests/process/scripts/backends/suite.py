"""One rank of a world that runs the communicators' suite: ``suite.py SUITE FOLDER [OPTION...]``.

Each rank has a folder of its own: pytest clears away what it finds in a common one.
"""

import os
import sys

import pytest

suite, folder, *more = sys.argv[1:]
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
options = ["-q", "-p", "no:cacheprovider", "--color=no", f"--basetemp={folder}/{rank}"]
sys.exit(pytest.main([*options, *more, suite]))
