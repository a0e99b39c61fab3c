"""A run's record and life: launch, watch, stop, resume."""
