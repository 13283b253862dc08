"""Runs DeepSpeed's own unit tests over smddp and over Gloo, and compares the outcomes."""
