"""One rank that trains a GPT-NeoX with ZeRO-3 in turns; the protocol is that of turns.h.

RANK=0 WORLD_SIZE=2 ... zero3_rank.py BACKEND PIPES WORKLOAD DEEPSPEED_CONFIG

The last two are JSON. Commands: ``run STEPS``, ``quit``. The backend ``fake`` is torch's: every
rank is alone, AllGather copies its shard into every part, other collectives send nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from zero3.workload import Workload

# What a training thread calls to communicate, as methods of torch's ProcessGroup, by old and
# new names: what is counted, and which argument has the bytes.
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

    Wraps the methods of torch's ProcessGroup and ``Work.wait``, below whatever calls them, in the
    same way for every backend.
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
    """Seconds that callers stood in ``wait()`` by smddp's own counters."""
    if backend != "smddp":
        return None
    import deepspeed_smddp

    return sum(row["wait_seconds"] for row in deepspeed_smddp.statistics())


class Training:
    """The model, its optimizer, and an endless row of batches."""

    def __init__(self, load: Workload, config: dict[str, Any]) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        deepspeed.utils.logger.setLevel("WARNING")
        self.accelerator = get_accelerator()
        self.load = load
        self.done = 0
        torch.manual_seed(1)
        model = GPTNeoXForCausalLM(
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
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.rank = int(os.environ["RANK"])

    def batch(self) -> torch.Tensor:
        """Of the rank and the step, the same under every backend: every second token follows from
        the one before it."""
        load = self.load
        random = torch.Generator().manual_seed(self.done << 16 | self.rank)
        tokens = torch.randint(0, load.vocabulary, (load.batch, load.sequence), generator=random)
        tokens[:, 1::2] = (tokens[:, : load.sequence // 2 * 2 : 2] + 1) % load.vocabulary
        return tokens.to(self.engine.device)

    def step(self) -> torch.Tensor:
        tokens = self.batch()
        loss: torch.Tensor = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        self.done += 1
        return loss.detach()

    def run(self, steps: int, meter: Meter, backend: str) -> dict[str, Any]:
        """``steps`` steps from a barrier on, until this rank has done its last."""
        dist.barrier()
        waited = own_wait(backend)
        meter.reset()
        cpu = time.process_time()
        start = time.perf_counter()
        losses = [self.step() for _ in range(steps)]
        self.accelerator.synchronize()
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "in_calls": meter.seconds,
            "own_wait": None if waited is None else (own_wait(backend) or 0.0) - waited,
            "cpu": time.process_time() - cpu,
            "bytes": dict(meter.bytes),
            "losses": [float(loss) for loss in losses],
        }


def serve(pipes: Path, backend: str, training: Training, meter: Meter) -> None:
    rank = training.rank
    with (
        (pipes / f"{rank}.commands").open() as commands,
        (pipes / f"{rank}.answers").open("w") as answers,
    ):

        def answer(**values: Any) -> None:
            print(json.dumps(values), file=answers, flush=True)

        import deepspeed
        import transformers

        version = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, "
        version += f"transformers {transformers.__version__}"
        answer(version=version, parameters=training.parameters)
        waiting_since = time.process_time()
        while line := commands.readline():
            idle = time.process_time() - waiting_since
            verb, *words = line.split()
            if verb == "quit":
                break
            answer(**training.run(int(words[0]), meter, backend), idle_cpu=idle)
            waiting_since = time.process_time()


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    backend, pipes = sys.argv[1], Path(sys.argv[2])
    load, config = Workload(**json.loads(sys.argv[3])), json.loads(sys.argv[4])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    meter = Meter()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # Each is rank 0 to DeepSpeed, as the others never hear what rank 0 broadcasts.
        ranks = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    training = Training(load, config)
    assert dist.get_backend() == backend, f"the group uses {dist.get_backend()}"
    serve(pipes, backend, training, meter)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
