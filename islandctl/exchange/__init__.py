"""Fragments, schedule, codecs, the outer step and the round: torch tensors and bytes only."""
