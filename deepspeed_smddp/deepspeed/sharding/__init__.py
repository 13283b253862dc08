"""Sharding by degree: the model's state sharded within p ranks and replicated beyond them.

MiCS (Zhang et al., VLDB 2022): of n data-parallel ranks each p neighbours form a *shard group* that
holds one copy of parameters, gradients and optimizer states; the ranks with the same place in every
shard group form a *replica group*. ZeRO-3 gathers parameters and reduce-scatters gradients within
the shard group only; once per accumulation boundary the replica groups average what they hold.

This rests on DeepSpeed 0.19.8, which keeps a process group per parameter. ``zero.Init`` gets the
shard group (``sharding_degree``), and so does stage 3 (``sharded_stage3``). Broadcasts of initial
values reach all replicas, and a checkpoint is that of one shard group (``sharded_checkpoint``).
Everything else, batch sizes and learning rates included, is that of all n ranks.
"""
