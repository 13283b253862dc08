"""Ranks with buffers on a device: emulated by threads (``SMDDP_DEVICE=host``), or a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness import cases, model
from harness.variables import debug
from harness.worker import Context

ENVIRONMENT: dict[str, str | None] = {"SMDDP_DEVICE": "host"}
COPIES, KERNEL = "copy-engine", "gpu-kernel"
FABRIC = " + fabric"
# Through pinned host memory and the CPU's collectives: if the CPU sums, or on hosts of one rank.
# There a kernel sums what has come from the other hosts.
PINNED = "pinned"
ON_CPU: dict[str, str | None] = {"SMDDP_REDUCE_ON": "cpu"}
# An AllGather's chunks stay on the device, whose memory the network reads and writes.
BY_NIC: dict[str, str | None] = {**debug(hmem=1)}
HMEM = "hmem"


def paths(layout: str, on_cpu: bool = False, by_nic: bool = False) -> dict[str, str]:
    """The path of each collective in this layout."""
    counts = {layout.count(host) for host in layout}
    several = FABRIC if len(set(layout)) > 1 else ""
    alone = several and (counts == {1} or len(counts) > 1)
    kernel = (PINNED if alone or on_cpu else KERNEL) + several
    if several and counts == {1} and not on_cpu:
        kernel += f" + {KERNEL}"
    gather = PINNED if alone else COPIES
    if by_nic and several and len(counts) == 1:
        gather = HMEM if alone else f"{COPIES} + {HMEM}"
    return {
        "all_gather": gather + several,
        "reduce_scatter": kernel,
        "all_reduce": kernel,
    }


def host_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the emulated device, which the other ranks of the host can map."""
    from deepspeed_smddp import _C

    size = numel * dtype.itemsize
    return _C.host_device_empty(max(size, 1))[:size].view(dtype)


class DeviceArena(cases.Arena):
    """Buffers on a device; their distance from alignment is a multiple of the element's size."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * dtype.itemsize
        start = cases.GUARD + self._offset
        whole = self.bytes(start + size + cases.GUARD)
        whole.fill_(cases.GUARD_BYTE)
        self._regions.append((whole, start, start + size))
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=whole.device)
        return whole[start : start + size].view(dtype)

    @staticmethod
    def bytes(size: int) -> torch.Tensor:
        return host_empty(size, torch.uint8)


class GpuArena(DeviceArena):
    """Buffers on the GPU of the rank."""

    @staticmethod
    def bytes(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")


class SharedArena(DeviceArena):
    """Buffers that the ranks of the host have mapped, too."""

    @staticmethod
    def bytes(size: int) -> torch.Tensor:
        from deepspeed_smddp.distributed import memory

        return memory.shared_empty(size, torch.uint8)


_same_bits, _digest, _difference = model.same_bits, cases._digest, cases._difference


def use_host(ctx: Context) -> None:
    """From now on, this rank's cases have their buffers on the emulated device."""
    cases.Arena = DeviceArena  # type: ignore[misc]


def use_shared(ctx: Context) -> None:
    """From now on, this rank's cases have their buffers in memory shared with its host."""
    cases.Arena = SharedArena  # type: ignore[misc]


def use_gpu(ctx: Context) -> None:
    """From now on, this rank's cases have their buffers on the GPU; the CPU compares them.

    Ranks share a GPU if there are more ranks than GPUs.
    """
    torch.cuda.set_device(ctx.rank % torch.cuda.device_count())
    cases.Arena = GpuArena  # type: ignore[misc]
    model.same_bits = lambda a, b: _same_bits(a.cpu(), b.cpu())
    cases._digest = lambda tensors: _digest([t.cpu() for t in tensors])
    cases._difference = lambda a, b: _difference(a.cpu(), b.cpu())


def varied(dtype: torch.dtype, numels: Sequence[int]) -> list[cases.Case]:
    """Every collective with every operation, size and place that the type allows."""
    operations = ["SUM", "MIN", "MAX", "PRODUCT"] + ["AVG"] * dtype.is_floating_point
    wanted = [
        cases.Case(collective, dtype=dtype, operation=operation, offset=dtype.itemsize)
        for collective in ("reduce_scatter", "all_reduce")
        for operation in operations
    ]
    wanted += [
        cases.Case(collective, dtype=dtype, numels=(numel,))
        for collective in cases.FORMS
        for numel in numels
    ]
    return [
        *wanted,
        cases.Case("all_gather", dtype=dtype, place="in_place"),
        cases.Case("reduce_scatter", dtype=dtype, place="in_place"),
    ]


def round_on_every_host(ctx: Context) -> None:
    """Kernels round each host's sum, even the sum on the host that owns the result."""
    exact = model.reduced
    model.reduced = lambda inputs, layout, operation, owner: exact(inputs, layout, operation, -1)


def calls(ctx: Context, least: int = 0) -> dict[str, int]:
    """Calls since the last reset, by collective and path, without barriers.

    A call is counted shortly after the device has finished, so this waits for ``least`` calls.
    """
    from deepspeed_smddp.distributed import backend

    end = time.monotonic() + 5
    while True:
        counted = {
            f"{row['collective']} {row['path']}": row["calls"]
            for row in backend.statistics()
            if row["collective"] != "barrier"
        }
        if sum(counted.values()) >= least or time.monotonic() > end:
            return counted
        time.sleep(0.005)


def check(ctx: Context, wanted: Sequence[cases.Case]) -> dict[str, int]:
    """Checks the cases one by one, and returns the paths that they took."""
    from deepspeed_smddp.distributed import backend

    dist.barrier()
    backend.reset_statistics()
    for case in wanted:
        cases.check(ctx, case)
    return calls(ctx, len(wanted))


def imports(ctx: Context) -> dict[str, Any]:
    """Counters of the peers' memory that this rank has mapped."""
    from deepspeed_smddp import _C

    return dict(_C.device_statistics())
