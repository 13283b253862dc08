"""The matrix of faults: what hits which rank, in which phase, over which way; and what is promised.

Each cell is one test. The phases of a fault over a way run side by side, each in its own world.
docs/dev/failures.md has the table of the promises below. ``make test`` has the faults of ``SHORT``
once the group is made; ``make test-faults`` has all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_smddp.distributed import extension
from harness import worker
from harness.resets import reset_connections
from harness.worker import Context, Failure
from harness.world import World, WorldError
from tests.testbed import Host, Testbed

SILENCE = 4
JOIN = 8  # seconds: the limit of making a group
DEADLINE = 90
SHORT_DEADLINE = 10  # where the promise may be an error at the deadline
SYSTEM_LIBFABRIC = "libfabric.so.1"  # Debian's 1.17
NEWER_LIBFABRIC = extension.packaged_libfabric()


@dataclass(frozen=True)
class Way:
    name: str
    layout: str
    environment: tuple[tuple[str, str], ...]
    linked: bool = False  # hosts of a testbed

    @property
    def victim(self) -> int:
        return len(self.layout) - 1

    @property
    def in_host(self) -> bool:
        return len(set(self.layout)) == 1


def over(provider: str, layout: str, libfabric: str) -> Way:
    environment = (("SMDDP_FABRIC_PROVIDER", provider), ("SMDDP_LIBFABRIC", libfabric))
    return Way(provider, layout, environment)


@dataclass(frozen=True)
class Promise:
    """What the ranks see: an error with all of ``words`` within ``seconds``, or none.

    ``allowed``: one of these is in the message of an error; without ``words`` there may be one.
    """

    text: str
    words: tuple[str, ...] = ()
    seconds: float = 30
    allowed: tuple[str, ...] = ()

    @property
    def error(self) -> bool:
        return bool(self.words)


WAYS = (
    Way("in a host", "AAA", ()),
    over("tcp;ofi_rxm", "ABC", SYSTEM_LIBFABRIC),
    over("tcp", "ABC", NEWER_LIBFABRIC),
    over("udp;ofi_rxd", "AABB", SYSTEM_LIBFABRIC),
    Way("over links", "ABC", (), linked=True),
)
PHASES = ("start-up", "before", "during", "transfer", "part done", "idle", "shutdown")
DEATHS = ("SIGKILL", "exit", "SIGSEGV", "SIGABRT")
LIMITS = ("no descriptors", "no memory")  # the rank may have no more than it has
# What a testbed has: the rank's host loses its link, or the disks of all hosts are full.
ON_LINKS = ("cut", "cut for 1 s", "slow link for 3 s", "SIGKILL, full disks")
FAULTS = (*DEATHS, "SIGSTOP", "SIGSTOP for 3 s", "reset", "store death", *LIMITS, *ON_LINKS)

NOTHING = Promise("goes on")


def promise(phase: str, fault: str, way: Way) -> Promise | None:
    """None: the fault can't happen there."""
    if (fault in ON_LINKS) != way.linked:
        return None
    if fault == "cut" and phase == "start-up":
        return None  # the store is reached over another link
    if fault == "reset" and (way.in_host or way.name.startswith("udp") or phase == "start-up"):
        return None
    name = f"rank {way.victim} (host-{way.layout[-1]})"
    if fault in LIMITS:
        if phase in ("transfer", "part done"):
            return None  # it changes nothing that is under way
        if phase == "start-up" and fault == "no descriptors":
            return Promise("all name the rank and the reason in 6 s", (name, "could not"), 6)
        if phase == "start-up":  # the C library itself may end the process
            named = (
                name,
                f"ranks {way.victim} did not join",
            )  # it may have told nothing of its host
            text = "named at the limit of making a group"
            return Promise(text, ("rank",), JOIN + 6, allowed=named)
        # To connect takes both: a rank without them may seem dead, silent or late.
        words = (name, "Too many open files", "Cannot allocate memory")
        text = "goes on, or the rank or the reason is named, at the deadline at the latest"
        return Promise(text, (), SHORT_DEADLINE + 5, allowed=words)
    if fault == "store death":
        return NOTHING if phase != "start-up" else Promise("error at once", (" ",), JOIN + 6)
    if fault == "cut for 1 s" and phase == "start-up":  # libfabric takes no NIC without a carrier
        return Promise("goes on, or all name the rank and its NIC", (), allowed=(name, "eth0"))
    if " for " in fault or phase == "shutdown":
        return NOTHING
    if phase == "start-up":
        words = (f"ranks {way.victim} did not join",)
        return Promise("named at the limit of making a group", words, 3 * JOIN + 6)
    if fault == "reset":
        if phase in ("before", "part done"):
            return None  # no connection to break, or no rank that waits
        return Promise("goes on, or told on both sides in 5 s", (), 5, allowed=("connection",))
    late = 2 if phase == "part done" else 0
    if fault in ("SIGSTOP", "cut"):
        text = "named and called silent after `silence_seconds` + 2"
        return Promise(text, (name, "has not answered"), SILENCE + 2 + late)
    return Promise("named and called dead in 6 s", (name, "ended"), 6 + late)


