"""Trains with DeepSpeed's device meshes, of a default group bound to a GPU and of a plain one."""

from __future__ import annotations

from typing import Any
from unittest import mock

from harness import model_jobs, training
from harness.bound_device import bound

CONFIGS: dict[str, dict[str, Any]] = {
    "degree": {"smddp": {"tensor_parallel_degree": 2}},
    "autotp": {"tensor_parallel": {"autotp_size": 2}},
    "ulysses": {"data_parallel_size": 2, "sequence_parallel_size": 2},
}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Losses with the binding and without it, and how many groups were split off with it."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import groups
    from torch.distributed import device_mesh

    deepspeed.init_distributed(dist_backend="smddp", verbose=False)
    losses = {}
    splits = mock.Mock(side_effect=device_mesh.split_group)
    make = device_mesh.init_device_mesh

    def make_bound(*args: Any, **kwargs: Any) -> Any:
        with bound(dist.get_rank()), mock.patch.object(device_mesh, "split_group", splits):
            return make(*args, **kwargs)

    for name, made_by in (("unbound", make), ("losses", make_bound)):
        with mock.patch.object(device_mesh, "init_device_mesh", made_by):
            losses[name] = _losses(CONFIGS[job["case"]])
        for kept in ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
            setattr(groups, kept, None)
        groups.mesh_device = None
    dist.destroy_process_group()
    return {**losses, "splits": splits.call_count}


def _losses(more: dict[str, Any]) -> list[float]:
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.manual_seed(3)
    model = model_jobs.llama(num_key_value_heads=2)
    config = {**training.config("smddp", "fp32"), **more}
    if "sequence_parallel_size" not in more:
        config["zero_optimization"] = {"stage": 1}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    engine.destroy()
    return losses
