"""What the package adds to DeepSpeed's ZeRO."""
