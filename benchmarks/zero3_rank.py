"""One rank that trains a GPT-NeoX with ZeRO-3 in turns; see steps/rank.py.

RANK=0 WORLD_SIZE=2 ... zero3_rank.py BACKEND PIPES WORKLOAD DEEPSPEED_CONFIG

The last two are JSON. With the backend ``fake`` the ranks do not communicate. With
REPLICA_ALL_REDUCE=step in the environment and sharding by degree, gradients are averaged over the
replicas at the step, not bucket by bucket in the backward pass.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps.rank import Meter, Training, neox, serve
from steps.workload import Workload


class ZeroTraining(Training):
    """Training with DeepSpeed."""

    def __init__(self, load: Workload, backend: str, config: dict[str, Any]) -> None:
        import deepspeed

        super().__init__(load, backend)
        deepspeed.utils.logger.setLevel("WARNING")
        self.version = f"DeepSpeed {deepspeed.__version__}, "
        model = neox(load)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.device = self.engine.device
        if os.environ.get("REPLICA_ALL_REDUCE") == "step":
            self.engine.optimizer.averages_early = False

    def train(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(self.engine.gradient_accumulation_steps()):
            loss: torch.Tensor = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
        return loss


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    backend, pipes = sys.argv[1], Path(sys.argv[2])
    load, config = Workload(**json.loads(sys.argv[3])), json.loads(sys.argv[4])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    meter = Meter()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # To DeepSpeed each rank is rank 0, because no rank receives what rank 0 broadcasts.
        ranks = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    training = ZeroTraining(load, backend, config)
    assert dist.get_backend() == backend, f"the group uses {dist.get_backend()}"
    serve(pipes, training, meter)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
