"""What runs on each rank: model, data, loop, checkpoints, metrics."""
