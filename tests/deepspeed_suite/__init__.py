"""DeepSpeed's own unit tests, run over smddp and over Gloo, and what came out compared."""
