"""A random run: six ranks on three hosts, random groups and operations, a fault every few seconds.

The hosts are a testbed's, with links of 1 Gbit/s, another way to the store, and 1 MiB of disk each,
which is full at times. The run is cut into epochs: of two ranks on each of two hosts, of one on
each of three, and of any. In each, these make a group, whose network is measured or recalled from
the disk, and perhaps groups of some of its ranks, and run operations of random kinds, sizes and
types, several at a time. Every byte of every result is compared with what follows from the seed.
One rank or its link may be hit. Then the others must end the epoch, with all results right or with
an error, within seconds. No error names a rank that was not hit, and after a harmless fault there
is none. After an error no byte may change in memory that the failed operations had. From epoch to
epoch descriptors, threads and memory of a process do not grow, nor do the keys of the store.

    make soak SECONDS=1800                      # SEED=7 repeats a run
    SMDDP_SOAK_FAULTS=kill,abort make soak      # these faults alone
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed_smddp.entry  # noqa: F401 - here, not in a rank without descriptors
from deepspeed_smddp.distributed import backend, extension
from harness import cases, worker
from harness.cases import Case
from harness.resets import reset_connections
from harness.worker import Context, Failure
from harness.world import World
from tests.testbed import Testbed

SECONDS = float(os.environ.get("SMDDP_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("SMDDP_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
LAYOUT = "AABBCC"
SHAPES = ([0, 1, 2, 3], [0, 2, 4], None)  # AABB, ABC, any
RATE = "1gbit"
DEADLINE = 20  # seconds, of an operation
SILENCE = 4
ENDED = 45  # seconds from the start of an epoch to its last answer
# Those after which all ranks must go on.
HARMLESS = ("none", "slow link", "lossy link", "cut", "stop")
# Those of which ranks may learn at a deadline: one that was never reached is not called silent.
AT_DEADLINE = ("no descriptors", "no descriptors at the start", "cut for long")
ALL_FAULTS = (
    *HARMLESS,
    *("kill", "stop for long", "reset", "idle cut", "abort", "cut for long"),
    *("no descriptors", "no descriptors at the start"),
)
FAULTS = os.environ.get("SMDDP_SOAK_FAULTS", ",".join(ALL_FAULTS)).split(",")
TEXTS = os.environ.get("SMDDP_SOAK_TEXTS")  # a file that gets every error
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16)
MARK = 7
SETTLED = 10  # epochs, after which a process has no more descriptors and threads than before
CHUNK = 128 << 10  # bytes at most
GROWTH = 200 << 10  # KiB that its memory may still grow by


@dataclass(frozen=True)
class Epoch:
    number: int
    seed: int
    ranks: list[int]
    fault: str
    victim: int


@dataclass(frozen=True)
class Usage:
    descriptors: int
    threads: int
    kilobytes: int  # resident


@dataclass(frozen=True)
class Answer:
    before: Usage  # nothing of the epochs before is left then
    operations: int
    bytes: int
    measured: bool  # the network, now
    error: str
    raised: float  # when, by the clock that all processes share
    closed: float  # when the group was destroyed


# ---- what a rank does


# Outputs of operations that have failed, filled with MARK when the error was raised.
_given_up: list[torch.Tensor] = []
# The bytes that may come all the same: of chunks that were half received when a rank fell silent
# (docs/dev/security.md).
_half_chunks = 0


def usage() -> Usage:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return Usage(descriptors, threads, pages * resource.getpagesize() // 1024)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Takes all that the process may have."""
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def chosen(choose: random.Random) -> Case:
    """One operation of any kind, size and type."""
    collective = choose.choice(("all_gather", "reduce_scatter", "all_reduce"))
    dtype = choose.choice(DTYPES)
    operation = "SUM" if collective == "all_gather" else choose.choice(("SUM", "MAX"))
    numels = (int(2 ** choose.uniform(0, 18)),)
    return Case(collective, "base", dtype, numels, operation, seed=choose.randrange(10**6))


def epoch(ctx: Context, this: Epoch) -> Answer:
    """Some seconds of operations."""
    global _half_chunks
    extension.load()
    before = usage()
    changed = sum(int((memory != MARK).sum()) * memory.itemsize for memory in _given_up)
    assert changed <= _half_chunks, f"WRONG: {changed} bytes came after an error"
    _given_up.clear()
    _half_chunks = (len(this.ranks) - 1) * CHUNK if this.fault.endswith("for long") else 0
    sizes: list[int] = []
    calls: list[cases.Call] = []
    sources: list[str] = []
    said, raised = "", 0.0
    with contextlib.ExitStack() as until_destroyed:
        try:
            _run(ctx, this, sizes, calls, sources, until_destroyed)
        except (RuntimeError, OSError) as error:  # one of Python's own, without descriptors
            said, raised = str(error), time.monotonic()
            for output in (output for call in calls for output in call.outputs):
                output.fill_(MARK)
                _given_up.append(output)
        if dist.is_initialized():
            dist.destroy_process_group()
        closed = time.monotonic()
    measured = sources == ["measured now"]
    return Answer(before, len(sizes), sum(sizes), measured, said, raised, closed)


