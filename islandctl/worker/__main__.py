"""``python -m islandctl.worker CELL_FOLDER``: one rank, alone or under torchrun."""

import sys

from islandctl.worker.main import main

sys.exit(main(sys.argv[1:]))
