"""Train a small recurrent network on bytes with torch's DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import byte_text
import loss_bar
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """Predicts each next byte from those before it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, hidden)
        self.memory = nn.GRU(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, length, 256]."""
        logits: torch.Tensor = self.head(self.memory(self.embed(tokens))[0])
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="file or directory; default: Python's library")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and micro-batch")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes per window")
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()

    dist.init_process_group("smddp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = byte_text.load(args.data, 12_000_000, args.seq_len + 1)
    torch.manual_seed(1)
    # Buckets are reduced during the backward pass; gradients are views of the buckets.
    model = DistributedDataParallel(Network(args.hidden), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with loss_bar.shown(args.steps, rank == 0) as advance:
        for step in range(args.steps):
            optimizer.zero_grad()
            mean = torch.zeros(())
            for micro in range(args.accumulate):
                windows = byte_text.training_batch(
                    text,
                    seed=1,
                    step=step,
                    count=args.batch,
                    first=(micro * ranks + rank) * args.batch,
                    window=args.seq_len + 1,
                    total=args.batch * ranks * args.accumulate,
                )
                # Ranks communicate only after the last micro-batch of a step.
                last = micro == args.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(windows[:, :-1])
                    loss = nn.functional.cross_entropy(
                        logits.flatten(0, 1), windows[:, 1:].flatten()
                    )
                    (loss / args.accumulate).backward()
                mean += loss.detach() / args.accumulate
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            advance(mean.item())

    if rank == 0:
        print(f"loss after {args.steps} steps: {mean.item():.3f} nats per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
