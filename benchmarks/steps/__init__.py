"""What the benchmarks of a training step share."""
