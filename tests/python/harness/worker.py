"""The process of one rank of a test world: runs the calls that the test sends, in order."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_smddp
from harness.namespaces import enter


@dataclass
class Context:
    """Passed as the first argument to every function that a test sends to a world."""

    rank: int
    layout: str
    backend: str
    groups: dict[Any, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.layout)


@dataclass
class Failure:
    """An exception of a rank, in a form that can always be sent."""

    rank: int
    kind: str
    message: str
    trace: str


def _die_with(parent: Any) -> None:
    connection.wait([parent.sentinel])
    os._exit(1)


def main(
    rank: int,
    layout: str,
    backend: str | None,
    environment: dict[str, str | None],
    holder: int | None,
    log: str,
    pipe: connection.Connection,
) -> None:
    """Entry of a rank's process, on the host of a testbed that process ``holder`` holds.

    If ``backend`` is None, the functions that are sent make their group.
    """
    if holder is not None:
        enter(holder, ("net", "uts", "mnt"))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test handles Ctrl-C
    threading.Thread(target=_die_with, args=(parent_process(),), daemon=True).start()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)

    context = Context(rank, layout, backend or "none")
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] = (_join, (), {})
    while True:
        try:
            function, args, kwargs = call
            reply = pickle.dumps(function(context, *args, **kwargs))
        except BaseException as error:  # the test decides what an exception means
            trace = traceback.format_exc()
            reply = pickle.dumps(Failure(rank, type(error).__name__, str(error), trace))
        try:
            pipe.send_bytes(reply)
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            call = pickle.loads(message)
        except BaseException:
            call = (_unreadable, (traceback.format_exc(),), {})


def connect(timeout: float) -> dist.TCPStore:
    """A rank's own connection to the store of its world."""
    at, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(at, port, is_master=False, timeout=timedelta(seconds=timeout))


def _join(context: Context) -> None:
    if context.backend == "none":
        return
    if section := os.environ.get("TEST_SECTION"):
        deepspeed_smddp.configure(json.loads(section))
    dist.init_process_group(
        context.backend,
        store=dist.PrefixStore("world", connect(60)),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=60),
    )


def _unreadable(context: Context, trace: str) -> None:
    raise RuntimeError(f"rank {context.rank} could not read the call:\n{trace}")


def leave(context: Context) -> None:
    """Leave the process group as a correct program does."""
    if dist.is_initialized():
        dist.destroy_process_group()
