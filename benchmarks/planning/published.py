"""The published rows as jobs of the planner, or the reason why a row is not covered."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepspeed_smddp.planning import PlanError
from deepspeed_smddp.planning.hardware import CLUSTERS, GPUS, Cluster
from deepspeed_smddp.planning.memory_use import memory_use
from deepspeed_smddp.planning.model_shape import ModelShape
from deepspeed_smddp.planning.training_job import Job, Scheme, Software

CSV = Path(__file__).with_name("published_training_speeds.csv")
# Of a host where the source states no network; else eight NICs of 400 Gbit/s as in a DGX H100.
ASSUMED_GBIT = {"Kempner": 1600, "TinyLlama": 400}
# How sources begin -> the publisher.
PUBLISHERS = {
    "SMDDP": "Amazon",
    "sharded data parallelism": "Amazon",
    "LLM Foundry": "MosaicML",
    "torchtitan": "torchtitan",
    "Megatron": "NVIDIA",
    "Korthikanti": "NVIDIA",
    "DeepSpeed on Azure": "Microsoft",
    "ZeRO-3 Offload": "Microsoft",
    "InternEvo": "InternEvo",
    "vTrain": "vTrain",
    "Colossal-AI": "Colossal-AI",
    "stas00": "stas00",
    "IBM": "IBM",
    "KempnerForge": "Kempner",
    "TinyLlama": "TinyLlama",
    "chenyaofo": "chenyaofo",
}
_DEFAULT_VOCABULARY = 51200  # GPT-2's, padded, where the source has none


class NotCovered(Exception):
    """Why the planner has no scheme for a row."""


@dataclass(frozen=True)
class Row:
    """One published figure. ``number`` counts the file's rows from 0."""

    number: int
    source: str
    model: str
    scheme: str
    metric: str
    value: float
    columns: dict[str, str]

    @property
    def publisher(self) -> str:
        """Whose figure it is: those of one publisher resemble each other."""
        return next(name for start, name in PUBLISHERS.items() if self.source.startswith(start))


def rows() -> Iterator[Row]:
    """All rows of the file."""
    with CSV.open(encoding="utf-8", newline="") as lines:
        for number, columns in enumerate(csv.DictReader(lines)):
            yield Row(
                number,
                columns["source"],
                columns["model"],
                columns["scheme"],
                columns["metric"],
                float(columns["value"]),
                columns,
            )


def job_of(row: Row) -> Job:
    """The row's job.

    Raises:
        NotCovered: the planner does not know its hardware or scheme, or the row lacks its shape.
    """
    columns = row.columns
    if re.search(r"CP[2-9]", row.scheme):
        raise NotCovered("context parallelism")
    if row.scheme.endswith(", SMDDP") or row.scheme.startswith("MiCS"):
        raise NotCovered("the closed library, which is not this one")
    cluster = _cluster(row)
    shape = _shape(row)
    gpus = _number(columns["gpus"], "the number of GPUs is not stated")
    scheme = _scheme(row)
    software = _software(row)
    try:
        job = Job(
            shape,
            cluster,
            gpus,
            scheme,
            software,
            recomputation=_recomputation(row),
            lora_rank=16 if "LoRA" in row.scheme else 0,
        )
    except PlanError as error:
        raise NotCovered(str(error)) from None
    return _with_batch(row, job)


def _number(text: str, otherwise: str) -> int:
    if not text:
        raise NotCovered(otherwise)
    return int(float(text))


def _cluster(row: Row) -> Cluster:
    gpu = row.columns["gpu_type"]
    if gpu.startswith("DGX-GB200"):
        raise NotCovered("GB200 is not in the list of GPUs")
    if gpu.startswith("V100"):
        raise NotCovered("the network of the V100 hosts is not stated")
    if "p4d" in gpu:
        return CLUSTERS["p4d"]
    if gpu.startswith("A100-40"):
        name = "a100-40"
    elif gpu.startswith("A800"):
        name = "a800"
    elif gpu.startswith("A100"):
        name = "a100-80"
    elif "500W" in gpu:
        name = "h100-500w"
    else:
        name = "h200" if gpu.startswith("H200") else "h100"
    stated = row.columns["network_gbps_per_node"]
    per_host = int(row.columns["gpus_per_node"] or 8)
    network = float(stated or ASSUMED_GBIT.get(row.publisher, 3200))
    return Cluster(name=name, gpu=GPUS[name], gpus_per_host=per_host, network_gbit=network)


