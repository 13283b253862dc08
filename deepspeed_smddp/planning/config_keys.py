"""Keys of a DeepSpeed config: which the planner counts, and which it names as not considered.

A test compares the three tables with the schema of the installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Read by ``training_job.of_config``.
MODELLED = frozenset(
    [
        "comm_backend",
        "smddp",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "sequence_parallel_size",
        "pipe_parallel_size",
        "data_types.grad_accum_dtype",
        "optimizer.type",
        "bf16.enabled",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "bfloat16.enabled",
        "bfloat16.bf16_master_weights_and_grads",
        "bfloat16.bf16_optimizer_states",
        "fp16.enabled",
        "fp16.fp16_master_weights_and_grads",
        "optimizer.params.momentum",
        "tensor_parallel.autotp_size",
        "expert_parallel.autoep_size",
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.cpu_checkpointing",
        "zero_optimization.stage",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.sub_group_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.mics_shard_size",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.ratio",
    ]
)

# Without effect on the memory of a GPU or of a host and on the time of a step that could be told
# from nothing: messages, checkpoints, checks, numerics, the order of samples. A key also stands for
# all below it.
WITHOUT_EFFECT = frozenset(
    [
        "checkpoint",
        "csv_monitor",
        "tensorboard",
        "wandb",
        "comet",
        "comms_logger",
        "datastates_ckpt",
        "nebula",
        "scheduler",
        "dataloader_drop_last",
        "disable_python_gc",
        "dump_state",
        "log_level",
        "steps_per_print",
        "timers",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "prescale_gradients",
        "managed_gradient_accumulation",
        "elasticity",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "zero_allow_untested_optimizer",
        "optimizer.params",
        "optimizer.legacy_fusion",
        "bf16.check_grad_overflow",
        "bf16.immediate_grad_update",
        "bfloat16.check_grad_overflow",
        "bfloat16.immediate_grad_update",
        "fp16.auto_cast",
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
        "fp16.hysteresis",
        "fp16.consecutive_hysteresis",
        "fp16.min_loss_scale",
        "data_types.buffer_dtype",
        "data_types.keep_in_fp32_modules",
        "activation_checkpointing.number_checkpoints",
        "activation_checkpointing.profile",
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "zero_optimization.reduce_scatter",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.compute_grad_norm",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.ignore_unused_parameters",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.pipeline_loading_checkpoint",
        "zero_optimization.override_module_apply",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.cpu_offload_use_pin_memory",
        "zero_optimization.legacy_stage1",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_optimizer.fast_init",
    ]
)

# Named to the user where a config has them.
NOT_CONSIDERED = frozenset(
    [
        "amp",
        "autotuning",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "compile",
        "compression_training",
        "curriculum_learning",
        "data_efficiency",
        "data_types.param_dtype",
        "disable_allgather",
        "eigenvalue",
        "expert_parallel",
        "flops_profiler",
        "graph_harvesting",
        "hybrid_engine",
        "memory_breakdown",
        "pipeline",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
        "tensor_parallel",
        "torch_autocast",
        "wall_clock_breakdown",
        "weight_quantization",
        "zero_force_ds_cpu_optimizer",
        "aio",
        "activation_checkpointing.contiguous_memory_optimization",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.parameter_alignment",
        "zero_optimization.zero_quantized_nontrainable_weights",
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        "zero_optimization.leaf_module",
        "zero_optimization.zenflow",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.pipeline_write",
        "zero_optimization.offload_optimizer.super_offload",
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    ]
)


def not_considered(config: Mapping[str, Any]) -> list[str]:
    """Keys of ``config`` that may change memory or time and that the planner does not count.

    A section that is off counts as absent. A key that no table has is named as well.
    """
    return [key for key in _leaves(config) if not (_in(MODELLED, key) or _in(WITHOUT_EFFECT, key))]


def _in(table: frozenset[str], key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:n]) in table for n in range(1, len(parts) + 1))


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Dotted keys of all that is on."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if value.get("enabled") is not False:
                yield from _leaves(value, f"{above}{name}.")
        elif value is not False and value is not None and value != "auto":
            yield f"{above}{name}"
