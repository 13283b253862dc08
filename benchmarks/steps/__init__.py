"""The benchmarks of a training step: ZeRO-3, DDP and FSDP2."""
