"""What only several GPUs show: peer access, NCCL at its best, the demo by DeepSpeed."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu_check.machine import ROOT
from gpu_check.step import Run

GIB = 1 << 30
SIZES = (1 << 20, 16 << 20, 256 << 20, GIB)  # bytes of the whole tensor
ZERO_SM_POLICY = 2  # NCCL_CTA_POLICY_ZERO, of NCCL 2.28 and newer
DEMO_STEPS = 60


def matrix(run: Run) -> None:
    """Peer access and the bandwidth of one copy, for each ordered pair of GPUs."""
    count = run.gpus
    tensors = [torch.ones(128 << 20, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)]
    rows = []
    for source in range(count):
        row = []
        for target in range(count):
            access = source == target or torch.cuda.can_device_access_peer(target, source)
            rate = copy_rate(tensors[source], torch.empty_like(tensors[target]))
            row.append(f"{rate:.0f}{'' if access else ' (no peer access)'}")
        rows.append(row)
        run.note(f"GB/s from GPU {source} to each", row)
    without = sum("no peer" in cell for row in rows for cell in row)
    run.note("pairs without peer access", without)


def copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """GB/s of a copy, the median of five."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        times.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(times[1:]) / 1e9


def nccl_best(run: Run) -> None:
    """NCCL's AllGather as a user gets it, with registered buffers, and then without SMs."""
    for way in ("default", "registered", "registered, zero SM"):
        with tempfile.TemporaryDirectory() as directory:
            answer = Path(directory) / "answer.json"
            arguments = (run.gpus, str(Path(directory) / "store"), way, str(answer))
            try:
                mp.start_processes(nccl_rank, arguments, nprocs=run.gpus, start_method="spawn")
                run.note(f"NCCL, {way}: busbw in GB/s", json.loads(answer.read_text()))
            except Exception as error:  # this NCCL or this machine may not have the way
                run.note(f"NCCL, {way}", f"failed: {str(error).strip().splitlines()[-1][:200]}")


def nccl_rank(rank: int, ranks: int, rendezvous: str, way: str, answer: str) -> None:
    """One rank: times AllGathers of each size, and writes the rates on rank 0."""
    torch.cuda.set_device(rank)
    options = dist.ProcessGroupNCCL.Options()
    if "zero SM" in way:
        options.config.cta_policy = ZERO_SM_POLICY
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        pg_options=options,
        device_id=torch.device("cuda", rank),
    )
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda", rank))  # type: ignore[union-attr]
    pool = torch.cuda.MemPool(backend.mem_allocator) if way != "default" else None
    found = {}
    for size in SIZES:
        if pool is None:
            whole, part = buffers(size, ranks)
        else:
            with torch.cuda.use_mem_pool(pool):
                whole, part = buffers(size, ranks)
            backend.register_mem_pool(pool)
        part.fill_(rank + 1)
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            dist.all_gather_into_tensor(whole, part)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        assert whole.view(ranks, -1)[:, -1].tolist() == list(range(1, ranks + 1))
        if pool is not None:
            backend.deregister_mem_pool(pool)
        found[size] = round(size * (ranks - 1) / ranks / statistics.median(times[2:]) / 1e9, 1)
        del whole, part
    if rank == 0:
        Path(answer).write_text(json.dumps(found))
    dist.destroy_process_group()


def buffers(size: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole tensor and one rank's part, in bf16."""
    numel = size // 2 // ranks
    whole = torch.empty(numel * ranks, dtype=torch.bfloat16, device="cuda")
    return whole, torch.empty(numel, dtype=torch.bfloat16, device="cuda")


def demo(run: Run) -> None:
    """``deepspeed --num_gpus N`` on the GPT-NeoX demo, over both: losses and step times."""
    shape = ["--layers", "12", "--hidden", "1024", "--seq-len", "512", "--batch", "4"]
    found = {}
    for name in ("smddp", "nccl"):
        found[name] = run_demo(run, name, shape, run.gpus)
        run.note(f"{name}: median milliseconds of a step", found[name]["milliseconds"])
        run.note(f"{name}: losses", found[name]["losses"][:: DEMO_STEPS // 6])
    pairs = list(zip(found["smddp"]["losses"], found["nccl"]["losses"], strict=True))
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    run.goal("losses equal within 2%, as bf16 rounds", worst <= 0.02, f"{worst:.2%}")
    ratio = found["smddp"]["milliseconds"] / found["nccl"]["milliseconds"]
    run.goal("a step takes at most as long as over NCCL", ratio <= 1.0, f"{ratio:.3f} of it")


def run_demo(run: Run, backend: str, shape: list[str], ranks: int) -> dict[str, Any]:
    """Trains the demo; its losses, and the median time of a step after the first ten."""
    folder = run.folder / run.step.name / backend
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    config |= {"comm_backend": backend, "smddp": {"fallback": "warn", "timeout_seconds": 120}}
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"):
        config["zero_optimization"].pop(key, None)
    if backend != "smddp":
        del config["smddp"]
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config, indent=1))
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(ranks)]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += [str(ROOT / "examples" / "train.py"), "--deepspeed_config", str(path)]
    command += ["--steps", str(DEMO_STEPS), "--save-every", "0", "--no-progress"]
    command += ["--evaluate-every", str(DEMO_STEPS), "--output", str(folder), *shape]
    environment = {**os.environ, "SMDDP_LEDGER_TABLE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    with (folder / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["tokens_per_second"]) for row in rows[10:]]
    tokens = ranks * int(shape[shape.index("--batch") + 1])
    tokens *= int(shape[shape.index("--seq-len") + 1])
    return {
        "losses": [float(row["loss"]) for row in rows],
        "milliseconds": round(tokens / statistics.median(rates) * 1e3, 2),
    }
