"""islandctl trains one model over several GPU clusters that stand far apart."""

__version__ = "0.1.0"
