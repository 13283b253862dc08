"""One rank that trains a GPT-NeoX with DDP or FSDP2 in turns; see steps/rank.py.

RANK=0 WORLD_SIZE=2 ... data_parallel_rank.py BACKEND PIPES WORKLOAD OPTIONS

The last two are JSON; steps/data_parallel.py has the options.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps.data_parallel import DDP, Options
from steps.rank import Meter, Training, neox, serve
from steps.workload import Workload
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Trace:
    """When gradients are ready in the backward pass, and the bytes that have crossed by then.

    Communication can overlap with the backward pass only until the last gradient is ready.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        self.reset()

    def reset(self) -> None:
        self.backward = self.exposed = 0.0  # seconds
        self._sizes: list[int] = []
        # Per step: when each bucket was full, when the last gradient was ready, the bytes sent by
        # then, and when the wait ended.
        self._steps: list[dict[str, Any]] = []

    def begin(self) -> None:
        self._seen: list[tuple[float, int]] = []  # the time and the bytes of each gradient
        self._sent = sent_bytes()
        self._start = time.perf_counter()

    def _ready(self, parameter: torch.Tensor) -> None:
        self._seen.append((time.perf_counter(), parameter.nbytes))
        if len(self._seen) == len(self._parameters):
            self._crossed = sent_bytes() - self._sent

    def end(self) -> None:
        last, now = self._seen[-1][0], time.perf_counter()
        sizes = self.bucket_sizes()
        if sizes != self._sizes:  # DDP rebuilds its buckets after the first step
            self.reset()
            self._sizes = sizes
        self.backward += last - self._start
        self.exposed += now - last
        # Buckets fill in the order in which gradients became ready in the first step.
        full: list[float] = []
        filled = 0
        for when, size in self._seen:
            filled += size
            if filled >= sum(sizes[: len(full) + 1]):
                full.append(when)
        self._steps.append({"full": full, "last": last, "crossed": self._crossed, "end": now})

    def bucket_sizes(self) -> list[int]:
        data = self._model._get_ddp_logging_data()
        text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return [int(word) for word in str(text).split(",")]

    def answer(self) -> dict[str, Any]:
        """Means in seconds, and the steps themselves for hiding.py."""
        return {
            "backward": self.backward / len(self._steps),
            "exposed": self.exposed / len(self._steps),
            "sizes": self._sizes,
            "steps": self._steps,
        }


def sent_bytes() -> int:
    """Bytes sent by all network interfaces of this host except loopback."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        total += 0 if name.strip() == "lo" else int(numbers.split()[8])
    return total


class DataParallelTraining(Training):
    """Training with torch's DDP or FSDP2."""

    version = ""

    def __init__(self, load: Workload, backend: str, options: Options) -> None:
        super().__init__(load, backend)
        self.trace: Trace | None = None
        model = neox(load).to(getattr(torch, options.dtype))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.reduced = sum(p.nbytes for p in model.parameters()) if options.scheme == DDP else 0
        self.model = self.replicated(model, options) if self.reduced else self.sharded(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def replicated(self, model: nn.Module, options: Options) -> nn.Module:
        """DDP in one type."""
        # None is not the same as 25: with None the first bucket has 1 MiB.
        replica = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=options.bucket_mb
        )
        if self.backend == "fake":  # its works have no results, which DDP reads
            replica.register_comm_hook(None, at_once)
        self.trace = Trace(replica)
        return replica

    def sharded(self, model: nn.Module) -> nn.Module:
        """FSDP2: gathered in bf16, reduced and stepped in fp32."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.gpt_neox.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if self.backend == "smddp":
            from deepspeed_smddp import fsdp

            fsdp.enable(model)
        return model

    def train(self, tokens: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        if self.trace:
            self.trace.begin()
        loss.backward()
        if self.trace:
            self.trace.end()
        self.optimizer.step()
        return loss

    def run(self, steps: int, meter: Meter) -> dict[str, Any]:
        if self.trace:
            self.trace.reset()
        answer = super().run(steps, meter)
        if self.trace:  # DDP calls collectives in C++, where the meter does not see them
            answer["bytes"]["reduced"] = steps * self.reduced
            answer["trace"] = trace = self.trace.answer()
            if self.backend != "fake":
                answer["in_calls"] = steps * trace["exposed"]
        return answer


def at_once(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """A communication hook for DDP that sends nothing. It has no annotations: torch reads them."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    backend, pipes = sys.argv[1], Path(sys.argv[2])
    load, options = Workload(**json.loads(sys.argv[3])), Options(**json.loads(sys.argv[4]))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    meter = Meter()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    else:
        dist.init_process_group(backend)
    serve(pipes, DataParallelTraining(load, backend, options), meter)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
