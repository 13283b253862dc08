"""Measures the network and chooses bucket sizes from it: the meaning of ``"auto"``."""
