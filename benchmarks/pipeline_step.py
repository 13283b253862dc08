"""A step of torch's 1F1B, one stage per rank, over smddp and over Gloo, in turns: A B A B.

Both are groups of the same processes, with the same stages and data, and their losses have to be
equal. Inside this host, and between emulated hosts (needs root):

    torchrun --nproc-per-node 2 benchmarks/pipeline_step.py
    python -m tests.testbed run --hosts 2 --rate 1gbit python benchmarks/pipeline_step.py
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as pp

BACKENDS = ("smddp", "gloo")


class Pipeline:
    """This rank's stage over one backend."""

    def __init__(self, backend: str, args: argparse.Namespace) -> None:
        self.group = dist.new_group(backend=backend)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1 + self.rank)
        layers = [
            nn.TransformerEncoderLayer(
                args.hidden, args.hidden // 64, 4 * args.hidden, dropout=0.0, batch_first=True
            )
            for _ in range(args.layers)
        ]
        self.module = nn.Sequential(*layers)
        stage = pp.PipelineStage(
            self.module, self.rank, self.ranks, torch.device("cpu"), group=self.group
        )
        self.schedule = pp.Schedule1F1B(
            stage, n_microbatches=args.microbatches, loss_fn=nn.functional.mse_loss
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        torch.manual_seed(0)
        self.x, self.y = torch.randn(2, args.microbatches * args.batch, args.sequence, args.hidden)

    def step(self) -> float:
        """The loss; 0 on a rank that has not the last stage."""
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(self.x)
        elif self.rank == self.ranks - 1:
            self.schedule.step(target=self.y, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    def turn(self, steps: int) -> tuple[float, list[float]]:
        """Milliseconds of a step of the slowest rank, and the losses."""
        dist.barrier()
        began = time.perf_counter()
        losses = [self.step() for _ in range(steps)]
        took = torch.tensor([(time.perf_counter() - began) / steps * 1e3])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item(), losses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hidden", type=int, default=256, help="default: 256")
    add("--layers", type=int, default=1, help="of each stage; default: 1")
    add("--sequence", type=int, default=128, help="tokens; default: 128")
    add("--batch", type=int, default=1, help="sequences of a micro-batch; default: 1")
    add("--microbatches", type=int, default=8, help="default: 8")
    add("--turns", type=int, default=5, help="of each backend; default: 5")
    add("--steps", type=int, default=10, help="of each turn; default: 10")
    add("--csv", type=Path, help="file for all figures, one row per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipelines = {backend: Pipeline(backend, args) for backend in BACKENDS}
    rows: list[tuple[str, int, float]] = []
    # The first turn also makes the connections.
    for turn in range(args.turns + 1):
        turns = {backend: pipeline.turn(args.steps) for backend, pipeline in pipelines.items()}
        if turns["smddp"][1] != turns["gloo"][1]:
            print(f"the losses differ: {turns}", file=sys.stderr)
            return 1
        rows += [(backend, turn, took) for backend, (took, _) in turns.items() if turn > 0]
    if dist.get_rank() == 0:
        median = {b: statistics.median(t for name, _, t in rows if name == b) for b in BACKENDS}
        message = args.batch * args.sequence * args.hidden * 4
        print(
            f"1F1B, {dist.get_world_size()} stages, {args.microbatches} micro-batches, messages of "
            f"{message:,} bytes: smddp {median['smddp']:.1f} ms, Gloo {median['gloo']:.1f} ms, "
            f"{median['smddp'] / median['gloo']:.2f}"
        )
        if args.csv:
            with args.csv.open("w", newline="") as file:
                csv.writer(file).writerows([("backend", "turn", "ms"), *rows])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
