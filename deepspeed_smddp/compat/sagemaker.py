"""``torch.sagemaker``: its configuration, and FSDP sharded by ``hybrid_shard_degree``.

Scripts keep their own calls of torch's ``FullyShardedDataParallel``. After :func:`init`, calls that
name no mesh and no process group get the mesh of the degree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

from deepspeed_smddp.compat import parameters, refuse
from deepspeed_smddp.compat.parameters import SageMakerParameters
from deepspeed_smddp.errors import logger
from deepspeed_smddp.models.offload import offload_activations
from deepspeed_smddp.upstream.wrapping import wrap

# The properties that the original documents; set by init().
state = SimpleNamespace(initialized=False, mesh=None, parameters=SageMakerParameters())


def init(config: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
    """Reads the configuration, and makes the default process group if there is none.

    Args:
        config: a dictionary, or the path of a JSON file with one; keys in the environment variable
            ``SM_HP_MP_PARAMETERS`` have precedence.

    Raises:
        SmddpConfigError: an unknown key or a wrong value.
        Unsupported: context or expert parallelism.
    """
    found = parameters.read(SageMakerParameters, config)
    if not dist.is_initialized():
        dist.init_process_group("smddp")
    if dist.get_backend() != "smddp":
        logger.warning(
            "smddp: torch.sagemaker runs over %s; for smddp call "
            'torch.distributed.init_process_group("smddp") before init()',
            dist.get_backend(),
        )
    degree = found.hybrid_shard_degree
    state.mesh = None
    data_parallel = dist.get_world_size() // found.tensor_parallel_degree
    if found.tensor_parallel_degree > 1 and degree not in (0, data_parallel):
        refuse(
            f"hybrid sharding within {degree} ranks together with tensor parallelism",
            f'set "hybrid_shard_degree" to 0, which shards over all {data_parallel} data-parallel '
            "ranks",
        )
    if degree > 1 and found.tensor_parallel_degree == 1:
        from deepspeed_smddp import fsdp

        state.mesh = fsdp.mesh(degree)
    state.parameters = found
    state.hybrid_shard_degree = degree
    state.rank, state.world_size = dist.get_rank(), dist.get_world_size()
    state.tensor_parallel_degree = state.tp_size = found.tensor_parallel_degree
    state.tp_rank = dist.get_rank() % state.tp_size
    # As documented: None if there is no tensor parallelism.
    state.tp_process_group = state.rep_rank_process_group = None
    if state.mesh is not None and state.mesh.ndim == 2:
        state.rep_rank_process_group = state.mesh.get_group("replicate")
    state.initialized = True
    _wrap_fsdp()
    _wrap_offload()


def is_initialized() -> bool:
    """Whether :func:`init` was called."""
    return bool(state.initialized)


def transform(
    model: nn.Module,
    device: Any = None,
    dtype: Any = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Prepares the model for FSDP and returns it.

    The model keeps its own layers and names, so that its checkpoints stay valid. With a
    ``tensor_parallel_degree`` above 1, the package's own tensor parallelism divides its layers, and
    FSDP shards over the ranks that hold the same part. FSDP's ``sync_module_states=True`` sends the
    values that rank 0 loaded to the other ranks.

    Args:
        model: on any device, including the meta device.
        device: the device to move the model to; no effect for a model on the meta device.
        dtype: the type of the model's parameters.
        config: for mixtures of experts, which are refused.
        load_state_dict_from_rank0: has no effect; FSDP does this, see above.
        cp_comm_type: for context parallelism, which :func:`init` refuses.

    Raises:
        RuntimeError: :func:`init` was not called.
        Unsupported: a mixture of experts.
    """
    if not is_initialized():
        raise RuntimeError("torch.sagemaker.transform() needs torch.sagemaker.init() before it")
    if config is not None:
        refuse(
            "expert parallelism (transform(config=...))",
            "leave out config, or use DeepSpeed's MoE layer (deepspeed.moe.layer.MoE) over smddp",
        )
    if state.tp_size > 1:
        # Imported at first use, because the import of torch's DTensor is slow.
        from deepspeed_smddp import tensor_parallel

        mesh = tensor_parallel.tensor_parallel(model, state.tp_size, seed=state.parameters.seed)
        state.mesh = mesh[tensor_parallel.DATA]
        state.tp_process_group = mesh[tensor_parallel.TENSOR].get_group()
        state.rep_rank_process_group = state.mesh.get_group()
        return model
    if all(p.device.type != "meta" for p in model.parameters()):
        model = model.to(device=device, dtype=dtype)
    elif dtype is not None:
        model = model.to(dtype=dtype)
    return model


def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> Any:
    """``torch.sagemaker.grad_norm.clip_grad_norm_``: FSDP's own."""
    if is_initialized() and state.tp_size > 1:
        refuse(
            "clip_grad_norm_ together with tensor parallelism",
            "shard with fully_shard instead of FSDP, and use "
            "deepspeed_smddp.tensor_parallel.clip_grad_norm_",
        )
    if hasattr(model, "clip_grad_norm_"):
        return model.clip_grad_norm_(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def _wrap_fsdp() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def init_on_mesh(
        original: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        # The second positional argument is the process group. A child of an FSDP module gets its
        # parent's groups as keyword arguments.
        placed = args or kwargs.get("process_group") or kwargs.get("device_mesh")
        if not placed and state.mesh is not None:
            zero2, asked = ShardingStrategy._HYBRID_SHARD_ZERO2, kwargs.get("sharding_strategy")
            hybrid = zero2 if asked == zero2 else ShardingStrategy.HYBRID_SHARD
            one = state.mesh.ndim == 1
            kwargs["sharding_strategy"] = ShardingStrategy.FULL_SHARD if one else hybrid
            kwargs["device_mesh"] = state.mesh
        elif not placed and state.hybrid_shard_degree == 1:
            kwargs["sharding_strategy"] = ShardingStrategy.NO_SHARD
        original(self, module, *args, **kwargs)

    wrap(FullyShardedDataParallel, "__init__", init_on_mesh)


def _wrap_offload() -> None:
    # Scripts put torch's offload_wrapper around the root module; if the configuration asks for it,
    # the package's offloading takes its place.
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    def offload(original: Callable[..., nn.Module], module: nn.Module) -> nn.Module:
        if not state.parameters.sm_activation_offloading:
            return original(module)
        offload_activations(module, horizon=state.parameters.activation_loading_horizon)
        return module

    wrap(checkpoint_wrapper, "offload_wrapper", offload)
