"""A rank of a training step: the model, its batches, its turns, and the counters.

The protocol is that of turns.h, with the commands ``run STEPS`` and ``quit``. The backend ``fake``
is torch's: AllGather copies its shard into every part, other collectives send nothing.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared import rank_commands
from torch import nn
from torch._C import _distributed_c10d as c10d

from .workload import Workload

# The methods of torch's ProcessGroup that a training thread calls to communicate, by old and new
# names: the kind under which bytes are counted, and the argument that has the bytes.
COLLECTIVES: dict[str, tuple[str, int | None]] = {
    **dict.fromkeys(
        (
            *("_allgather_base", "all_gather_single", "allgather", "allgather_coalesced"),
            *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ),
        ("gathered", 0),
    ),
    **dict.fromkeys(
        (
            *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter"),
            *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ),
        ("scattered", 1),
    ),
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("reduced", 0)),
    **dict.fromkeys(("broadcast", "alltoall_base", "all_to_all_single", "alltoall"), ("other", 0)),
    **dict.fromkeys(("barrier", "_end_coalescing", "send", "recv"), ("", None)),
}


def size_of(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(size_of(tensor) for tensor in tensors)


class Meter:
    """Time that this thread spends inside communication calls, and the bytes given to them.

    It wraps the methods of torch's ProcessGroup and ``Work.wait`` in the same way for every backend
    and every caller.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes: Counter[str] = Counter()
        self._inside = False
        for name, (kind, position) in COLLECTIVES.items():
            if hasattr(c10d.ProcessGroup, name):
                self._wrap(c10d.ProcessGroup, name, kind, position)
        self._wrap(c10d.Work, "wait", "", None)

    def _wrap(self, owner: Any, name: str, kind: str, position: int | None) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(this, *args, **kwargs)
            if position is not None and len(args) > position:
                self.bytes[kind] += size_of(args[position])
            self._inside = True
            start = time.perf_counter()
            try:
                return original(this, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        setattr(owner, name, timed)

    def reset(self) -> None:
        self.seconds = 0.0
        self.bytes.clear()


def own_wait(backend: str) -> float | None:
    """Seconds that callers spent in ``wait()``, by smddp's own counters."""
    if backend != "smddp":
        return None
    import deepspeed_smddp

    return sum(row["wait_seconds"] for row in deepspeed_smddp.statistics())


def neox(load: Workload) -> nn.Module:
    """A GPT-NeoX of these dimensions, the same on every rank."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(1)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=load.vocabulary,
            hidden_size=load.hidden,
            num_hidden_layers=load.layers,
            num_attention_heads=load.heads,
            intermediate_size=4 * load.hidden,
            max_position_embeddings=load.sequence,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )


class Training(ABC):
    """The model, its optimizer, and an endless series of batches."""

    version: str
    parameters: int

    def __init__(self, load: Workload, backend: str) -> None:
        self.load = load
        self.backend = backend
        self.done = 0
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cpu")

    @abstractmethod
    def train(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step on ``tokens``, [batch, sequence]; returns the loss."""

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def batch(self) -> torch.Tensor:
        """The tokens of this rank and step, the same for every backend.

        Every second token follows from the token before it.
        """
        load = self.load
        random = torch.Generator().manual_seed(self.done << 16 | self.rank)
        tokens = torch.randint(0, load.vocabulary, (load.batch, load.sequence), generator=random)
        tokens[:, 1::2] = (tokens[:, : load.sequence // 2 * 2 : 2] + 1) % load.vocabulary
        return tokens.to(self.device)

    def step(self) -> torch.Tensor:
        loss = self.train(self.batch())
        self.done += 1
        return loss.detach()

    def run(self, steps: int, meter: Meter) -> dict[str, Any]:
        """``steps`` steps, timed from a barrier to the end of this rank's last step."""
        dist.barrier()
        waited = own_wait(self.backend)
        meter.reset()
        cpu = time.process_time()
        start = time.perf_counter()
        losses = [self.step() for _ in range(steps)]
        self.synchronize()
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "in_calls": meter.seconds,
            "own_wait": None if waited is None else (own_wait(self.backend) or 0.0) - waited,
            "cpu": time.process_time() - cpu,
            "bytes": dict(meter.bytes),
            "losses": [float(loss) for loss in losses],
        }


def serve(pipes: Path, training: Training, meter: Meter) -> None:
    import transformers

    version = f"torch {torch.__version__}, {training.version}"
    version += f"transformers {transformers.__version__}"

    def run(_: str, words: list[str], idle: float) -> dict[str, Any]:
        return {**training.run(int(words[0]), meter), "idle_cpu": idle}

    hello = {"version": version, "parameters": training.parameters}
    rank_commands.serve(pipes, training.rank, hello, run)
