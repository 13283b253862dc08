"""Train a small Llama on bytes with FSDP2, sharded over all ranks or within groups of ranks.

torchrun --nproc-per-node 4 examples/llama_fsdp2.py --hybrid-shard-degree 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import byte_text
import loss_bar
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_smddp
from deepspeed_smddp import fsdp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="file or directory; default: Python's library")
    parser.add_argument(
        "--hybrid-shard-degree", type=int, default=0, help="ranks that share one copy; 0: all"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--save", type=Path, help="directory for a checkpoint of the last step")
    args = parser.parse_args()

    dist.init_process_group("smddp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = byte_text.load(args.data, 12_000_000, args.seq_len + 1)
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            max_position_embeddings=args.seq_len,
            use_cache=False,
        )
    )

    # Parameters are gathered in bf16; gradients are reduced and applied in fp32.
    options = {
        "mesh": fsdp.mesh(args.hybrid_shard_degree),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    fsdp.enable(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with loss_bar.shown(args.steps, rank == 0) as advance:
        for step in range(args.steps):
            windows = byte_text.training_batch(
                text, 1, step, args.batch, rank * args.batch, args.seq_len + 1, args.batch * ranks
            )
            logits = model(input_ids=windows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), windows[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            advance(mean.item())

    if args.save:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint.save(
            {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.save
        )
    if rank == 0:
        gathers = [r for r in deepspeed_smddp.statistics() if r["collective"] == "all_gather"]
        print(
            f"loss after {args.steps} steps: {mean.item():.3f} nats per byte; rank 0 gathered "
            f"{sum(r['bytes'] for r in gathers) / 1e6:.1f} MB"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
