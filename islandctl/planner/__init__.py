"""From (recipe, sites) to a Plan: pure functions."""