ALL = bool(os.environ.get("SMDDP_TEST_ALL_FAULTS"))
SHORT = ("SIGKILL", "SIGSTOP", "SIGSTOP for 3 s", "reset")
CELLS = [
    (way, fault, phase)
    for way in WAYS
    for fault in (FAULTS if ALL else SHORT)
    for phase in (PHASES if ALL else PHASES[1:])
    if promise(phase, fault, way) is not None
]


# ---- what the ranks do


def prepare(ctx: Context) -> None:
    extension.load()  # here, not after the fault
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(3))


def make_a_group_alone(ctx: Context) -> None:
    """A process's first group imports much, which takes descriptors and memory."""
    dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


_stores: list[dist.Store] = []


def connect(ctx: Context) -> None:
    _stores.append(worker.connect(JOIN))


def join(ctx: Context) -> None:
    dist.init_process_group(
        "smddp",
        store=dist.PrefixStore("world", _stores[-1]),
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=timedelta(seconds=JOIN),
    )


def take_descriptors(ctx: Context) -> None:
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, most + 1))
    with contextlib.suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)


def take_memory(ctx: Context) -> None:
    """Leaves 64 KiB of address space, less than one more buffer or thread takes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + 65536
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def reduce_once(ctx: Context) -> None:
    value = torch.full((1000,), float(ctx.rank))
    dist.all_reduce(value)
    assert bool((value == sum(range(ctx.size))).all())


def gather_small(ctx: Context) -> None:
    whole = torch.zeros(10 * ctx.size)
    dist.all_gather_into_tensor(whole, torch.full((10,), float(ctx.rank)))
    assert torch.equal(whole, torch.arange(ctx.size).repeat_interleave(10).float())


def gather_for_ever(ctx: Context) -> None:
    whole, part = torch.zeros(300_000 * ctx.size), torch.ones(300_000)
    while True:
        dist.all_gather_into_tensor(whole, part)


def gather_for_a_while(ctx: Context) -> None:
    whole, part = torch.zeros(300_000 * ctx.size), torch.ones(300_000)
    for _ in range(200):
        dist.all_gather_into_tensor(whole, part)


def do_own_part(ctx: Context) -> None:
    dist.all_gather_into_tensor(
        torch.zeros(10 * ctx.size), torch.full((10,), float(ctx.rank)), async_op=True
    )


def finish_then_fail(ctx: Context, and_next: bool) -> None:
    """The victim has done its part of the first operation, and none of the second."""
    time.sleep(1)
    gather_small(ctx)
    if and_next:
        reduce_once(ctx)


def destroy(ctx: Context) -> None:
    dist.destroy_process_group()


# ---- one batch: all phases of a fault over a way


@dataclass
class Outcome:
    results: dict[int, Any]  # by rank, of those that answered
    seconds: float
    unanswered: str = ""


class Cell:
    """One world from its start to the answers of the ranks that were not hit."""

    def __init__(self, way: Way, fault: str, phase: str, world: World) -> None:
        self.way, self.fault, self.phase, self.world = way, fault, phase, world
        self.promise = promise(phase, fault, way)
        assert self.promise is not None
        lives = " for " in fault or fault in ("reset", "store death", "no descriptors")
        self.rest = [r for r in range(world.size) if r != way.victim]
        self.asked = list(range(world.size)) if lives else self.rest

    def set_up(self) -> None:
        world = self.world
        world.run(prepare)
        if self.fault in LIMITS:
            world.run(make_a_group_alone)
        world.run(connect)
        if self.phase == "start-up":
            if self.fault != "store death":
                world.submit_to(self.rest, join)
            return
        world.run(join)
        if self.phase != "before":
            world.run(reduce_once)
        if self.phase == "during":
            world.submit_to(self.rest, reduce_once)
        elif self.phase == "transfer":
            world.submit(gather_for_ever if self.promise.error else gather_for_a_while)
        elif self.phase == "part done":
            world.submit_to([self.way.victim], do_own_part)
            world.outcomes([self.way.victim])

    def hit(self) -> None:
        world, victim = self.world, self.way.victim
        if self.fault == "exit":
            world.signal(victim, signal.SIGUSR2)
        elif self.fault == "reset":
            reset_connections(world.pid(0), world.pid(victim))
        elif self.fault == "store death":
            world._store = "ended"  # type: ignore[assignment]
        elif self.fault == "slow link for 3 s":
            world.bed.set_rate(victim, 0, "10mbit")
        elif self.fault.startswith("cut"):
            world.bed.cut(victim, 0)
        elif self.fault in LIMITS:
            take = take_memory if self.fault == "no memory" else take_descriptors
            world.submit_to([victim], take)
            world.outcomes([victim])
        else:
            world.signal(victim, getattr(signal, re.split("[ ,]", self.fault)[0]))

    def recover(self) -> None:
        world, victim = self.world, self.way.victim
        if self.fault == "slow link for 3 s":
            world.bed.set_rate(victim, 0, "1gbit")
        elif self.fault == "cut for 1 s":
            world.bed.restore(victim, 0)
        else:
            world.signal(victim, signal.SIGCONT)

    def call(self) -> None:
        """What the ranks do after the fault."""
        assert self.promise is not None
        world, victim = self.world, self.way.victim
        acts = [*self.asked, victim] if self.fault == "no memory" else self.asked
        if self.phase in ("before", "idle"):
            world.submit_to(acts, reduce_once)
        elif self.phase == "during" and victim in acts:
            world.submit_to([victim], reduce_once)
        elif self.phase == "part done":
            world.submit_to(self.rest, finish_then_fail, self.promise.error)
        elif self.phase == "shutdown":
            world.submit_to(acts, destroy)
        elif self.phase == "start-up":
            late = acts if self.fault == "store death" else [victim]
            world.submit_to([rank for rank in late if rank in acts], join)

    def outcome(self, began: float) -> Outcome:
        assert self.promise is not None
        ranks = [r for r in self.asked if r in self.world._busy]
        try:
            results = self.world.outcomes(
                ranks, timeout=max(0.1, began + self.promise.seconds - time.monotonic())
            )
        except WorldError as error:
            return Outcome({}, time.monotonic() - began, str(error))
        return Outcome(results, time.monotonic() - began)


def fill(host: Host, folder: str) -> None:
    """A disk without space at a folder of this host."""
    host.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    host.run(["dd", "if=/dev/zero", f"of={folder}/full", "bs=4k"], check=False, stderr=DEVNULL)


@functools.cache
def batch(way: Way, fault: str) -> dict[str, Outcome]:
    environment = {"SMDDP_SILENCE_SECONDS": str(SILENCE), **dict(way.environment)}
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed(len(way.layout), nics=2)) if way.linked else None
        if fault == "SIGKILL, full disks":
            disk = stack.enter_context(tempfile.TemporaryDirectory())
            environment["SMDDP_REPORT_DIR"] = disk
            for host in bed.hosts:
                fill(host, disk)
        cells = {}
        for phase in [phase for w, f, phase in CELLS if (w, f) == (way, fault)]:
            limit = SHORT_DEADLINE if fault in LIMITS else DEADLINE
            limit = JOIN if phase == "start-up" else limit
            limited = {**environment, "SMDDP_TIMEOUT_SECONDS": str(limit)}
            world = World(way.layout, None, limited, bed=bed)
            stack.callback(world.close)
            cells[phase] = Cell(way, fault, phase, world)
        for cell in cells.values():
            cell.world.join()
        # Last the one whose ranks wait from then on for a rank that comes late.
        for cell in sorted(cells.values(), key=lambda cell: cell.phase == "start-up"):
            cell.set_up()
        time.sleep(0.5)
        began = time.monotonic()
        for cell in cells.values():
            cell.hit()
        for cell in cells.values():
            cell.call()
        if match := re.search(r" for (\d) s", fault):
            time.sleep(int(match[1]))
            for cell in cells.values():
                cell.recover()
        return {phase: cell.outcome(began) for phase, cell in cells.items()}


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Way) else str(value)


@pytest.mark.parametrize(("way", "fault", "phase"), CELLS, ids=name_of)
def test_cell(way: Way, fault: str, phase: str) -> None:
    if way.linked and Testbed.missing():
        pytest.skip(Testbed.missing())
    if way.name == "tcp" and not NEWER_LIBFABRIC:
        pytest.skip("there is no libfabric 2.x: the extra is not installed")
    promised = promise(phase, fault, way)
    assert promised is not None
    outcome = batch(way, fault)[phase]
    assert not outcome.unanswered, outcome.unanswered
    for rank, result in outcome.results.items():
        if not promised.error:
            if isinstance(result, Failure):
                assert promised.allowed, f"rank {rank}: {result}"
                words = promised.allowed
                assert any(word in result.message for word in words), f"rank {rank}: {result}"
            continue
        assert isinstance(result, Failure), f"rank {rank} returned {result!r}"
        missing = [word for word in promised.words if word not in result.message]
        assert not missing, f"rank {rank} does not say {missing}: {result.message}"
        words = promised.allowed or ("",)
        assert any(word in result.message for word in words), f"rank {rank}: {result.message}"