def _run(
    ctx: Context,
    this: Epoch,
    sizes: list[int],
    calls: list[cases.Call],
    sources: list[str],
    until_destroyed: contextlib.ExitStack,
) -> None:
    choose, ranks, hit = random.Random(this.seed), this.ranks, ctx.rank == this.victim
    store = worker.connect(DEADLINE)
    if hit and this.fault == "no descriptors at the start":
        until_destroyed.enter_context(no_descriptors())
    dist.init_process_group(
        "smddp",
        store=dist.PrefixStore(f"epoch{this.number}", store),
        rank=ranks.index(ctx.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=DEADLINE),
    )
    sources.append(backend.states()[0]["network_source"])
    groups = [(dist.group.WORLD, ranks)]
    for _ in range(choose.randrange(3)):
        some = sorted(choose.sample(range(len(ranks)), choose.randrange(2, len(ranks) + 1)))
        groups.append((dist.new_group(some), [ranks[i] for i in some]))
    rounds = choose.randrange(20, 60)
    for turn in range(rounds):
        group, members = choose.choice(groups)
        batch = choose.randrange(1, 5)
        batch_seed = choose.randrange(10**9)
        if turn == rounds // 2 and this.fault == "idle cut":
            store.set(f"idle {ctx.rank}", "")
            store.wait(["go on"])
        if turn == rounds // 2 and hit:
            if this.fault == "abort":
                dist.group.WORLD._get_backend(torch.device("cpu")).abort()
            elif this.fault == "no descriptors":
                until_destroyed.enter_context(no_descriptors())
        if ctx.rank not in members:
            continue
        chooser = random.Random(batch_seed)
        calls.clear()
        for _ in range(batch):
            calls.append(cases.begin(ctx, chosen(chooser), group, members))
        for i in chooser.sample(range(batch), batch):
            calls[i].finish()
            sizes.append(calls[i].outputs[0].nbytes)
        calls.clear()


# ---- what the run does


NAMED = re.compile(r"rank (\d+)(?: \(([\w-]+)\))?")


def accused(text: str) -> set[tuple[int, str]]:
    """The ranks that an error is said to come from: their numbers and hosts."""
    # What follows is the cause, and before it, a consequence. A rank that is waited for in vain.
    cause = text.rpartition(", after a failure: ")[2].rpartition(" s on rank")[2]
    cause = re.sub(r"^ \d+ \([\w-]+\)|can't send to rank \d+|", "", cause)
    cause = re.sub(r"rank \d+ \([\w-]+\) could not join group '\d+': (?=ranks)", "", cause)
    cause = re.sub(rf"rank \d+ \([\w-]+\): (?=.*: {os.strerror(errno.EMFILE)})", "", cause)
    named = {(int(number), host) for number, host in NAMED.findall(cause)}
    for several in re.findall(r"ranks ([\d, ]+)", cause):
        named |= {(int(number), "") for number in several.split(",") if number.strip()}
    return named


