"""Tensor parallelism of transformers' models, beside FSDP2 or DeepSpeed ZeRO.

Each ``degree`` neighbours of n ranks share one batch and divide the matrices of every layer: the
columns of the first matrix of a pair, the rows of the second (Shoeybi et al., Megatron-LM, 2019),
as the model's own ``tp_plan`` says. The n / degree ranks with the same part are data-parallel. With
FSDP2::

    mesh = tensor_parallel(model, degree=2)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])

Divide the data by the size of ``mesh["data"]`` and this rank's position in it, so that the global
batch is the same at any degree. With DeepSpeed set ``"tensor_parallel_degree"`` in the "smddp"
section.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepspeed_smddp.errors import SmddpConfigError, no_divisor

DATA, TENSOR = "data", "tensor"
_COLUMNS, _ROWS = "colwise", "rowwise"
_COLUMNS_WHOLE = ("colwise_gather_output", "colwise_rep")  # every rank gets all columns
_ENTRIES = "embedding_rowwise"  # of the vocabulary


def tensor_parallel(
    model: nn.Module, degree: int, *, seed: int = 0, device_type: str | None = None
) -> DeviceMesh:
    """Divides a model's layers over ``degree`` neighbouring ranks; all ranks call it.

    The generators of each group's ranks get the state of its first rank. Between a division by
    columns and the one by rows, every rank has other heads or neurons, and dropout draws other
    numbers on every rank. Elsewhere it draws the same numbers.

    Args:
        model: with a ``tp_plan``, as most of transformers' models have; also one that
            ``delayed_init`` returned. Not yet sharded.
        degree: the number of ranks that share a batch; divides the number of ranks.
        seed: of the random numbers that differ between the ranks.
        device_type: of the mesh; default: the current accelerator, else "cpu".

    Returns:
        The mesh, n / degree by degree, with the dimensions "data" and "tensor".

    Raises:
        SmddpConfigError: the degree does not divide the ranks, or the model's heads or widths; the
            model has no plan, or one with a division that this module does not know.
    """
    check_degree(degree, dist.get_world_size())
    plan = division(model)
    _check_sizes(model, plan, degree)
    if device_type is None:
        current = torch.accelerator.current_accelerator(check_available=True)
        device_type = current.type if current is not None else "cpu"
    mesh = init_device_mesh(
        device_type, (dist.get_world_size() // degree, degree), mesh_dim_names=(DATA, TENSOR)
    )
    if degree > 1:
        _parallelize(model, mesh[TENSOR], plan)
        share_random_numbers(mesh[TENSOR].get_group(), device_type)
        draw_apart(model, plan, mesh[TENSOR].get_local_rank(), seed)
    return mesh


def check_degree(degree: int, ranks: int) -> None:
    """Raises SmddpConfigError if a degree does not divide the ranks."""
    if degree < 1 or ranks % degree:
        raise no_divisor("tensor_parallel_degree", degree, ranks, "ranks")


def division(model: nn.Module) -> dict[str, str]:
    """How each divided module of the model is divided: its name to "colwise", "rowwise" and so on.

    Raises:
        SmddpConfigError: the model has no ``tp_plan``, or it names an unknown way.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise SmddpConfigError(
            f"{type(model).__name__} has no tensor-parallel plan; use a model of transformers that "
            "has one (config.base_model_tp_plan), or a tensor_parallel_degree of 1"
        )
    found = {}
    for name, module in model.named_modules():
        way = next((w for p, w in plan.items() if fnmatch.fnmatchcase(name, p)), None)
        if way is None:
            continue
        linear = way in (_COLUMNS, *_COLUMNS_WHOLE, _ROWS) and isinstance(module, nn.Linear)
        if not linear and not (way == _ENTRIES and isinstance(module, nn.Embedding)):
            raise SmddpConfigError(
                f"the plan of {type(model).__name__} divides {name} ({type(module).__name__}) by "
                f'"{way}", which smddp does not know; use a tensor_parallel_degree of 1'
            )
        found[name] = way
    return found


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters on one- and two-dimensional meshes.

    All ranks of the meshes call it.

    Args:
        parameters: those whose gradients are scaled, in place; the ones without a gradient do not
            count. The same on all ranks, in the same order.
        max_norm: if the norm is larger, every gradient is multiplied by max_norm / norm.

    Returns:
        The norm (2) of all gradients together, before clipping; a scalar, the same on all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # The squares of gradients that are divided over the same dimensions of a mesh share a sum.
    sums: dict[tuple[Any, tuple[int, ...]], torch.Tensor] = {}
    for gradient in gradients:
        square = torch.linalg.vector_norm(_local(gradient).detach()).square()
        placements = getattr(gradient, "placements", ())
        divided = tuple(i for i, p in enumerate(placements) if not p.is_replicate())
        where = (getattr(gradient, "device_mesh", None), divided)
        sums[where] = sums[where] + square if where in sums else square
    for (mesh, divided), total in sums.items():
        for dimension in divided:
            dist.all_reduce(total, group=mesh.get_group(dimension))
    norm = torch.stack(list(sums.values())).sum().sqrt() if sums else torch.zeros(())
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        _local(gradient).mul_(factor)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def _check_sizes(model: nn.Module, plan: dict[str, str], degree: int) -> None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % degree:
            raise SmddpConfigError(
                f"tensor_parallel_degree is {degree}, but has to divide the {heads} {name} of "
                f"{type(model).__name__}"
            )
    for name, way in plan.items():
        layer = model.get_submodule(name)
        assert isinstance(layer.weight, torch.Tensor)
        size = layer.weight.shape[1 if way == _ROWS else 0]
        if size % degree:
            kind = "inputs" if way == _ROWS else "entries" if way == _ENTRIES else "outputs"
            raise SmddpConfigError(
                f"tensor_parallel_degree is {degree}, but has to divide the {size} {kind} of {name}"
            )


