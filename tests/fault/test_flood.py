"""Strangers connect to every port of a job's ranks and say nothing, while it trains.

A rank may have 1,024 descriptors. It makes groups, opens files and writes checkpoints; the flood
costs it nothing but a line in its log (`make attack`). tests/cpp/silent_connections_test.cc floods
each version of libfabric.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import worker
from harness.resets import listening_ports
from harness.worker import Context
from harness.world import World

forkserver = multiprocessing.get_context("forkserver")
CONNECTIONS = 5000  # to each port, all at once
DESCRIPTORS = 1024  # of a rank, at most
FILES = 100  # that the program opens at once, as a data loader does
SECONDS = 10  # that a flood lasts, once all have connected


def train(ctx: Context, folder: str) -> dict[str, int]:
    """What has been done until the store says that it is enough."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    store = worker.connect(60)
    dist.init_process_group(
        "smddp",
        store=dist.PrefixStore("flooded", store),
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=timedelta(seconds=60),
    )
    gradient, turns, groups, checkpoints = torch.empty(100_000), 0, 0, 0
    while True:
        enough = ctx.rank == 0 and store.check(["enough"])
        gradient.fill_(ctx.rank)
        gradient[0] = float(enough)
        dist.all_reduce(gradient)
        assert bool((gradient[1:] == sum(range(ctx.size))).all()), "WRONG"
        turns += 1
        if gradient[0] > 0:
            break
        if turns % 20 == 0:
            group = dist.new_group()
            dist.all_reduce(gradient, group=group)
            dist.destroy_process_group(group)
            groups += 1
        if turns % 50 == 0:
            files = [open(os.devnull) for _ in range(FILES)]  # noqa: SIM115
            torch.save({"gradient": gradient}, Path(folder) / f"{ctx.rank}.pt")
            for file in files:
                file.close()
            checkpoints += 1
        if turns == 100:
            store.set(f"trains {ctx.rank}", "")
    descriptors = len(os.listdir("/proc/self/fd"))
    dist.destroy_process_group()
    done = {"turns": turns, "groups": groups, "checkpoints": checkpoints}
    return {**done, "descriptors": descriptors}


def flood(ports: list[int], said: bytes, pipe: Any) -> None:
    """Holds connections until it is ended; tells how many the kernel has made."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    for _ in range(CONNECTIONS):
        for port in ports:
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
            held.append(stranger)
    time.sleep(1)
    for stranger in held:
        with contextlib.suppress(OSError):
            stranger.send(said)
    made = 0
    for stranger in held:
        with contextlib.suppress(OSError):
            made += stranger.getpeername()[1] > 0
    pipe.send(made)
    pipe.recv()


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"GET /"], ids=["silent", "a few bytes"])
def test_a_flood_costs_a_line(
    said: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World("AABB", None).join()
    with ExitStack() as stack:
        stack.callback(world.close)
        world.submit(train, str(tmp_path))
        store = world._store
        store.wait([f"trains {rank}" for rank in range(world.size)], timedelta(seconds=60))
        pipes = []
        for rank in range(world.size):
            ports = listening_ports(world.pid(rank))
            assert len(ports) >= 3, ports  # data, liveness, reports
            ours, theirs = forkserver.Pipe()
            stranger = forkserver.Process(target=flood, args=(ports, said, theirs), daemon=True)
            stranger.start()
            stack.callback(stranger.kill)
            pipes.append(ours)
        held = sum(pipe.recv() for pipe in pipes)
        time.sleep(SECONDS)
        store.set("enough", "")
        done = world.collect(timeout=60)
        logs = [world.log(rank).splitlines() for rank in range(world.size)]
        with capsys.disabled():
            print(
                f"flood: {held} connections; {done}",
                *(line for log in logs for line in log),
                sep="\n",
            )
        assert all(len(log) <= 1 for log in logs), logs
