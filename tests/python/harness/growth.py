"""What a process holds, counted: what of it grows with default groups, with DeepSpeed engines."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer

from harness import zero
from harness.worker import Context, connect

ROUNDS, ENGINES = 200, 20
SETTLED = 0.2  # the share of the turns after which nothing grows any more
MEMORY = "bytes of memory"
ALLOWED = 16 << 10  # bytes for each turn: what the allocator and torch keep


def grown(turn: Callable[[int], Any], turns: int) -> dict[str, float]:
    """What grows by one with every second turn at least, and by how much with each."""
    first = int(turns * SETTLED)
    for number in range(first):
        turn(number)
    _held()  # with what counting itself needs
    before = _held()
    for number in range(first, turns):
        turn(number)
    each = {kind: (now - before[kind]) / (turns - first) for kind, now in _held().items()}
    least = {MEMORY: ALLOWED}
    return {kind: more for kind, more in each.items() if more >= least.get(kind, 0.5)}


def _held() -> Counter[str]:
    time.sleep(2)  # threads that complete futures, or tidy the store, end after a second
    gc.collect()
    counts = Counter(
        f"objects of {type(o).__module__}.{type(o).__name__}" for o in gc.get_objects()
    )
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("deepspeed_smddp", "smddp_autoload"):
            for variable, value in vars(module).items():
                bounded = getattr(value, "maxlen", None) is not None
                if hasattr(type(value), "__len__") and not bounded:
                    counts[f"entries of {name}.{variable}"] = len(value)
    world = dist.distributed_c10d._world
    counts["groups"] = len(world.pg_map) + len(world.pg_names) + len(world.pg_group_ranks)
    counts["hooks of optimizers"] = len(optimizer._global_optimizer_post_hooks)
    counts["descriptors"] = len(os.listdir("/proc/self/fd"))
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["mappings"] = Path("/proc/self/maps").read_text().count("\n")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts[MEMORY] = pages * os.sysconf("SC_PAGE_SIZE")
    return counts


def with_default_groups(ctx: Context, backend: str) -> dict[str, float]:
    """Of ``init_process_group`` and ``destroy_process_group``, with a further group between."""
    store, hook = connect(60), sys.excepthook

    def turn(number: int) -> None:
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"{number}", store), rank=ctx.rank, world_size=ctx.size
        )
        for group in (None, dist.new_group()):
            dist.all_reduce(torch.ones(1000), group=group)
            dist.all_gather([torch.empty(100) for _ in range(ctx.size)], torch.ones(100), group)
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.barrier()
        dist.destroy_process_group()
        sys.excepthook = hook  # torch puts a new one around it for each default group

    return grown(turn, ROUNDS)


def with_engines(job: dict[str, Any]) -> dict[str, float]:
    """Of ZeRO-3 engines; without ``destroy`` DeepSpeed keeps them, over Gloo too."""
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    backend = job["backend"]
    deepspeed.init_distributed(dist_backend=backend, verbose=False)

    def turn(number: int) -> None:
        settings = zero.config(backend, {"stage": 3})
        model = zero.blocks()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
        zero.forward_and_step(engine, dist.get_rank())
        engine.destroy()
        # DeepSpeed keeps a module of each engine there, and with it the engine.
        parameter_offload.FWD_MODULE_STACK.clear()

    result = grown(turn, ENGINES)
    dist.destroy_process_group()
    return result
