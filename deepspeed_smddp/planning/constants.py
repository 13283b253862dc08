"""The constants of the planner's times: one is fitted, others are stated, measured or estimated.

``benchmarks/planner.py`` fits ``reached`` to published speeds with every publisher left out in
turn, shows by a bootstrap which of the others they would determine, and checks ``INTERVAL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Name -> value: what the formulas take.
Values = Mapping[str, float]


class Constant(NamedTuple):
    """A value, what it means and where it comes from."""

    value: float
    meaning: str
    source: str


CONSTANTS = {
    "reached": Constant(
        0.8,
        "share that a training step reaches of the rates that kernels reach alone",
        "fitted",
    ),
    "gemm.fp8": Constant(
        0.883,
        "share of the fp8 peak that a product reaches, relative to that of bf16",
        "measured on an H100: 0.709 by 0.803, github.com/stas00/ml-engineering",
    ),
    "attention.first": Constant(
        0.54,
        "FlashAttention 1 relative to 2",
        "stated: 25 to 40 % and 50 to 73 % of an A100's peak, FlashAttention-2's paper",
    ),
    "memory.share": Constant(
        0.85, "share of the memory's rate that elementwise kernels reach", "estimate"
    ),
    "elementwise.fused": Constant(
        2.0,
        "passes over a layer's activations: two norms, two residuals, one activation",
        "counted kernel by kernel",
    ),
    "elementwise.gated": Constant(
        6.3,
        "the same, Llama and not compiled: norms in fp32, rotary positions, SwiGLU",
        "counted kernel by kernel",
    ),
    "elementwise.scores": Constant(
        6.5, "passes over the scores of unfused attention", "counted kernel by kernel"
    ),
    "elementwise.loss": Constant(
        12.0, "bytes moved per logit, forward", "counted kernel by kernel"
    ),
    "launch": Constant(0.0005, "least seconds of the forward pass of a layer", "estimate"),
    "recompute.selective": Constant(
        0.5, "share of the products that are repeated", "torchtitan's rule: every second one"
    ),
    "optimizer.fixed": Constant(
        0.03, "seconds per step: launches, clipping, data, logging", "estimate"
    ),
    "optimizer.offload": Constant(
        1e-9,
        "seconds of Adam on the CPU per parameter of a GPU's part",
        "counted: 30 bytes, a host's 16 channels of DDR4 at 60 %, divided by 8 GPUs",
    ),
    "host.copy": Constant(
        2e10, "bytes per second of a GPU from the host's memory", "estimate: PCIe 4.0 by 16"
    ),
    "host.nvme": Constant(
        7e8, "bytes per second of a GPU from NVMe", "estimate: 5.6e9 of a host, by 8 GPUs"
    ),
    "nccl.link": Constant(
        0.77,
        "share of the link between GPUs of a host that NCCL reaches",
        "measured: 231 of 300 GB/s on 8 A100, NVIDIA/nccl issue 527",
    ),
    "nccl.half_ranks": Constant(
        320,
        "ranks at which a ring between hosts has half of its rate",
        "measured: an AllGather of 256 H100 has 200 of 400 GB/s, NVIDIA/nccl issue 1218",
    ),
    "nccl.hop": Constant(5e-6, "seconds per rank of a ring", "estimate"),
    "nccl.contention": Constant(
        0.18,
        "slowing of computing beside a collective's kernels, per second of overlap",
        "counted: up to 24 of 132 multiprocessors",
    ),
    "overlap.share": Constant(
        0.8, "share of the shorter of computing and communication that overlaps", "estimate"
    ),
    "tensor.async_exposed": Constant(
        0.5, "share of tensor-parallel AllReduces left by asynchronous ones", "estimate"
    ),
}

# A step takes from 1 / INTERVAL to INTERVAL times the predicted seconds in 80 % of the rows of a
# publisher that was left out, or more: docs/dev/planner-validation.md.
INTERVAL = 1.35
# What the rows have: GPUs, of a host as well, its least Gbit/s, the most GPUs with ZeRO-3 or FSDP.
COMPARED_GPUS = ("a100-40", "a100-80", "a800", "h100", "h100-500w", "h200")
COMPARED_PER_HOST = (4, 8)
COMPARED_GBIT = 400
COMPARED_SHARDED = 1024


def values() -> Values:
    """The values alone."""
    return {name: constant.value for name, constant in CONSTANTS.items()}
