"""The set-up calls of GPT-NeoX and of Megatron-DeepSpeed, in their order, with tiny CPU tensors.

The calls are copied here for tests without the programs' sources and without stand-ins for CUDA,
which GPT-NeoX asserts before them. (Megatron-DeepSpeed asserts an accelerator; the CPU is one.)
``make neox-check`` and ``make megatron-check`` run the programs themselves. Sources:
GPT-NeoX (commit ea7aefd8) ``megatron/initialize.py``, ``megatron/mpu/{initialize,mappings}.py``;
Megatron-DeepSpeed (commit 4efb479d) ``megatron/{initialize,training}.py``,
``megatron/core/parallel_state.py``, ``megatron/core/tensor_parallel/{mappings,layers}.py``.

Functions here run in the ranks that harness.training forks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from harness import zero


class Groups:
    """This rank's groups, with the accessors of an mpu that DeepSpeed calls."""

    data: Any = None
    data_gloo: Any = None
    model: Any = None
    pipe: Any = None
    io: Any = None
    tensor: Any = None
    embedding: Any = None

    def make(self, name: str, ranks: Sequence[int], **more: Any) -> None:
        """A group, as each rank must make it; it gets the name on the ranks that belong to it."""
        group = dist.new_group(ranks, **more)
        if dist.get_rank() in ranks:
            setattr(self, name, group)

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(group=self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(group=self.data)

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(group=self.model)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(group=self.model)


def neox_groups(pipes: int, models: int) -> Groups:
    """``initialize_model_parallel`` of GPT-NeoX's mpu, with a topology."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    size = dist.get_world_size()
    topology = PipeModelDataParallelTopology(
        num_pp=pipes, num_mp=models, num_dp=size // (pipes * models)
    )
    found = Groups()
    for axis, name in (("data", "data"), ("pipe", "pipe")):
        for ranks in topology.get_axis_comm_lists(axis):
            found.make(name, ranks)
    if pipes > 1:
        ends = (0, pipes - 1)
        found.make("io", [r for stage in ends for r in topology.filter_match(pipe=stage, model=0)])
    else:
        found.io = found.data
    lists = [[r] for r in range(size)] if models == 1 else topology.get_axis_comm_lists("model")
    for ranks in lists:
        found.make("model", ranks)
    return found


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def expect(got: torch.Tensor, wanted: Any) -> None:
    assert got.tolist() == wanted, (got.tolist(), wanted)


def neox_traffic(groups: Groups) -> None:
    """Runs on each group the operations that GPT-NeoX runs on it."""
    rank = dist.get_rank()
    mine = torch.full((4,), float(rank), dtype=torch.bfloat16)
    # mappings._reduce: AllReduce of activations, in fp32 if fp32_allreduce is set.
    for dtype in (torch.bfloat16, torch.float32):
        summed = mine.to(dtype, copy=True)
        dist.all_reduce(summed, group=groups.model)
        expect(summed, [float(sum(members(groups.model)))] * 4)
    # mappings._gather: a list, joined along the last dimension.
    parts = [torch.empty_like(mine) for _ in members(groups.model)]
    parts[dist.get_rank(group=groups.model)] = mine
    dist.all_gather(parts, mine, group=groups.model)
    expect(torch.cat(parts), [float(r) for r in members(groups.model) for _ in range(4)])
    # mappings._reduce_scatter_along_seq_dim, _gather_along_seq_dim.
    whole = torch.arange(4.0).repeat_interleave(len(members(groups.model)))
    part = torch.empty(4)
    dist._reduce_scatter_base(part, whole.contiguous(), group=groups.model)
    back = torch.empty_like(whole)
    dist._all_gather_base(back, part, group=groups.model)
    expect(back, (whole * len(members(groups.model))).tolist())
    # data.broadcast_data: from the first rank of the model-parallel group.
    source = members(groups.model)[0]
    sizes = torch.tensor([rank, 7, 9])
    dist.broadcast(sizes, source, group=groups.model)
    expect(sizes, [source, 7, 9])
    # utils.reduce_losses and the overflow check.
    loss = torch.tensor([float(rank)])
    dist.all_reduce(loss, group=groups.data)
    expect(loss, [float(sum(members(groups.data)))])
    worst = torch.tensor([float(rank)])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=groups.model)
    expect(worst, [float(max(members(groups.model)))])
    # Activations from one stage to the next.
    stages = members(groups.pipe)
    place = stages.index(rank)
    if place + 1 < len(stages):
        dist.send(mine, stages[place + 1], group=groups.pipe)
    if place > 0:
        received = torch.empty_like(mine)
        dist.recv(received, stages[place - 1], group=groups.pipe)
        expect(received, [float(stages[place - 1])] * 4)
    if groups.io is not None:
        dist.barrier(group=groups.io)
    dist.barrier()


def neox(job: dict[str, Any]) -> dict[str, Any]:
    """``_initialize_distributed`` and ``setup_model_and_optimizer``; ``"ways"``: (PP, MP) pairs."""
    import deepspeed

    deepspeed.init_distributed(
        dist_backend=job["backend"],  # distributed_backend of the YAML
        auto_mpi_discovery=True,
        distributed_port=os.getenv("MASTER_PORT", "6000"),
        verbose=True,
    )
    assert dist.get_backend() == job["backend"]
    losses = []
    for pipes, models in job["ways"]:
        groups = neox_groups(pipes, models)
        deepspeed.checkpointing.configure(groups, partition_activations=False, num_checkpoints=3)
        neox_traffic(groups)
        if pipes > 1:
            continue  # GPT-NeoX has its own modules for pipelines
        stage = 3 if models == 1 else 1
        settings = zero.config(job["backend"], {"stage": stage}, bf16={"enabled": True})
        place = dist.get_rank(group=groups.data)
        with zero.engine_of(zero.blocks(), settings, mpu=groups) as engine:
            losses += zero.fit(engine, place)
    return ended(job, losses)


def ended(job: dict[str, Any], losses: list[float]) -> dict[str, Any]:
    """The losses, with the calls of the fallback by name."""
    lost: dict[str, int] = {}
    if job["backend"] == "smddp":
        import deepspeed_smddp

        lost = {row["collective"]: row["calls"] for row in deepspeed_smddp.fallback_ledger()}
    dist.destroy_process_group()
    return {"losses": losses, "fallback": lost}


def megatron_groups(tensors: int, pipes: int) -> Groups:
    """``initialize_model_parallel`` of Megatron-DeepSpeed, without sequence parallelism."""
    size = dist.get_world_size()
    found = Groups()
    per_stage = size // pipes
    data_lists: list[list[int]] = []
    for stage in range(pipes):
        start, end = stage * per_stage, (stage + 1) * per_stage
        for j in range(tensors):
            ranks = range(start + j, end, tensors)
            data_lists.append(list(ranks))
            found.make("data", ranks)
            found.make("data_gloo", ranks, backend="gloo")
    for r in range(size):  # sequence-parallel groups of one rank each
        dist.new_group(range(r, r + 1))
    for ranks in zip(*data_lists, strict=True):
        found.make("model", list(ranks))
    for i in range(size // tensors):
        found.make("tensor", range(i * tensors, (i + 1) * tensors))
    for i in range(size // pipes):
        ranks = range(i, size, size // pipes)
        found.make("pipe", ranks)
        found.make("embedding", [ranks[0], ranks[-1]] if len(ranks) > 1 else list(ranks))
        dist.new_group([ranks[0]])  # position embeddings
    return found


def megatron_traffic(groups: Groups) -> None:
    rank, tensors = dist.get_rank(), members(groups.tensor)
    count, place = len(tensors), tensors.index(rank)
    mine = torch.full((4,), float(rank))
    # mappings._gather_along_last_dim
    parts = [torch.empty_like(mine) for _ in tensors]
    parts[place] = mine
    dist.all_gather(parts, mine, group=groups.tensor)
    expect(torch.cat(parts), [float(r) for r in tensors for _ in range(4)])
    # mappings._gather_along_first_dim, _reduce_scatter_along_first_dim
    whole = torch.empty(4 * count)
    dist._all_gather_base(whole, mine.contiguous(), group=groups.tensor)
    expect(whole, [float(r) for r in tensors for _ in range(4)])
    part = torch.empty(4)
    dist._reduce_scatter_base(part, whole.contiguous(), group=groups.tensor)
    expect(part, [float(count * rank)] * 4)
    # layers.LinearWithGradAccumulationAndAsyncCommunication: in flight during a matrix product.
    gathered, reduced, summed = torch.empty(4 * count), torch.empty(4), mine.clone()
    handles = [
        dist._all_gather_base(gathered, mine, group=groups.tensor, async_op=True),
        dist.all_reduce(summed, group=groups.tensor, async_op=True),
        dist._reduce_scatter_base(reduced, whole, group=groups.tensor, async_op=True),
    ]
    torch.ones(64, 64) @ torch.ones(64, 64)
    for handle in handles:
        handle.wait()
    expect(gathered, whole.tolist())
    expect(summed, [float(sum(tensors))] * 4)
    expect(reduced, [float(count * rank)] * 4)
    # timers._get_elapsed_time_all_ranks, over all ranks
    times = torch.zeros(dist.get_world_size(), 2)
    times[rank] = torch.tensor([rank, 10.0 * rank])
    dist._all_gather_base(times.view(-1), times[rank].view(-1))
    expect(times, [[r, 10.0 * r] for r in range(dist.get_world_size())])
    # distrib_optimizer.save_parameter_state: shards to the first rank, over the Gloo group
    data = members(groups.data)
    shards = [torch.empty(4) for _ in data] if rank == data[0] else None
    dist.gather(mine, shards, data[0], group=groups.data_gloo)
    for shard, owner in zip(shards or [], data, strict=bool(shards)):
        expect(shard, [float(owner)] * 4)
    # p2p_communication: both directions at once; embeddings' gradients at both ends
    stages = members(groups.pipe)
    if len(stages) > 1:
        at = stages.index(rank)
        following, before = stages[(at + 1) % len(stages)], stages[at - 1]
        received = torch.empty(4)
        exchange = [
            dist.P2POp(dist.isend, mine, following),
            dist.P2POp(dist.irecv, received, before),
        ]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
        expect(received, [float(before)] * 4)
    if groups.embedding is not None:
        both = mine.clone()
        dist.all_reduce(both, group=groups.embedding)
        expect(both, [float(sum(members(groups.embedding)))] * 4)
    source = torch.tensor([rank])
    dist.broadcast(source, tensors[0], group=groups.tensor)
    expect(source, [tensors[0]])
    dist.barrier()


def megatron(job: dict[str, Any]) -> dict[str, Any]:
    """``initialize_megatron``, ``model_provider`` and ``setup_model_and_optimizer``.

    The command line names a file of plain JSON; nothing else names the backend.
    """
    import deepspeed

    settings = zero.config(job["backend"], {"stage": 3}, bf16={"enabled": True})
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        sys.argv = ["pretrain_gpt.py", "--deepspeed", "--deepspeed_config", file.name]
        deepspeed.init_distributed()
        assert dist.get_backend() == job["backend"], dist.get_backend()
    losses = []
    for tensors, pipes in job["ways"]:
        groups = megatron_groups(tensors, pipes)
        assert dist.get_backend(groups.data_gloo) == "gloo"
        assert dist.get_backend(groups.data) == job["backend"]
        megatron_traffic(groups)
        if pipes > 1:
            continue
        with deepspeed.zero.Init(
            data_parallel_group=groups.data,
            remote_device=None,
            config_dict_or_path=settings,
            enabled=True,
            mpu=groups,
        ):
            model = zero.blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        config = {key: value for key, value in settings.items() if key != "optimizer"}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            args=SimpleNamespace(deepspeed_config=None, local_rank=int(os.environ["LOCAL_RANK"])),
            lr_scheduler=None,
            mpu=groups,
            config=config | {"zero_allow_untested_optimizer": True},
        )
        losses += zero.fit(engine, dist.get_rank(group=groups.data))
        engine.destroy()
    return ended(job, losses)
