"""The command line. The only code that prints, and the only code that knows typer and rich."""

from islandctl.cli.main import main

__all__ = ["main"]
