"""Train a small GPT-2 on bytes with ZeRO-3; groups of ranks share one copy of its state (MiCS).

DS_ACCELERATOR=cpu deepspeed --num_gpus 4 examples/gpt2_sharded.py --sharded-degree 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import byte_text
import deepspeed
import loss_bar
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="file or directory; default: Python's library")
    parser.add_argument(
        "--sharded-degree", type=int, default=0, help="ranks that share one copy; 0: all"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and micro-batch")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--save", type=Path, help="directory for a checkpoint of the last step")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()

    text = byte_text.load(args.data, 12_000_000, args.seq_len + 1)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=args.seq_len,
            n_embd=args.hidden,
            n_layer=args.layers,
            n_head=args.hidden // 64,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    config = {
        "comm_backend": "smddp",
        "smddp": {"sharded_data_parallel_degree": args.sharded_degree},
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 1_000_000_000,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with loss_bar.shown(args.steps, rank == 0) as advance:
        for step in range(args.steps):
            mean = torch.zeros((), device=engine.device)
            for micro in range(args.accumulate):
                windows = byte_text.training_batch(
                    text,
                    seed=1,
                    step=step,
                    count=args.batch,
                    first=(micro * ranks + rank) * args.batch,
                    window=args.seq_len + 1,
                    total=args.batch * ranks * args.accumulate,
                ).to(engine.device)
                logits = engine(input_ids=windows[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), windows[:, 1:].flatten()
                )
                engine.backward(loss)
                engine.step()
                mean += loss.detach() / args.accumulate
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            advance(mean.item())

    if args.save:
        engine.save_checkpoint(str(args.save))
    if rank == 0:
        print(f"loss after {args.steps} steps: {mean.item():.3f} nats per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
