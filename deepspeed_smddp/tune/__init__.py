"""From a measured network to bucket sizes: what ``"auto"`` means."""
