"""ZeRO-3 checkpoints that one replica writes and that resume at any other number of shards.

A checkpoint is that of one shard group: as many files as shards, in DeepSpeed's own layout, so that
``zero_to_fp32`` and ``ds_to_universal`` read it. The first replica writes it. DeepSpeed loads such
files only if there are as many ranks again. With this module each rank copies its new shard from
the old ones, parameter by parameter.
"""

from __future__ import annotations

import glob
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.deepspeed.sharding.shard_groups import Sharding
from deepspeed_smddp.upstream.wrapping import replaced


@dataclass(frozen=True)
class Piece:
    """``length`` elements of one parameter, from an old shard of it to a new one."""

    old_rank: int
    old_start: int
    new_start: int
    length: int


def pieces(elements: int, old_count: int, new_count: int, new_rank: int) -> Iterator[Piece]:
    """The pieces of ``new_rank``'s shard of a parameter, from its old shards.

    ZeRO-3 cuts a parameter of ``elements`` into shards of ceil(elements / count); the last ones may
    be short or empty.
    """
    old_width, new_width = math.ceil(elements / old_count), math.ceil(elements / new_count)
    begin = min(new_rank * new_width, elements)
    end = min(begin + new_width, elements)
    position = begin
    while position < end:
        rank, start = divmod(position, old_width)
        length = min(end - position, old_width - start)
        yield Piece(rank, start, position - begin, length)
        position += length


