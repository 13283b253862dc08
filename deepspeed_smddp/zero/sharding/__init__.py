"""Sharding by degree: the model's state sharded within p ranks and replicated beyond them.

MiCS (Zhang et al., VLDB 2022): of n data-parallel ranks each p neighbours form a *shard group* that
holds one copy of parameters, gradients and optimizer states; the ranks with the same place in every
shard group form a *replica group*. ZeRO-3 gathers parameters and reduce-scatters gradients within
the shard group only; once per accumulation boundary the replica groups average what they hold.

DeepSpeed 0.19.8 keeps a process group per parameter, which this rests on: ``zero.Init`` gets the
shard group (``sharding_degree``), stage 3 as well (``sharded_stage3``), broadcasts of initial
values reach all replicas (``replica_broadcast``) and a checkpoint is that of one shard group
(``sharded_checkpoint``). All else, batch sizes and learning rates included, sees all n ranks.
"""
