"""``python -m islandctl`` is ``islandctl``."""

from islandctl.cli import main

main()
