"""The proof that an AllGather takes no multiprocessor: it ends while kernels hold all of them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gpu_check import place
from gpu_check.ranks import world
from gpu_check.step import Run
from harness.worker import Context

THREADS = 512
SHARED = "the proof needs a GPU for each rank"
BY_KERNELS = "this driver copies within a GPU by kernels, also the own block if it is not in place"
LONGEST_SECONDS = 20  # a kernel ends by itself after this
# One thread of a block says that the block runs and then polls; the others wait at the barrier and
# keep their places. `nanosleep` is in sm_70 and newer.
HOLD = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry hold(.param .u64 p_release, .param .u64 p_started, .param .u64 p_nanoseconds)
{
  .reg .pred %p<4>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [p_release];
  ld.param.u64 %rd2, [p_started];
  ld.param.u64 %rd3, [p_nanoseconds];
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra WAIT;
  mov.u64 %rd4, %globaltimer;
  add.u64 %rd5, %rd4, %rd3;
  mov.u32 %r2, %ctaid.x;
  mad.wide.u32 %rd7, %r2, 4, %rd2;
  mov.u32 %r3, 1;
  st.volatile.global.u32 [%rd7], %r3;
SPIN:
  ld.volatile.global.u32 %r2, [%rd1];
  setp.ne.u32 %p2, %r2, 0;
  @%p2 bra WAIT;
  nanosleep.u32 2000;
  mov.u64 %rd6, %globaltimer;
  setp.lt.u64 %p3, %rd6, %rd5;
  @%p3 bra SPIN;
WAIT:
  bar.sync 0;
  ret;
}
"""


