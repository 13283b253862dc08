"""A random run: six ranks on three hosts, random groups and operations, a fault every few seconds.

The run is cut into epochs. In each, some of the ranks make a group and perhaps groups of some of
its ranks, and run operations of random kinds, sizes and types, several at a time. Every byte of
every result is compared with what follows from the seed. One rank may be hit. Then the others must
end the epoch, with all results right or with an error, within seconds; an epoch in which no rank is
hit has no error. After an error no byte may change in memory that the failed operations had.

    make soak SECONDS=1800                      # SEED=7 repeats a run
    SMDDP_SOAK_FAULTS=kill,abort make soak      # these faults alone
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import cases
from harness.cases import Case
from harness.resets import reset_connections
from harness.worker import Context, Failure
from harness.world import World

SECONDS = float(os.environ.get("SMDDP_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("SMDDP_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
LAYOUT = "AABBCC"
DEADLINE = 20  # seconds, of an operation
SILENCE = 4
ENDED = 45  # seconds from the start of an epoch to its last answer
ALL_FAULTS = "none,kill,stop,stop for long,reset,abort"
FAULTS = os.environ.get("SMDDP_SOAK_FAULTS", ALL_FAULTS).split(",")
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16)
MARK = 7


# ---- what a rank does


# Outputs of operations that have failed, filled with MARK when the error was raised.
_given_up: list[torch.Tensor] = []


def chosen(choose: random.Random) -> Case:
    """One operation of any kind, size and type."""
    collective = choose.choice(("all_gather", "reduce_scatter", "all_reduce"))
    dtype = choose.choice(DTYPES)
    operation = "SUM" if collective == "all_gather" else choose.choice(("SUM", "MAX"))
    numels = (int(2 ** choose.uniform(0, 18)),)
    return Case(collective, "base", dtype, numels, operation, seed=choose.randrange(10**6))


def epoch(
    ctx: Context, port: int, number: int, seed: int, ranks: list[int], aborts: int
) -> tuple[int, int, str]:
    """Some seconds of operations: their number, bytes, and the error.

    Rank ``aborts``, unless -1, aborts the group in the middle.
    """
    for memory in _given_up:
        assert bool((memory == MARK).all()), "WRONG: bytes came after an error"
    _given_up.clear()
    sizes: list[int] = []
    calls: list[cases.Call] = []
    said = ""
    try:
        _run(ctx, port, number, random.Random(seed), ranks, aborts, sizes, calls)
    except RuntimeError as error:
        said = str(error)
        for output in (output for call in calls for output in call.outputs):
            output.fill_(MARK)
            _given_up.append(output)
    if dist.is_initialized():
        dist.destroy_process_group()
    return len(sizes), sum(sizes), said


def _run(
    ctx: Context,
    port: int,
    number: int,
    choose: random.Random,
    ranks: list[int],
    aborts: int,
    sizes: list[int],
    calls: list[cases.Call],
) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    dist.init_process_group(
        "smddp",
        store=dist.PrefixStore(f"epoch{number}", store),
        rank=ranks.index(ctx.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=DEADLINE),
    )
    groups = [(dist.group.WORLD, ranks)]
    for _ in range(choose.randrange(3)):
        some = sorted(choose.sample(range(len(ranks)), choose.randrange(2, len(ranks) + 1)))
        groups.append((dist.new_group(some), [ranks[i] for i in some]))
    rounds = choose.randrange(20, 60)
    for turn in range(rounds):
        group, members = choose.choice(groups)
        batch = choose.randrange(1, 5)
        batch_seed = choose.randrange(10**9)
        if turn == rounds // 2 and ctx.rank == aborts:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
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


class Soak:
    def __init__(self, world: World) -> None:
        self.world = world
        self.choose = random.Random(SEED)
        self.totals: Counter[str] = Counter()
        self.faults = dict.fromkeys(FAULTS, 0)

    def run_epoch(self) -> None:
        fault = self.choose.choice(FAULTS)
        self.faults[fault] += 1
        ranks = sorted(
            self.choose.sample(range(len(LAYOUT)), self.choose.randrange(2, len(LAYOUT) + 1))
        )
        victim = self.choose.choice(ranks)
        self.totals["epochs"] += 1
        port, seed = self.world._store.port, self.choose.randrange(10**9)
        aborts = victim if fault == "abort" else -1
        self.world.submit_to(ranks, epoch, port, self.totals["epochs"], seed, ranks, aborts)
        time.sleep(self.choose.uniform(0.05, 0.8))
        asked = self.hit(fault, victim, ranks)
        outcomes = self.world.outcomes(asked, timeout=ENDED)
        if fault == "kill":
            self.world.replace(victim)
        what = f"seed {SEED}, epoch {self.totals['epochs']}, {fault} of rank {victim} in {ranks}"
        for rank, outcome in outcomes.items():
            assert not isinstance(outcome, Failure), f"{what}: rank {rank}: {outcome.trace}"
            operations, count, error = outcome
            assert fault != "none" or not error, f"{what}: rank {rank}: {error}"
            late = "did not finish" in error
            self.totals.update(operations=operations, bytes=count, errors=bool(error), late=late)

    def hit(self, fault: str, victim: int, ranks: list[int]) -> list[int]:
        """The ranks that answer."""
        if fault == "kill":
            self.world.signal(victim, signal.SIGKILL)
            self.world._busy.discard(victim)
            return [rank for rank in ranks if rank != victim]
        if fault.startswith("stop"):
            self.world.signal(victim, signal.SIGSTOP)
            time.sleep(self.choose.uniform(0.2, 2) if fault == "stop" else SILENCE + 3)
            self.world.signal(victim, signal.SIGCONT)
        elif fault == "reset":
            other = self.choose.choice([rank for rank in ranks if rank != victim])
            reset_connections(self.world.pid(victim), self.world.pid(other))
        return ranks

    def line(self, seconds: float) -> str:
        t = self.totals
        faults = ", ".join(f"{count} {name}" for name, count in self.faults.items())
        return (
            f"soak: seed {SEED}, {seconds:.0f} s, {t['epochs']} epochs ({faults}), "
            f"{t['operations']} operations, {t['bytes'] / 1e9:.2f} GB checked, "
            f"{t['errors']} errors raised, {t['late']} of them at a deadline"
        )


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_soak(capsys: pytest.CaptureFixture[str]) -> None:
    env: dict[str, str | None] = {
        "SMDDP_TIMEOUT_SECONDS": str(DEADLINE),
        "SMDDP_SILENCE_SECONDS": str(SILENCE),
    }
    world = World(LAYOUT, None, env).join()
    began = shown = time.monotonic()
    try:
        soak = Soak(world)
        while time.monotonic() < began + SECONDS:
            soak.run_epoch()
            if time.monotonic() > shown + 10:
                shown = time.monotonic()
                with capsys.disabled():
                    print(soak.line(shown - began), flush=True)
        with capsys.disabled():
            print(soak.line(time.monotonic() - began), flush=True)
    finally:
        world.close()
