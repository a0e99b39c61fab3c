"""``python -m scripts.experiments.equal_compute_lib``."""

import sys

from scripts.experiments.equal_compute_lib.main import main

sys.exit(main())