class Driver:
    """The few functions of CUDA's driver that a kernel from PTX takes."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream().synchronize()  # the context of torch is current
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), HOLD.encode() + b"\0")
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, b"hold")
        # Made before anything holds the GPU, as it takes memory of it.
        self._own, self._other = ctypes.c_void_p(), ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuCtxGetCurrent", ctypes.byref(self._own))
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuCtxCreate_v2", ctypes.byref(self._other), ctypes.c_uint(0), device)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any, hint: bool) -> None:
        """Copies on the stream; with ``hint``, in a batch of one, to overlap compute."""
        where = ctypes.c_void_p(stream.cuda_stream)
        ends = [ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(source.data_ptr())]
        size = ctypes.c_size_t(to.nbytes)
        if not hint:
            self._call("cuMemcpyAsync", *ends, size, where)
            return
        # CUmemcpyAttributes: the source is read in the stream's order; two locations; flags.
        attributes = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 1)
        first, failed = ctypes.c_size_t(), ctypes.c_size_t()
        pointers = [ctypes.byref(each) for each in (*ends, size)]
        self._call(
            "cuMemcpyBatchAsync",
            *pointers,
            ctypes.c_size_t(1),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            where,
        )

    def copy_across(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """As from one context of the GPU to another."""
        ends = [ctypes.c_uint64(to.data_ptr()), self._other]
        ends += [ctypes.c_uint64(source.data_ptr()), self._own]
        where = ctypes.c_void_p(stream.cuda_stream)
        self._call("cuMemcpyPeerAsync", *ends, ctypes.c_size_t(to.nbytes), where)

    def copy_rows(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """The first half of each MiB, as rows with a pitch."""
        row, pitch = 1 << 19, 1 << 20

        # Of each side: x, y, where the memory is (2: on a GPU), host, device, array, pitch.
        def side(tensor: torch.Tensor) -> list[int]:
            return [0, 0, 2, 0, tensor.data_ptr(), 0, pitch]

        words = [*side(source), *side(to), row, to.nbytes // pitch]
        copy = (ctypes.c_uint64 * len(words))(*words)
        self._call("cuMemcpy2DAsync_v2", copy, ctypes.c_void_p(stream.cuda_stream))

    def flag(self, word: torch.Tensor, stream: Any) -> None:
        """Sets the first word of pinned memory to 1 on the stream."""
        where, address = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(word.data_ptr())
        self._call("cuStreamWriteValue32_v2", where, address, ctypes.c_uint32(1), 0)

    def blocks(self) -> int:
        """How many blocks of the kernel fill all multiprocessors."""
        per = ctypes.c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call(name, ctypes.byref(per), self._function, THREADS, ctypes.c_size_t(0))
        return per.value * torch.cuda.get_device_properties(None).multi_processor_count

    def hold(self, release: torch.Tensor, started: torch.Tensor, stream: Any, blocks: int) -> None:
        """Starts the kernel; it ends when ``release`` is not 0 any more.

        Both tensors are pinned memory. Each block sets its element of ``started``.
        """
        values = [
            ctypes.c_uint64(release.data_ptr()),
            ctypes.c_uint64(started.data_ptr()),
            ctypes.c_uint64(LONGEST_SECONDS * 10**9),
        ]
        pointers = (ctypes.c_void_p * 3)(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        shape = [blocks, 1, 1, THREADS, 1, 1, 0]
        where = ctypes.c_void_p(stream.cuda_stream)
        self._call("cuLaunchKernel", self._function, *shape, where, pointers, None)


def zero_sm(run: Run) -> None:
    """On each rank: all multiprocessors held, an AllGather, and a kernel that must not run."""
    for layout in ("AA", "AAAA"):
        with world(run, layout, CUDA_DEVICE_MAX_CONNECTIONS="32") as ranks:
            for form in ("AllGather in place", "AllGather"):
                found = ranks.run(while_held, "all_gather", form != "AllGather")
                run.note(f"{layout}: {form}", found)
                held = all(rank["held"] for rank in found)
                assert held, "the control kernel ran: SMs were not held"
                if not all(rank["a copy in a batch"] for rank in found):
                    shared = len(layout) > run.gpus
                    if shared or form == "AllGather":
                        why = f"{BY_KERNELS}; {SHARED}" if shared else BY_KERNELS
                        run.note(f"{layout}: {form} not judged", why)
                        continue
                run.goal(
                    f"{layout}: an {form} of 64 MiB per rank ends while all SMs are held",
                    all(rank["ended"] for rank in found),
                    f"ended on {sum(rank['ended'] for rank in found)} of {len(found)} ranks",
                )
    with world(run, "AA", CUDA_DEVICE_MAX_CONNECTIONS="32") as ranks:
        found = ranks.run(while_held, "reduce_scatter")
        run.note("AA: ReduceScatter, which needs SMs", found)
        assert not any(rank["ended"] for rank in found), "a sum ran although all SMs were held"


def while_held(ctx: Context, collective: str, in_place: bool = False) -> dict[str, Any]:
    """Whether the collective ended, and a control kernel did not, while the SMs were held."""
    numel = 32 << 20
    whole = torch.full((numel * ctx.size,), ctx.rank + 1, dtype=torch.bfloat16, device="cuda")
    own = whole[ctx.rank * numel : (ctx.rank + 1) * numel]
    part = own if in_place else own.clone()
    control = torch.zeros(32, device="cuda")
    side, other, holder = (torch.cuda.Stream(priority=p) for p in (0, -1, 0))

    def begin() -> Any:
        if collective == "all_gather":
            return place.gather(whole, part)
        return place.scatter(part, whole)

    begin().wait()  # maps the memory and loads the kernels
    control.add_(1)
    if collective == "all_gather":
        whole.zero_()
        part.fill_(ctx.rank + 1)
    driver = Driver()
    release = torch.zeros(1, dtype=torch.int32).pin_memory()
    blocks = driver.blocks()
    started = torch.zeros(blocks, dtype=torch.int32).pin_memory()
    # Allocated now: allocating may wait for the kernel that holds all SMs.
    spare, word = torch.empty_like(part), torch.zeros(1, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    dist.barrier()
    driver.hold(release, started, holder, blocks)
    full = until(lambda: int(started.sum()) == blocks, 5.0)
    assert full, "the kernel did not fill all SMs"
    dist.barrier()
    ended = torch.cuda.Event()
    began = time.monotonic()
    with torch.cuda.stream(side):
        work = begin()
        work.wait()
        ended.record()
    took = until(ended.query, 5.0 if collective == "all_gather" else 0.5)
    seconds = time.monotonic() - began
    ran = torch.cuda.Event()
    with torch.cuda.stream(other):
        control.add_(1)
        ran.record()
    held = not until(ran.query, 0.3)
    alone = what_ends(driver, part, spare, word) if collective == "all_gather" else {}
    dist.barrier()
    release[0] = 1
    torch.cuda.synchronize()
    if collective == "all_gather":
        assert whole.view(ctx.size, -1)[:, -1].tolist() == list(range(1, ctx.size + 1))
    assert control[0].item() == 2
    dist.barrier()
    return {"ended": took, "held": held, "blocks": blocks, "seconds": round(seconds, 4), **alone}


def what_ends(
    driver: Driver, source: torch.Tensor, to: torch.Tensor, word: torch.Tensor
) -> dict[str, bool | str]:
    """Which commands of an AllGather, and other ways to copy within a GPU, end on their own.

    This rank's kernel holds all SMs meanwhile.
    """
    commands = {
        "a flag": lambda stream: driver.flag(word, stream),
        "a copy in a batch": lambda stream: driver.copy(to, source, stream, True),
        "a plain copy": lambda stream: driver.copy(to, source, stream, False),
        "a copy across contexts": lambda stream: driver.copy_across(to, source, stream),
        "a copy of rows": lambda stream: driver.copy_rows(to, source, stream),
    }
    found: dict[str, bool | str] = {}
    for name, command in commands.items():
        stream, ended = torch.cuda.Stream(), torch.cuda.Event()
        try:
            command(stream)
        except RuntimeError as refused:
            found[name] = str(refused)
            continue
        ended.record(stream)
        found[name] = until(ended.query, 1.0)
    return found


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition()`` held within ``seconds``; the host only looks."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.0005)
    return condition()
