"""Packets' records, commits and the hash chain that joins them: the run's trace."""