class Soak:
    def __init__(self, bed: Testbed, disk: Path) -> None:
        env: dict[str, str | None] = {
            "SMDDP_TIMEOUT_SECONDS": str(DEADLINE),
            "SMDDP_SILENCE_SECONDS": str(SILENCE),
            "SMDDP_DEBUG": "curve=auto,check_locks=1",
            "SMDDP_REPORT_DIR": str(disk / "reports"),
            "XDG_CACHE_HOME": str(disk),
        }
        self.bed = bed
        for host in bed.hosts:
            mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
            host.run(mount, check=True)
        self.disks = [Path(f"/proc/{host.pid}/root{disk}") for host in bed.hosts]
        self.world = World(LAYOUT, None, env, bed=bed).join()
        self.choose = random.Random(SEED)
        self.shapes = itertools.cycle(SHAPES)
        self.totals: Counter[str] = Counter()
        self.faults = dict.fromkeys(FAULTS, 0)
        self.slowest = (0.0, "")
        self.usages: dict[int, list[Usage]] = {}  # by process
        self.wrong: list[str] = []

    def change_disks(self) -> None:
        """Of some hosts: empties, or fills them."""
        for disk in self.disks:
            if self.choose.random() < 0.5:
                for child in disk.iterdir():
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            if self.choose.random() < 0.3:
                self.totals["full"] += 1
                with contextlib.suppress(OSError), (disk / "full").open("wb", 0) as file:
                    while file.write(bytes(4096)):
                        pass

    def run_epoch(self) -> None:
        fault = self.choose.choice(FAULTS)
        self.faults[fault] += 1
        everyone, count = range(len(LAYOUT)), self.choose.randrange(2, len(LAYOUT) + 1)
        ranks = next(self.shapes) or sorted(self.choose.sample(everyone, count))
        victim = self.choose.choice(ranks)
        self.totals["epochs"] += 1
        self.change_disks()
        this = Epoch(self.totals["epochs"], self.choose.randrange(10**9), ranks, fault, victim)
        keys = set(self.world._store.list_keys())
        self.world.submit_to(ranks, epoch, this)
        time.sleep(self.choose.uniform(0.05, 0.8))
        began = time.monotonic()
        asked, guilty = self.hit(fault, victim, ranks)
        outcomes = self.world.outcomes(asked, timeout=ENDED)
        for rank in ranks:
            self.world._store.delete_key(f"idle {rank}")
        self.world._store.delete_key("go on")
        if fault == "kill":
            self.usages.pop(self.world.pid(victim), None)
            self.world.replace(victim)
        what = f"seed {SEED}, epoch {this.number}, {fault} of rank {victim} in {ranks}"
        failed = any(isinstance(o, Failure) or o.error for o in outcomes.values())
        # A report leaves its keys. It may be made of a fault that no operation meets.
        left = set(self.world._store.list_keys()) - keys
        reports = {key for key in left if re.search(r"smddp-report/\d", key)}
        self.totals["keys"] += len(reports)
        if reports and not failed and fault in HARMLESS:
            whys = [self.world._store.get(key) for key in sorted(reports) if "reason" in key]
            self.wrong.append(f"{what}: a report without an error: {whys}")
        # A rank without descriptors can't remove its own.
        removes = fault != "kill" and not fault.startswith("no descriptors")
        if left - reports and not failed and removes:
            self.wrong.append(f"{what}: keys are left: {sorted(left - reports)}")
        unreached = any("did not join" in getattr(o, "error", "") for o in outcomes.values())
        for rank, outcome in outcomes.items():
            assert not isinstance(outcome, Failure), f"{what}: rank {rank}: {outcome.trace}"
            self.usages.setdefault(self.world.pid(rank), []).append(outcome.before)
            error = outcome.error
            # libfabric takes no NIC without a carrier: a group can't be made during a cut.
            if error and fault in HARMLESS and "has no fabric" not in error:
                self.wrong.append(f"{what}: rank {rank}: {error}")
            allowed = {(ranks.index(r), f"host-{LAYOUT[r]}") for r in guilty(rank)}
            allowed |= {(number, "") for number, _ in allowed}
            # Nor does a rank join that has left, or waits for the one that was hit elsewhere.
            # A rank that was killed before any other had reached it is waited for in one group, and
            # ranks of other groups wait for those that wait for it.
            if "did not join" in error or ("timed out" in error and unreached):
                ended = [r for r, other in outcomes.items() if getattr(other, "error", "")]
                allowed |= {
                    (ranks.index(r), host) for r in ended for host in ("", f"host-{LAYOUT[r]}")
                }
            if wrong := accused(error) - allowed:
                self.wrong.append(f"{what}: rank {rank} accuses {wrong}: {error}")
            if error:
                self.note(what, rank, outcome, began)
            late = "timed out after" in error
            if late and fault not in AT_DEADLINE and not unreached:
                self.wrong.append(f"{what}: rank {rank}: {error}")
            self.totals.update(operations=outcome.operations, bytes=outcome.bytes)
            self.totals.update(errors=bool(error), late=late, measured=outcome.measured)

    def note(self, what: str, rank: int, outcome: Answer, began: float) -> None:
        raised, closed = outcome.raised - began, outcome.closed - outcome.raised
        self.slowest = max(self.slowest, (raised, what))
        if TEXTS:
            with Path(TEXTS).open("a") as file:
                file.write(
                    f"{what}: rank {rank}: {raised:.1f} s, +{closed:.1f} s: {outcome.error}\n"
                )

    def hit(
        self, fault: str, victim: int, ranks: list[int]
    ) -> tuple[list[int], Callable[[int], list[int]]]:
        """The ranks that answer, and those that a rank may call lost."""
        world, sleep = self.world, lambda least, most: time.sleep(self.choose.uniform(least, most))
        elsewhere = [rank for rank in ranks if LAYOUT[rank] != LAYOUT[victim]]
        there = [rank for rank in ranks if rank not in elsewhere]
        host = "ABC".index(LAYOUT[victim])
        if fault == "kill":
            world.signal(victim, signal.SIGKILL)
            world._busy.discard(victim)
            return [rank for rank in ranks if rank != victim], lambda _: [victim]
        if fault.startswith("stop"):
            world.signal(victim, signal.SIGSTOP)
            sleep(0.2, 2) if fault == "stop" else time.sleep(SILENCE + 3)
            world.signal(victim, signal.SIGCONT)
            # The others have given up, and may have destroyed their groups: it hears only that.
            return ranks, lambda rank: ranks if rank == victim else [victim]
        if fault == "reset":
            other = self.choose.choice([rank for rank in ranks if rank != victim])
            reset_connections(world.pid(victim), world.pid(other))
            return ranks, lambda _: [victim, other]
        if fault == "idle cut":
            idle = [f"idle {rank}" for rank in ranks]
            try:
                world._store.wait(idle, timedelta(seconds=ENDED))
            except dist.DistStoreError:
                self.wrong.append(f"epoch {self.totals['epochs']}: not all of {ranks} became idle")
            for rank in elsewhere:
                reset_connections(world.pid(victim), world.pid(rank))
            world._store.set("go on", "")
            return ranks, lambda _: ranks
        if fault == "slow link":
            self.bed.set_rate(host, 0, "20mbit")
            sleep(0.5, 3)
            self.bed.set_rate(host, 0, RATE)
        elif fault == "lossy link":
            self.bed.set_rate(host, 0, "100mbit", queue=40 << 10)
            sleep(0.5, 3)
            self.bed.set_rate(host, 0, RATE)
        elif fault.startswith("cut"):
            self.bed.cut(host, 0)
            sleep(0.2, 1) if fault == "cut" else time.sleep(SILENCE + 3)
            self.bed.restore(host, 0)
            # The ranks of that host may call the others lost, and hear that they are themselves.
            return ranks, lambda rank: there if rank in elsewhere else ranks
        return ranks, lambda _: [victim]

    def line(self, seconds: float) -> str:
        t = self.totals
        faults = ", ".join(f"{count} {name}" for name, count in self.faults.items())
        return (
            f"soak: seed {SEED}, {seconds:.0f} s, {t['epochs']} epochs ({faults}; {t['full']} "
            f"full disks), {t['operations']} operations, {t['bytes'] / 1e9:.2f} GB checked, "
            f"{t['measured']} networks measured, {t['keys']} keys of reports left, {t['errors']} "
            f"errors raised, {t['late']} of them at a deadline, the slowest after "
            f"{self.slowest[0]:.1f} s ({self.slowest[1]})"
        )

    def growth(self) -> str:
        """What has grown in a process after its first epochs; appended to what is wrong."""
        lines = []
        for pid, usages in self.usages.items():
            first, then = usages[:SETTLED], usages[SETTLED:]
            if not then:
                continue
            most, now = (
                [max(getattr(usage, kind) for usage in some) for kind in vars(first[0])]
                for some in (first, then)
            )
            lines.append(f"process {pid}, {len(usages)} epochs: {most} -> {now}")
            # What its last groups had is kept for some seconds: of three, if epochs are short.
            if now[0] > most[0] + 24 or now[1] > most[1] + 4 or now[2] > most[2] + GROWTH:
                self.wrong.append("a process has grown: " + lines[-1])
        if TEXTS:
            with Path(TEXTS).open("a") as file:
                for pid, usages in self.usages.items():
                    file.write(f"MEMORY {pid} {[usage.kilobytes >> 10 for usage in usages]}\n")
        return "\n".join(["(descriptors, threads, KiB of memory)", *lines])


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.testbed
@pytest.mark.timeout(SECONDS + 100)
def test_soak(
    capsys: pytest.CaptureFixture[str], testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    soak = Soak(testbed(hosts=3, rate=RATE, nics=2), tmp_path)
    began = shown = time.monotonic()
    try:
        while time.monotonic() < began + SECONDS:
            soak.run_epoch()
            if time.monotonic() > shown + 10:
                shown = time.monotonic()
                with capsys.disabled():
                    print(soak.line(shown - began), flush=True)
    finally:
        with capsys.disabled():
            print(soak.line(time.monotonic() - began), flush=True)
            print(soak.growth())
            print("\n".join(soak.wrong))
        soak.world.close()
    assert not soak.wrong, "\n".join(soak.wrong)