def _shape(row: Row) -> ModelShape:
    c = row.columns
    if row.model.startswith("GPT-NeoX 65B"):  # the article gives no shape: Llama 65B's, plain
        return ModelShape(
            row.model, 80, 8192, 64, 64, 4 * 8192, 50432, 2048, gated=False, bias="all", norm=2
        )
    layers = _number(c["layers"], "the shape of the model is not stated")
    hidden = _number(c["hidden"], "the shape of the model is not stated")
    ffn = _number(c["ffn"], "the shape of the model is not stated")
    heads = int(c["heads"] or hidden // 128)
    vocabulary = int(c["vocab"] or _DEFAULT_VOCABULARY)
    gated = ffn % hidden != 0 or "Llama" in row.model
    plain = {"gated": False, "bias": "none" if "MPT" in row.model else "all", "tied": True}
    sequence = _number(c["seq"], "the length of the sequences is not stated")
    return ModelShape(
        row.model,
        layers,
        hidden,
        heads,
        int(c["kv_heads"] or heads),
        ffn,
        vocabulary,
        sequence,
        **({} if gated else plain),
    )


def _scheme(row: Row) -> Scheme:
    """Which rank holds what; ``NotCovered`` for a scheme that the planner does not have."""
    text = row.scheme
    if text == "HSDP 8":
        return Scheme(stage=3, degree=8)
    if "SHARD_GRAD_OP" in text:
        return Scheme(stage=3, keep_gathered=True)
    if text.startswith("FSDP2"):
        return _torchtitan(text)
    if text.startswith("FSDP") or text in ("ZeRO-3",):
        return Scheme(stage=3)
    if "TP8" in text and text.startswith("ZeRO-3"):
        return Scheme(stage=3, tensor=8, partition_activations=True)
    if "offload" in text:
        return Scheme(stage=int(text[5]), offload=True, offload_activations="activation" in text)
    if text == "ZeRO-2":
        return Scheme(stage=2)
    if text.startswith("ZeRO-3 (DeepSpeed"):
        return Scheme(stage=3)
    if text.startswith("ZeRO-1"):
        tensor = 2 if "TP2" in text else 1
        within = re.search(r"within (\d+)", text)
        return Scheme(stage=1, degree=int(within[1]) if within else 0, tensor=tensor)
    if text.startswith("PTD-P"):
        parallel = int(text.rsplit(" ", 1)[1])
        tensor = min(8, parallel)
        return Scheme(stage=0, tensor=tensor, pipeline=parallel // tensor)
    found = re.match(r"TP(\d+) x PP(\d+)", text)
    if found:
        split = "distributed optimizer" in text
        korthikanti = row.source.startswith("Korthikanti")
        virtual = re.search(r"VP(\d+)", text)
        sequence = "sequence parallel" in row.columns["activation_checkpointing"] or split
        return Scheme(
            stage=1 if split else 0,
            tensor=int(found[1]),
            pipeline=int(found[2]),
            # Korthikanti's Table 3: three chunks per stage, for the largest one.
            chunks=3
            if korthikanti and found[2] in ("8", "35")
            else int(virtual[1] if virtual else 1),
            sequence_parallel=sequence,
            async_tensor=split,  # "overlapped": its tensor-parallel communication as well
        )
    found = re.match(r"Megatron-DeepSpeed TP(\d+) x DP", text)
    if found:
        return Scheme(stage=0, tensor=int(found[1]))
    if text == "Megatron-FSDP 8":
        return Scheme(stage=3)
    raise NotCovered(f"no scheme of the planner is {text}")


def _torchtitan(text: str) -> Scheme:
    tensor = re.search(r"TP(\d+)", text)
    pipeline = re.search(r"PP(\d+)", text)
    parallel = int(tensor[1]) if tensor else 1
    stages = int(pipeline[1]) if pipeline else 1
    return Scheme(
        stage=3,
        tensor=parallel,
        pipeline=stages,
        chunks=2 if "interleaved" in text else 1,
        sequence_parallel=parallel > 1,
        async_tensor="Async" in text,
        keep_gathered=stages > 1,
    )


def _software(row: Row) -> Software:
    text, source = row.columns["precision"], row.source
    precision = "fp8" if re.search("fp8|float8|FP8", text) else "bf16"
    megatron = source.startswith(("Megatron", "Korthikanti", "vTrain"))
    fused = (
        "compile" in row.scheme
        or "fused" in row.scheme
        or megatron
        or source.startswith("InternEvo")
    )
    old = source.startswith(("Megatron-LM README 2021", "Korthikanti", "vTrain"))
    unfused = old or "Azure" in source or "MiCS" in source
    framework = "fsdp2" if row.scheme.startswith("FSDP2") else "fsdp"
    if megatron:
        framework = "megatron"
    elif "ZeRO" in row.scheme:  # InternEvo's ZeRO-1 keeps 16 bits and a shard in fp32 as well
        framework = "deepspeed"
    return Software(
        framework=framework,
        precision=precision,
        flash=not unfused,
        compiled=fused,
        gradient_bytes=4 if "DEFAULT" in text or framework == "fsdp2" else 2,
        fp8_gather="float8 all-gather" in row.scheme,
        generation=1 if source.startswith("LLM Foundry") else 2,
    )


def _recomputation(row: Row) -> str:
    text = row.columns["activation_checkpointing"]
    if text.startswith("selective"):
        return "selective"
    if text:
        return text
    # Amazon's articles do not say; models of this size need it.
    return "full" if row.publisher == "Amazon" else "none"


def _with_batch(row: Row, job: Job) -> Job:
    """Micro-batch and accumulation; where a source has no micro-batch, the largest that fits."""
    columns = row.columns
    tokens = float(columns["global_batch_tokens"] or 0)
    if not tokens:
        raise NotCovered("the batch is not stated")
    samples = max(1, round(tokens / job.shape.sequence / job.data_parallel))
    if columns["micro_batch"]:
        micro = int(float(columns["micro_batch"]))
        if job.scheme.pipeline > 1 and row.source.startswith("torchtitan"):
            return job.having(micro_batch=1, accumulation=micro)
        return job.having(micro_batch=micro, accumulation=max(1, round(samples / micro)))
    if job.scheme.pipeline > 1:
        return job.having(micro_batch=1, accumulation=samples)
    return largest_micro_batch(job, samples)


def largest_micro_batch(job: Job, samples: int) -> Job:
    """The largest micro-batch that divides ``samples`` and surely fits; 1 if none does.

    Nine tenths of the memory count: nobody chooses a batch that a longer step breaks.
    """
    for micro in range(samples, 0, -1):
        if samples % micro == 0:
            tried = job.having(micro_batch=micro, accumulation=samples // micro)
            if memory_use(tried).high <= 0.9 * job.cluster.gpu.memory_bytes:
                return tried
    return job.having(micro_batch=1, accumulation=samples)


def predicted_value(row: Row, job: Job, seconds: float) -> float:
    """The row's metric for a step of so many seconds."""
    tokens = job.tokens_per_step
    if row.metric == "tokens_per_s_per_gpu":
        return tokens / seconds / job.gpus
    if row.metric == "samples_per_s":
        return tokens / job.shape.sequence / seconds
    if row.metric == "step_time_s":
        return seconds
    if row.metric == "hardware_tflops_per_gpu":
        return megatron_flops(job.shape, tokens) * 4 / 3 / seconds / job.gpus / 1e12
    if row.source.startswith("Megatron-LM README (H100"):
        return megatron_flops(job.shape, tokens) / seconds / job.gpus / 1e12
    per_token = 6 * job.shape.parameters + 12 * job.shape.layers * job.shape.hidden * (
        job.shape.sequence
    )
    return per_token * tokens / seconds / job.gpus / 1e12


def megatron_flops(shape: ModelShape, tokens: float) -> float:
    """Forward and backward pass: 72 B s l h^2 (1 + s / 6h + V / 12 l h); Narayanan et al., 2021."""
    layers = 72 * tokens * shape.layers * shape.hidden**2
    extra = shape.sequence / (6 * shape.hidden) + shape.vocabulary / (
        12 * shape.layers * shape.hidden
    )
    return layers * (1 + extra)


def peak_share(row: Row, job: Job) -> float:
    """The published figure as a share of the GPU's peak, 6 N + 6 L h s FLOP per token."""
    shape, tokens = job.shape, job.tokens_per_step
    per_token = 6 * shape.parameters + 6 * shape.layers * shape.hidden * shape.sequence
    # Of a step of one second, by that of the published one.
    seconds = predicted_value(row, job, 1.0) / row.value
    seconds = 1 / seconds if row.metric == "step_time_s" else seconds
    return per_token * tokens / seconds / job.gpus / job.cluster.gpu.flops("bf16")
