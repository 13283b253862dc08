"""Whether this machine's processor and network would have data coded between hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from deepspeed_smddp.config.units import number_text, rate_text
from deepspeed_smddp.diagnostics.doctor import machine
from deepspeed_smddp.diagnostics.doctor.facts import Finding
from deepspeed_smddp.distributed import coding_gain, extension

_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def findings(setting: str) -> Iterator[Finding]:
    """Of this process, by the rate that its NICs state; none without libfabric.

    ``setting``: that of ``coding``.
    """
    try:
        nics = machine.nics_of(extension.core.fabric_description())
    except (ImportError, RuntimeError):  # other findings say so
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    yield Finding("coding between hosts", choice(setting, machine.rate_of(nics) / ranks))


def choice(setting: str, rate: float) -> str:
    """What is coded where a rank has ``rate`` bytes per second, and why; 0: not known."""
    if setting != "auto":
        return f'"{setting}", as set'
    parts = [f"a rank has {rate_text(rate)}"] if rate else []
    for dtype, ratio in coding_gain.RATIOS.items():
        encode, decode = _measure(dtype)
        highest = coding_gain.highest_rate(ratio, 1 / (1 / encode + 1 / decode))
        verdict = f" {'coded' if rate <= highest else 'not coded'}" if rate else ""
        parts.append(
            f"{dtype} weights{verdict}: {ratio} of the bytes, pays up to {rate_text(highest)} for "
            f"each rank (this core codes {number_text(encode / 1e9, 2)} and decodes "
            f"{number_text(decode / 1e9, 2)} GB/s)"
        )
    return "; ".join(parts)


def _measure(dtype: str) -> tuple[float, float]:
    """Bytes per second that this core codes, and that it decodes, of values like weights."""
    random = torch.Generator().manual_seed(0)
    values = torch.empty(1 << 18).normal_(0, 0.02, generator=random).to(_TYPES[dtype])
    found = [extension.core.measure_coding(values) for _ in range(8)]
    encode = min(one["encode_seconds"] for one in found)
    return values.nbytes / encode, values.nbytes / min(one["decode_seconds"] for one in found)
