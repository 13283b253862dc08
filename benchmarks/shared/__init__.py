"""Parts that the benchmarks of single calls and of training steps share."""
