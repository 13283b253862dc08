"""A DeepSpeed config for a planned job."""

from __future__ import annotations

from typing import Any

from deepspeed_smddp.planning.training_job import Job


def ds_config(job: Job) -> dict[str, Any]:
    """The config, ready to save as JSON; optimizer and learning rate are the user's to set."""
    scheme = job.scheme
    config: dict[str, Any] = {}
    if job.software.library == "smddp":
        config["comm_backend"] = "smddp"
        section: dict[str, Any] = {
            "allgather_bucket_size": "auto",
            "reduce_scatter_bucket_size": "auto",
        }
        if scheme.degree:
            section["sharded_data_parallel_degree"] = scheme.degree
        config["smddp"] = section
    config |= {
        "train_batch_size": job.micro_batch * job.accumulation * job.data_parallel,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        ("fp16" if job.software.precision == "fp16" else "bf16"): {"enabled": True},
    }
    if scheme.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": scheme.tensor}
    zero: dict[str, Any] = {
        "stage": scheme.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": job.buckets.reduce,
    }
    if scheme.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": job.buckets.prefetch,
            "stage3_param_persistence_threshold": job.buckets.persistence,
            "stage3_max_live_parameters": job.buckets.max_live,
        }
        if scheme.degree and job.software.library != "smddp":
            zero["mics_shard_size"] = scheme.degree
    if scheme.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config["zero_optimization"] = zero
    return config
