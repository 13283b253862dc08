"""ZeRO's stage 3 on shard groups: gradients are synchronised in two steps.

The first is DeepSpeed's own: each micro-step reduce-scatters within the parameters' group, which is
the shard group. The replica all-reduce, once per accumulation boundary, averages the shards over
the replicas (MiCS, section 4); with ``overlap_comm`` bucket by bucket during the boundary's
backward pass. Norms, overflow and clipping come after it and use one shard group, which holds the
whole gradient of the whole world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401 - derives from stage 3
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deepspeed_smddp.deepspeed.sharding.shard_groups import KEY, ReplicaAllReduce, Sharding
from deepspeed_smddp.errors import SmddpConfigError


class ShardedStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Stage 3 whose ``dp_process_group`` is the shard group, if the settings ask for one.

    If they do not, ``sharding`` is None and the behaviour is DeepSpeed's own.
    """

    def __init__(self, *args: Any, dp_process_group: Any = None, **options: Any) -> None:
        self.replica_all_reduce: ReplicaAllReduce | None = None
        self.averages_early = False
        self.sharding = Sharding.within(dp_process_group)
        if self.sharding is not None:
            dp_process_group = self.sharding.shard_group
        super().__init__(*args, dp_process_group=dp_process_group, **options)
        # With an offloaded optimizer, gradients leave for it before the step.
        self.averages_early = bool(options.get("overlap_comm")) and not self.offload_optimizer

    def step(self, closure: Any = None) -> None:
        """Averages gradients over the replicas, then clips and updates."""
        self.average_over_replicas()
        super().step(closure)

    def partition_grads(self, params_to_release: Any, grad_partitions: Any) -> Any:
        """Takes the shard group's sums; in the last micro-step starts their replica all-reduce."""
        numbers = [param.ds_id for param in params_to_release]
        if self.replica_all_reduce is not None:
            self.replica_all_reduce.forget(numbers)
        buffers = super().partition_grads(params_to_release, grad_partitions)
        if (
            buffers
            and self.sharding is not None
            and self.averages_early
            and self.is_gradient_accumulation_boundary()
        ):
            self._of_replicas(self.sharding).start(numbers, buffers)
        return buffers

    def average_over_replicas(self) -> None:
        """Does what is left of the replica all-reduce.

        A second call changes nothing: replicas hold equal gradients by then.
        """
        if self.sharding is None:
            return
        self._of_replicas(self.sharding).finish()
        if self.offload_optimizer:
            # The boundary's micro-step has copied gradients to the optimizer before the average.
            self._finalize_offload_gradient_accumulation()

    def get_fp32_grad_for_param(self, param: Any) -> torch.Tensor | None:
        """The world's mean gradient, on all ranks (``safe_get_full_grad``)."""
        if self.sharding is None or not param.requires_grad:
            return super().get_fp32_grad_for_param(param)  # type: ignore[no-any-return]
        self._wait()
        part, _ = self._get_fp32_grad_state_partition(param=param, release_swap_buffers=True)
        part = part.to(param.device, torch.float32, copy=True)
        self.sharding.average(part).wait()
        return self._fp32_state_allgather(param, part)  # type: ignore[no-any-return]

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., Any], param_list: Sequence[Any]
    ) -> None:
        """Updates the world's mean gradients."""
        self._refuse_with_offload("safe_update_full_grad_vectorized")
        self.average_over_replicas()
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def set_fp32_grad_for_param(self, value: Any, param: Any) -> None:
        """Sets this rank's part of a gradient that all ranks pass."""
        self._refuse_with_offload("safe_set_full_grad")
        self._wait()
        super().set_fp32_grad_for_param(value, param)

    def set_local_grad_for_param(self, value: Any, param: Any) -> None:
        """Sets this rank's part. The other replicas must set the same values."""
        self._refuse_with_offload("safe_set_local_grad")
        self._wait()
        super().set_local_grad_for_param(value, param)

    def _of_replicas(self, sharding: Sharding) -> ReplicaAllReduce:
        buffer = self.grad_partitions_flat_buffer  # another one after offload_states()
        if self.replica_all_reduce is None or self.replica_all_reduce.buffer is not buffer:
            self._wait()
            self.replica_all_reduce = ReplicaAllReduce(buffer, sharding)
        return self.replica_all_reduce

    def _wait(self) -> None:
        if self.replica_all_reduce is not None:
            self.replica_all_reduce.wait()

    def _refuse_with_offload(self, function: str) -> None:
        # It would write to the optimizer's copy, which the replica all-reduce overwrites.
        if self.sharding is not None and self.offload_optimizer:
            raise NotImplementedError(
                f'{function} does not work with {KEY} and "offload_optimizer"; leave out one of '
                "the two"
            )


def verify(engine: Any) -> Sharding | None:
    """Checks that the engine shards by the degree; returns None if it shards over all its ranks.

    Raises:
        SmddpConfigError: it does not; the model was partitioned before, over other groups.
    """
    optimizer = engine.optimizer
    sharding = getattr(optimizer, "sharding", Sharding.within(engine.seq_data_parallel_group))
    if sharding is None:
        return None
    for name, parameter in engine.module.named_parameters():
        group = getattr(parameter, "ds_process_group", None)
        if group is not sharding.shard_group:
            count = "no" if group is None else str(dist.get_world_size(group))
            raise SmddpConfigError(
                f"{KEY} is {sharding.degree}, but the parameter {name} is partitioned over {count} "
                "ranks; give zero.Init the same DeepSpeed config as deepspeed.initialize"
            )
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        held = sum(p.partition_numel() for group in optimizer.fp16_groups for p in group)
        if (
            not isinstance(optimizer, ShardedStage3)
            or optimizer.dp_process_group is not sharding.shard_group
            or optimizer.partition_count != sharding.degree
            or optimizer.grad_partitions_flat_buffer.numel() != held
        ):
            raise SmddpConfigError(
                f"{KEY} is {sharding.degree}, but this engine's {type(optimizer).__name__} does "
                "not shard its state by it; set the degree to 0"
            )
    return sharding
