"""Train a small GPT-NeoX on bytes with DeepSpeed ZeRO-3.

    deepspeed --num_gpus 2 examples/train.py --deepspeed_config ds_configs/quickstart.json

This file names no communication backend: the line "comm_backend" of the JSON chooses it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import byte_text
import deepspeed
import hjson
import report
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.utils import logging as transformers_logging

VOCABULARY = 256
HEAD_DIMENSION = 64
FINAL_STEPS = 20  # the reported final loss is the mean over these last steps
HELD_OUT_BATCHES = 4  # per rank and evaluation
WARM_UP = 20  # steps
INTERRUPTED = 130  # the exit status that shells use for Ctrl-C


class UsageError(ValueError):
    """A mistake in the arguments or files; the message is one sentence for the user."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="file or directory; default: Python's library")
    parser.add_argument("--data-limit", type=int, default=12_000_000, help="bytes to read at most")
    parser.add_argument(
        "--steps",
        type=int,
        default=120,
        help="of the whole run; with --resume a longer run continues a shorter one",
    )
    parser.add_argument("--batch", type=int, help="windows per rank; default: the DeepSpeed config")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per window")
    parser.add_argument("--lr", type=float, help="peak; default: the DeepSpeed config")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument(
        "--evaluate-every", type=int, default=20, help="steps between two held-out losses"
    )
    parser.add_argument("--save-every", type=int, default=100, help="steps; 0: only at the end")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="continue from the last checkpoint if there is one, with any number of ranks",
    )
    parser.add_argument("--no-progress", action="store_true", help="plain lines, no progress bar")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    for name in ("steps", "evaluate_every", "seq_len", "layers", "hidden", "data_limit"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1.")
    if args.hidden % HEAD_DIMENSION:
        raise UsageError(f"--hidden must be a multiple of {HEAD_DIMENSION}, not {args.hidden}.")
    if not args.deepspeed_config:
        raise UsageError("name a DeepSpeed config: --deepspeed_config ds_configs/quickstart.json.")
    if not Path(args.deepspeed_config).is_file():
        raise UsageError(f"--deepspeed_config {args.deepspeed_config} does not exist.")
    return args


def build_model(args: argparse.Namespace) -> GPTNeoXForCausalLM:
    torch.manual_seed(args.seed)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIMENSION,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.seq_len,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    # Without zero.Init: the whole model fits in the memory of a rank, and with it transformers
    # would initialise weights that are already partitioned.
    return GPTNeoXForCausalLM(config)


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then the inverse square root of the step (Vaswani et al., 2017).

    The number of steps of the run is no part of it: a longer run is a shorter one continued.
    """
    return min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))


def has_bf16_instructions() -> bool:
    """Whether products of bf16 matrices take instructions here, or loops."""
    if get_accelerator().device_name() != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(bool(has) and "bf16" in name for name, has in capabilities.items())


def in_fp32(deepspeed_config: str) -> dict[str, Any] | None:
    """The configuration with bf16 off if it is on and this processor computes it in loops."""
    try:
        config = hjson.loads(Path(deepspeed_config).read_text())
        if not config["bf16"]["enabled"] or has_bf16_instructions():
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # DeepSpeed says what is wrong
    return {**config, "bf16": {"enabled": False}}


def check_backend(deepspeed_config: str) -> None:
    """Raises UsageError if the config names a backend and the process group has another.

    DeepSpeed itself ignores "comm_backend": without the package it would use another backend.
    """
    try:
        wanted = hjson.loads(Path(deepspeed_config).read_text()).get("comm_backend")
    except (OSError, ValueError, AttributeError):
        return
    used = torch.distributed.get_backend()
    if wanted is not None and ":" not in wanted and wanted.lower() != used:
        raise UsageError(
            f'{deepspeed_config} says "comm_backend": "{wanted}", but the process group uses '
            f"{used}; is deepspeed-smddp installed in {sys.prefix}?"
        )


@dataclass
class Statistics:
    """Counters of the smddp backend in this process; none under another backend."""

    available: bool

    @staticmethod
    def of_the_default_group() -> Statistics:
        return Statistics(torch.distributed.get_backend() == "smddp")

    def rows(self) -> list[dict[str, Any]]:
        if not self.available:
            return []
        import deepspeed_smddp

        return deepspeed_smddp.statistics()

    def waited(self) -> float:
        return sum(row["wait_seconds"] for row in self.rows())


class Display:
    """A progress bar on a terminal, else about 20 lines per run; rank 0 only."""

    def __init__(self, console: Console, first: int, steps: int, bar: bool) -> None:
        self.console, self.steps, self.every = console, steps, max(1, steps // 20)
        self.progress: Progress | None = None
        if bar and console.is_terminal:
            self.progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=4,
            )
            self.task = self.progress.add_task("", total=steps, completed=first, text="")
            self.progress.start()

    def update(self, row: report.Row) -> None:
        text = f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
        if row["wait_share"] is not None:
            text += f"  {row['wait_share']:.0%} waiting for communication"
        if self.progress:
            self.progress.update(self.task, completed=row["step"], text=text)
        elif row["step"] % self.every == 0 or row["step"] in (1, self.steps):
            self.console.print(f"step {row['step']:>4}/{self.steps}  {text}", highlight=False)
        if row["held_out"] is not None:
            self.console.print(
                f"step {row['step']:>4}/{self.steps}  held-out loss {row['held_out']:.3f}",
                highlight=False,
            )

    def stop(self) -> None:
        if self.progress:
            self.progress.stop()


class Checkpoints:
    """ZeRO checkpoints under one directory; only the newest is kept."""

    PATTERN = re.compile(r"step\d{6}")

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        self.directory, self.identity = directory, identity

    def save(self, engine: Any, step: int) -> None:
        tag = f"step{step:06d}"
        state = {
            "step": step,
            "identity": self.identity,
            "torch_rng": torch.get_rng_state(),
            "device_rng": get_accelerator().get_rng_state(),
        }
        engine.save_checkpoint(str(self.directory), tag=tag, client_state=state)
        dist.barrier()
        if dist.get_rank() == 0:
            self._remove(except_tag=tag)

    @property
    def exists(self) -> bool:
        return (self.directory / "latest").exists()

    def load(self, engine: Any, any_ranks: bool = False) -> int:
        """Loads the checkpoint and returns the number of completed steps."""
        if not self.exists:
            raise UsageError(f"--resume finds no checkpoint in {self.directory}.")
        _, state = engine.load_checkpoint(str(self.directory))
        if state is None:
            raise UsageError(f"the checkpoint in {self.directory} can't be loaded.")
        for name, now in self.identity.items():
            then = state["identity"].get(name)
            if then != now and not (any_ranks and name == "ranks"):
                raise UsageError(
                    f"the checkpoint was trained with {name} = {then}, this run has {now}; "
                    "resume with the same settings or start anew without --resume."
                )
        torch.set_rng_state(state["torch_rng"])
        get_accelerator().set_rng_state(state["device_rng"])
        return int(state["step"])

    def clear(self) -> None:
        self._remove(except_tag=None)
        (self.directory / "latest").unlink(missing_ok=True)

    def _remove(self, except_tag: str | None) -> None:
        for path in self.directory.glob("step*"):
            if self.PATTERN.fullmatch(path.name) and path.name != except_tag:
                shutil.rmtree(path)


class Interrupt:
    """Turns Ctrl-C (and the launcher's SIGTERM) into a flag that is read between two steps."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True


class Trainer:
    def __init__(self, args: argparse.Namespace, text: byte_text.ByteText, engine: Any) -> None:
        self.args, self.text, self.engine = args, text, engine
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batch = args.batch or engine.train_micro_batch_size_per_gpu()
        self.accumulation = engine.gradient_accumulation_steps()
        self.window = args.seq_len + 1
        self.held_out = byte_text.held_out_batches(
            text, HELD_OUT_BATCHES, self.batch, self.rank, self.world, self.window
        )

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        windows = windows.to(self.engine.device)
        logits = self.engine(input_ids=windows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1)
        )

    def step(self, step: int) -> torch.Tensor:
        total = self.batch * self.world * self.accumulation
        summed = torch.zeros((), device=self.engine.device)
        for micro in range(self.accumulation):
            first = (micro * self.world + self.rank) * self.batch
            windows = byte_text.training_batch(
                self.text, self.args.seed, step, self.batch, first, self.window, total
            )
            loss = self.loss(windows)
            self.engine.backward(loss)
            self.engine.step()
            summed += loss.detach() / self.accumulation
        return summed

    def held_out_loss(self) -> float:
        self.engine.eval()
        with torch.no_grad():
            loss = torch.stack([self.loss(windows) for windows in self.held_out]).mean()
        self.engine.train()
        return self.mean(loss)[0]

    def mean(self, *values: torch.Tensor | float) -> list[float]:
        """Means over all ranks, in one AllReduce."""
        packed = torch.tensor([float(v) for v in values], device=self.engine.device)
        dist.all_reduce(packed)
        return (packed / self.world).tolist()

    def tokens_per_step(self) -> int:
        return self.batch * self.world * self.accumulation * self.args.seq_len


def train(args: argparse.Namespace) -> int:
    text = byte_text.load(args.data, args.data_limit, args.seq_len + 1)
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))

    model = build_model(args)
    parameters = sum(p.numel() for p in model.parameters())

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        if args.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = args.lr
        return torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)

    config_file, config = args.deepspeed_config, in_fp32(args.deepspeed_config)
    if config is not None:
        args.deepspeed_config = None  # DeepSpeed takes one of the two
    engine, *_ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=schedule,
        config=config,
    )
    check_backend(config_file)
    trainer = Trainer(args, text, engine)
    statistics = Statistics.of_the_default_group()
    console = Console(quiet=trainer.rank != 0, soft_wrap=True)

    losses_path = args.output / "losses.csv"
    identity = {
        "seq_len": args.seq_len,
        "batch": trainer.batch,
        "accumulation": trainer.accumulation,
        "ranks": trainer.world,
        "layers": args.layers,
        "hidden": args.hidden,
        "seed": args.seed,
        "data": text.digest,
    }
    checkpoints = Checkpoints(args.output / "checkpoint", identity)
    rows: list[report.Row] = []
    first = 0
    if args.resume or (args.elastic and checkpoints.exists):
        first = checkpoints.load(engine, any_ranks=args.elastic)
        rows = report.read_losses(losses_path, first)
        if first >= args.steps:
            raise UsageError(
                f"the checkpoint has {first} steps already: continue it with more, for instance "
                f"--resume --steps {2 * first}."
            )
    elif trainer.rank == 0:
        checkpoints.clear()
    args.output.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    entropy = text.unigram_entropy()
    console.print(
        f"GPT-NeoX, {parameters / 1e6:.2f} million parameters, {trainer.world} ranks on "
        f"{get_accelerator().device_name()}, ZeRO stage {engine.zero_optimization_stage()}, "
        f"backend {torch.distributed.get_backend()}\n"
        f"{text.source}: {len(text.train):,} bytes to train on, {len(text.held_out):,} held out, "
        f"unigram entropy {entropy:.3f} nats per byte",
        highlight=False,
    )
    if config is not None:
        console.print(
            f"{config_file} says bf16, for which this processor has no instructions: trained in "
            "fp32, which is faster here",
            highlight=False,
        )
    if first:
        console.print(f"resuming after step {first}", highlight=False)

    interrupt = Interrupt()
    display = None
    if trainer.rank == 0:
        display = Display(console, first, args.steps, bar=not args.no_progress)
    saved, stopped = first, False
    started = time.perf_counter()
    for step in range(first, args.steps):
        learning_rate = engine.get_lr()[0]
        waited, begun = statistics.waited(), time.perf_counter()
        # The flag is reduced together with the loss: all ranks stop after the same step.
        loss, stop = trainer.mean(trainer.step(step), float(interrupt.requested))
        seconds = time.perf_counter() - begun
        share = (statistics.waited() - waited) / seconds if statistics.available else None
        done = step + 1
        held_out = None
        if done % args.evaluate_every == 0 or done == args.steps:
            held_out = trainer.held_out_loss()
        row = report.Row(
            step=done,
            loss=loss,
            held_out=held_out,
            learning_rate=learning_rate,
            tokens_per_second=trainer.tokens_per_step() / seconds,
            wait_share=share,
        )
        rows.append(row)
        if display:
            display.update(row)
        stopped = stop > 0 and done < args.steps
        if stopped or done == args.steps or (args.save_every and done % args.save_every == 0):
            checkpoints.save(engine, done)
            saved = done
            if trainer.rank == 0:
                report.write_losses(losses_path, rows)
        if stopped:
            break
    elapsed = time.perf_counter() - started
    if display:
        display.stop()

    if stopped:
        dist.barrier()
        console.print(
            f"interrupted; step {saved} is saved in {checkpoints.directory}. "
            "Run the same command with --resume to continue.",
            highlight=False,
        )
        return INTERRUPTED

    fallback = torch.tensor([report.fallback_bytes(statistics.rows())], device=engine.device)
    dist.all_reduce(fallback)
    if trainer.rank == 0:
        summarise(console, args, rows, entropy, statistics, int(fallback), elapsed)
    dist.barrier()
    return 0


