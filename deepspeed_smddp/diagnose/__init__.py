"""What tells a user how smddp runs on a machine."""
