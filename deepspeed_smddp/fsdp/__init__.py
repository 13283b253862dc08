"""FSDP2 (``fully_shard``) over smddp: gathers in shared memory of a host's ranks, hybrid sharding.

``fully_shard`` works on any smddp group without this package. :func:`enable` changes two things for
CPU tensors: the buffers of its collectives lie where the other ranks of the host read them in
place, and prefetched gathers and reductions run while the model computes. See ``docs/fsdp.md``.
"""

from deepspeed_smddp.fsdp.enabling import enable, mesh

__all__ = ["enable", "mesh"]
