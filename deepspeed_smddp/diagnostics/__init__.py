"""Reports how smddp runs on a machine."""