class ShardCheckpoints:
    """Wraps the methods of one engine that name, write and read a checkpoint's parts."""

    METHODS = (
        "_common_checkpoint_state",
        "_get_all_ckpt_names",
        "_load_checkpoint",
        "load_module_state_dict",
        "_load_zero_checkpoint",
    )

    def __init__(self, engine: Any, sharding: Sharding | None) -> None:
        self._engine = engine
        group = engine.optimizer.dp_process_group
        self._count, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._frozen_elsewhere = False
        self._original = {name: getattr(engine, name) for name in self.METHODS}
        for name in self.METHODS:
            setattr(engine, name, getattr(self, name))
        if sharding is not None and sharding.replica != 0:
            engine.save_zero_checkpoint = engine.save_non_zero_checkpoint = False

    def _common_checkpoint_state(self, *args: Any, **options: Any) -> dict[str, Any]:
        # Readers use it as the number of files.
        state: dict[str, Any] = self._original["_common_checkpoint_state"](*args, **options)
        return state | {"dp_world_size": self._count}

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        names: list[str] = self._original["_get_all_ckpt_names"](checkpoints_path, tag)
        if names:
            return names
        # There were fewer shards. The files differ only in buffers and frozen parameters.
        name = self._engine._get_ckpt_name
        pattern = name(checkpoints_path, tag, mp_placeholder="*", pp_placeholder="0")
        return sorted(glob.glob(pattern))

    def _load_checkpoint(self, load_dir: str, tag: str, *args: Any, **options: Any) -> Any:
        self._frozen_elsewhere = False
        loaded = self._original["_load_checkpoint"](load_dir, tag, *args, **options)
        if self._frozen_elsewhere:
            self._load_frozen(load_dir, tag)
        return loaded

    def load_module_state_dict(self, checkpoint: Any, *args: Any, **options: Any) -> None:
        """Loads buffers and placeholders, and frozen parameters only if the shards are the same."""
        has_frozen = checkpoint.get("frozen_param_fragments")
        if has_frozen and checkpoint.get("dp_world_size") != self._count:
            self._frozen_elsewhere = True
            checkpoint = {**checkpoint, "frozen_param_fragments": None}
        self._original["load_module_state_dict"](checkpoint, *args, **options)

    def _load_zero_checkpoint(
        self, load_dir: str, tag: str, load_optimizer_states: bool = True
    ) -> bool:
        engine = self._engine
        universal = engine.load_universal_checkpoint()
        if universal or engine.loaded_checkpoint_dp_world_size == self._count:
            # DeepSpeed compares the number of files with the whole data-parallel world.
            with replaced(engine, "seq_dp_world_size", self._count):
                return bool(
                    self._original["_load_zero_checkpoint"](load_dir, tag, load_optimizer_states)
                )
        engine.optimizer.load_state_dict(
            state_dict_list={self._rank: self._resharded(load_dir, tag)},
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
        )
        return True

    def _resharded(self, load_dir: str, tag: str) -> dict[str, Any]:
        engine, optimizer = self._engine, self._engine.optimizer
        old_count = engine.loaded_checkpoint_dp_world_size
        files = self._optimizer_files(load_dir, tag)
        places = self._places(load_dir, tag, old_count)

        # By old rank: (group, offset of the parameter in it, the same of the old group, piece).
        copies: dict[int, list[tuple[int, int, int, int, Piece]]] = defaultdict(list)
        alike: list[int] = []  # for each new group, an old group of the same parameter group
        for index, parameters in enumerate(optimizer.fp16_groups):
            offset = 0
            for parameter in parameters:
                name = engine.param_names[parameter]
                if name not in places:
                    raise RuntimeError(f"the checkpoint {load_dir}/{tag} has no parameter {name}")
                old_index, old_offset, elements = places[name]
                if elements != parameter.ds_numel:
                    raise RuntimeError(
                        f"the checkpoint {load_dir}/{tag} has {elements} elements of {name}, and "
                        f"the model {parameter.ds_numel}"
                    )
                for piece in pieces(elements, old_count, self._count, self._rank):
                    copies[piece.old_rank].append((index, offset, old_index, old_offset, piece))
                offset += parameter.partition_numel()
            alike.append(places[engine.param_names[parameters[0]]][0])

        widths = [int(numel) for numel in optimizer.fp16_partitioned_groups_flat_numel]
        whole: dict[str, Any] = {}
        flats: list[torch.Tensor] = []
        states: list[dict[str, Any]] = []
        for old_rank in sorted({0, *copies}):
            file = engine.checkpoint_engine.load(files[old_rank], map_location="cpu")
            old = file["optimizer_state_dict"]
            old_flats, old_states = old["fp32_flat_groups"], old["optimizer_state_dict"]["state"]
            if not whole:
                whole = {key: value for key, value in old.items() if key != "fp32_flat_groups"}
                for width, like in zip(widths, alike, strict=True):
                    flats.append(old_flats[like].new_zeros(width))
                    states.append(_like(old_states.get(like, {}), old_flats[like], width))
            for index, offset, old_index, old_offset, piece in copies[old_rank]:
                source = old_flats[old_index]
                _copy(flats[index], source, piece, offset, old_offset)
                for key, value in old_states.get(old_index, {}).items():
                    if _is_sharded(value, source):
                        _copy(states[index][key], value, piece, offset, old_offset)

        group_of = optimizer.sub_group_to_group_id
        base = whole["optimizer_state_dict"]
        groups = [
            {**settings, "params": [i for i in range(len(flats)) if group_of[i] == group]}
            for group, settings in enumerate(base["param_groups"])
        ]
        held = {index: state for index, state in enumerate(states) if state}
        return {
            **whole,
            "partition_count": self._count,
            "fp32_flat_groups": flats,
            "optimizer_state_dict": {**base, "state": held, "param_groups": groups},
        }

    def _optimizer_files(self, load_dir: str, tag: str) -> list[str]:
        engine = self._engine
        for bf16 in (engine.bfloat16_enabled(), not engine.bfloat16_enabled()):
            names: list[str] = engine._get_all_zero_checkpoint_names(load_dir, tag, bf16)
            if all(os.path.exists(name) for name in names):
                return names
        raise RuntimeError(
            f"the checkpoint {load_dir}/{tag} is of {len(names)} shards, and not all of their "
            f"files are there; the first is {names[0]}"
        )

    def _model_state(self, load_dir: str, tag: str, rank: int) -> dict[str, Any]:
        name = self._engine._get_ckpt_name(load_dir, tag, pp_placeholder=str(rank))
        state: dict[str, Any] = self._engine.checkpoint_engine.load(name, map_location="cpu")
        return state

    def _places(self, load_dir: str, tag: str, old_count: int) -> dict[str, tuple[int, int, int]]:
        """By parameter: its group in the files, the offset of its shard there, its elements."""
        places: dict[str, tuple[int, int, int]] = {}
        shapes = self._model_state(load_dir, tag, 0)["param_shapes"]
        for index, group in enumerate(shapes):
            offset = 0
            for name, shape in group.items():
                places[name] = (index, offset, shape.numel())
                offset += math.ceil(shape.numel() / old_count)
        return places

    def _load_frozen(self, load_dir: str, tag: str) -> None:
        engine = self._engine
        frozen = {
            engine.param_names[parameter]: parameter
            for parameter in engine.module.parameters()
            if not parameter.requires_grad
        }
        old_count = engine.loaded_checkpoint_dp_world_size
        wanted: dict[int, list[tuple[str, Piece]]] = defaultdict(list)
        for name, parameter in frozen.items():
            for piece in pieces(parameter.ds_numel, old_count, self._count, self._rank):
                wanted[piece.old_rank].append((name, piece))
        for old_rank, parts in wanted.items():
            fragments = self._model_state(load_dir, tag, old_rank)["frozen_param_fragments"]
            for name, piece in parts:
                _copy(frozen[name].ds_tensor.data, fragments[name], piece)


def _is_sharded(value: Any, flat: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.numel() == flat.numel()


def _like(state: Mapping[str, Any], flat: torch.Tensor, width: int) -> dict[str, Any]:
    # The optimizer's state for a group of another width, with zeros in its sharded tensors.
    return {
        key: value.new_zeros(width) if _is_sharded(value, flat) else value
        for key, value in state.items()
    }


def _copy(
    target: torch.Tensor, source: torch.Tensor, piece: Piece, offset: int = 0, old_offset: int = 0
) -> None:
    old = source.detach().narrow(0, old_offset + piece.old_start, piece.length)
    target.detach().narrow(0, offset + piece.new_start, piece.length).copy_(old)
