"""Where a rank's tensors lie: on its GPU, or on a device that threads simulate.

What the steps do with tensors goes through this, so that the same functions run in tests on CPUs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness import host_device
from harness.worker import Context


class SimulatedDevice:
    """Memory of the threads that simulate a device (``SMDDP_DEVICE=host``)."""

    name = "host"

    def empty(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return host_device.host_empty(numel, dtype)

    def synchronize(self) -> None:
        """``wait()`` has done it: it blocks the host on this device."""

    def empty_cache(self) -> None:
        """Its memory has no cache."""

    def busy(self, seconds: float) -> None:
        """It has no stream of the caller's that could be busy."""

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def now(self) -> Callable[[], float]:
        """A mark; the function that it returns gives the seconds from it to then."""
        began = time.perf_counter()
        return lambda: time.perf_counter() - began


class Gpu(SimulatedDevice):
    """The current CUDA device of the rank."""

    name = "cuda"

    def empty(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cuda")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def busy(self, seconds: float) -> None:
        """Keeps the current stream busy on one multiprocessor for about ``seconds``."""
        torch.cuda._sleep(int(seconds * 1.5e9))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def now(self) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()

        def passed() -> float:
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return passed


_here: SimulatedDevice | None = None


def settle(ctx: Context, device: str) -> None:
    """From now on this rank's tensors lie on its ``device``."""
    global _here
    if device == "cuda":
        host_device.use_gpu(ctx)
        _here = Gpu()
    else:
        host_device.use_host(ctx)
        _here = SimulatedDevice()


def here() -> SimulatedDevice:
    """The device of this rank; :func:`settle` was called before."""
    assert _here is not None
    return _here


def gather(whole: torch.Tensor, part: torch.Tensor, group: Any = None) -> Any:
    """An AllGather, under way."""
    return dist.all_gather_into_tensor(whole, part, group=group, async_op=True)


def scatter(part: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
    """A ReduceScatter, under way."""
    return dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)


def reduce(tensor: torch.Tensor, group: Any = None) -> Any:
    """An AllReduce, under way."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def ramp(into: torch.Tensor, rank: int, first: int = 0) -> None:
    """Small integers by position and rank: sums of up to 4 ranks are exact in bf16."""
    step = 1 << 24
    for begin in range(0, into.numel(), step):
        part = into[begin : begin + step]
        index = torch.arange(part.numel(), device=into.device, dtype=torch.int32)
        part.copy_(index.add_((first + begin) % 61).remainder_(61).add_(rank))


def is_ramp(tensor: torch.Tensor, factor: int, added: int, first: int = 0) -> bool:
    """Whether every element is ``factor`` times the ramp of rank 0 plus ``added``."""
    step = 1 << 24
    for begin in range(0, tensor.numel(), step):
        part = tensor[begin : begin + step]
        wanted = torch.empty_like(part)
        ramp(wanted, 0, first + begin)
        if not bool((part == wanted * factor + added).all()):
            return False
    return True