def _parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    from torch.distributed.tensor import Replicate, parallel

    styles = {
        _COLUMNS: parallel.ColwiseParallel(),
        _ROWS: parallel.RowwiseParallel(),
        _ENTRIES: parallel.RowwiseParallel(input_layouts=Replicate()),
        **dict.fromkeys(_COLUMNS_WHOLE, parallel.ColwiseParallel(output_layouts=Replicate())),
    }
    ties = _ties(model)
    for name, way in plan.items():
        parallel.parallelize_module(model.get_submodule(name), mesh, styles[way])
    for (first, first_name), *others in ties:
        parameter = getattr(first, first_name)
        for module, name in others:
            both = (parameter, getattr(module, name))
            if len({getattr(one, "placements", None) for one in both}) > 1:
                raise SmddpConfigError(
                    f"{type(model).__name__} ties {name} of a {type(module).__name__} to that of a "
                    f"{type(first).__name__}, which its plan divides in another way; use a "
                    "tensor_parallel_degree of 1"
                )
            setattr(module, name, parameter)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            slots.setdefault(id(parameter), []).append((module, name))
    return [places for places in slots.values() if len(places) > 1]


def share_random_numbers(group: Any, device_type: str) -> None:
    """Sets the generators of a group's ranks to the state of the group's first rank."""
    modules = [torch.random]
    if device_type != "cpu":
        modules.append(torch.get_device_module(device_type))
    states = [module.get_rng_state() for module in modules]
    dist.broadcast_object_list(states, group_src=0, group=group)
    for module, state in zip(modules, states, strict=True):
        module.set_rng_state(state)


def draw_apart(model: nn.Module, plan: dict[str, str], rank: int, seed: int) -> None:
    """Lets dropout between columns and rows draw other numbers on every rank of a group.

    At each entry all ranks draw the same number, and mix it with ``seed`` and the rank. So a
    recomputation, which starts from the same generator state, draws what the forward pass drew.
    """
    if not _drops_out(model):
        return
    regions: dict[str, _Region] = {}
    for name, way in plan.items():
        layer = model.get_submodule(name)
        region = regions.setdefault(name.rpartition(".")[0], _Region(rank, seed))
        if way == _COLUMNS:
            layer.register_forward_hook(region.enter)
        elif way == _ROWS:
            layer.register_forward_pre_hook(region.leave)


def _drops_out(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    by_config = (v for k, v in values.items() if "drop" in k and isinstance(v, float))
    by_module = (m.p for m in model.modules() if isinstance(m, nn.Dropout))
    return any(p > 0 for p in (*by_config, *by_module))


class _Region:
    """The part of one attention or MLP in which the ranks of a group compute different values."""

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self._outside: torch.Tensor | None = None  # the generator's state to restore at the end
        self._first: nn.Module | None = None  # the module that entered

    def enter(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not module.training:
            return
        # A recomputation may stop within the region. Then its first module enters again.
        if self._outside is not None and module is not self._first:
            return
        self._first = module
        device = output.device
        drawn = int(torch.randint(1 << 31, (), device=device).item())
        generator = _generator(device)
        self._outside = generator.get_rng_state()
        mixed = (drawn * 1_000_003 + self._seed) * 1_000_003 + self._rank + 1
        # torch.random.manual_seed would seed all devices.
        seeded = torch.default_generator if device.type == "cpu" else generator
        seeded.manual_seed(mixed % (1 << 63))

    def leave(self, module: nn.Module, args: Any) -> None:
        if self._outside is not None:
            _generator(args[0].device).set_rng_state(self._outside)
            self._outside = None


def _generator(device: torch.device) -> Any:
    return torch.random if device.type == "cpu" else torch.get_device_module(device)
