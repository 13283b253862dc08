"""Trains a tiny model with DeepSpeed's logs switched on; returns what they and smddp counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness import zero


def comms_log(job: dict[str, Any]) -> dict[str, Any]:
    """The bytes and counts of DeepSpeed's log and of smddp's counters, over the same steps."""
    import deepspeed

    import deepspeed_smddp
    from deepspeed_smddp.upstream import source

    if not job["known"]:
        source.READ["comms log"]["deepspeed.comm.comm:timed_op"] = {}
    log = {"enabled": True, "verbose": False, "prof_all": not job["ops"], "debug": job["debug"]}
    config = zero.config("smddp", {"stage": 3}, comms_logger={**log, "prof_ops": job["ops"]})
    with zero.engine_of(zero.blocks(), config) as engine:
        zero.forward_and_step(engine, dist.get_rank())
        deepspeed_smddp.reset_statistics()
        deepspeed.comm.reset_log()
        losses = [zero.forward_and_step(engine, dist.get_rank()) for _ in range(3)]
        rows = [dict(row) for row in deepspeed_smddp.statistics()]
        summary = deepspeed.comm.log_summary(show_straggler=True, return_dict=True)["summary"]
    deepspeed.comm.configure(enabled=False)
    dist.destroy_process_group()
    entries = {
        name: (
            sum(size * entry["count"] for size, entry in sizes.items()),
            sum(entry["count"] for entry in sizes.values()),
            min(entry["total_latency_ms"] for entry in sizes.values()),
        )
        for name, sizes in summary.items()
    }
    return {"log": entries, "statistics": rows, "losses": losses}


def monitored(job: dict[str, Any]) -> dict[str, Any]:
    """Trains with DeepSpeed's CSV monitor; returns the steps after which it had events."""
    import deepspeed

    import deepspeed_smddp

    config = zero.config(
        "smddp",
        {"stage": 3},
        csv_monitor={"enabled": True, "output_path": job["folder"], "job_name": "run"},
        gradient_accumulation_steps=2,
        smddp={"ledger": {"monitor": job["wanted"]}},
    )
    config["steps_per_print"] = 2
    random = torch.Generator().manual_seed(1)
    with zero.engine_of(zero.blocks(), config) as engine:
        for _ in range(2 * 5):
            x = torch.randn(8, zero.WIDTH, generator=random)
            engine.backward(engine(x).square().mean())
            engine.step()
        rows = [dict(row) for row in deepspeed_smddp.statistics()]
    deepspeed.comm.barrier()
    dist.destroy_process_group()
    return {"statistics": rows}
