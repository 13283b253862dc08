"""``smddp bench``: the collectives of a job's ranks, measured beside Gloo or NCCL."""