def summarise(
    console: Console,
    args: argparse.Namespace,
    rows: list[report.Row],
    entropy: float,
    statistics: Statistics,
    fallback: int,
    elapsed: float,
) -> None:
    tail = [row["loss"] for row in rows[-FINAL_STEPS:]]
    final = sum(tail) / len(tail)
    held_out = rows[-1]["held_out"]
    backend = torch.distributed.get_backend()
    title = f"GPT-NeoX on bytes, ZeRO-3 over {backend}"
    curve = report.plot(args.output / "loss.png", rows, entropy, title)
    summary = {
        "backend": backend,
        "steps": len(rows),
        "final_loss": final,
        "held_out_loss": held_out,
        "unigram_entropy": entropy,
        "training_seconds": elapsed,
        "sharded_bytes_on_fallback": fallback if statistics.available else None,
        "statistics_of_rank_0": statistics.rows(),
    }
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if statistics.available:
        report.print_table(console, statistics.rows(), rank=0)
        console.print(
            f"AllGather, ReduceScatter and AllReduce by the fallback, all ranks: {fallback} bytes"
        )
    else:
        console.print(f"The backend {backend} keeps no counters, so there is no table.")
    console.print(
        f"final loss {final:.3f} nats per byte (mean of the last {len(tail)} steps), "
        f"held-out loss {held_out:.3f}, unigram entropy {entropy:.3f}\n"
        f"{elapsed:.0f} s of training; losses in {args.output / 'losses.csv'}, "
        f"{curve}",
        highlight=False,
        markup=False,
    )


def main() -> int:
    # torch has renamed its collectives; DeepSpeed still calls the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.utils.logger.setLevel("WARNING")
    transformers_logging.set_verbosity_error()
    try:
        status = train(parse_arguments())
    except (UsageError, byte_text.DataError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"train.py: {error}", file=sys.stderr, flush=True)
        status = 2
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
