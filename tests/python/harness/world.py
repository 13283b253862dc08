"""The test's side of worlds of rank processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness import layout as layouts
from harness import worker
from harness.namespaces import enter
from harness.worker import Failure
from tests.testbed import Testbed

DEADLINE = float(os.environ.get("SMDDP_TEST_DEADLINE", "60"))
LOOPBACK = {
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "SMDDP_FABRIC_INTERFACE": "lo",
    "OMP_NUM_THREADS": "1",
}

# Ranks are forked from a server that has imported torch and has no thread of the package yet: a
# world starts in a fraction of the seconds that importing torch takes.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["harness.preload"])


class WorldError(AssertionError):
    """Ranks failed, died or did not answer in time. ``failures`` has their exceptions, by rank."""

    def __init__(self, message: str, failures: dict[int, Failure]) -> None:
        super().__init__(message)
        self.failures = failures


def rank_environment(layout: str, rank: int, port: int) -> dict[str, str]:
    """The variables that a launcher would set for one rank."""
    local = layout.count(layout[rank])
    return {
        **LOOPBACK,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(layout)),
        "LOCAL_RANK": str(layouts.local_rank(layout, rank)),
        "LOCAL_SIZE": str(local),
        "LOCAL_WORLD_SIZE": str(local),
        "SMDDP_HOST_ID": f"host-{layout[rank]}",
        "SMDDP_TIMEOUT_SECONDS": "40",
    }


class World:
    """One process per rank of ``layout``, joined in one process group of ``backend``.

    The rendezvous store lives in this process, so that any rank may be killed. With ``bed``, host A
    is the testbed's first, and so on; data goes over each host's first NIC, the store is reached
    over its last.
    """

    def __init__(
        self,
        layout: str,
        backend: str | None = "smddp",
        env: dict[str, str | None] | None = None,
        deadline: float = DEADLINE,
        bed: Testbed | None = None,
    ) -> None:
        self.layout = layout
        self.deadline = deadline
        self.broken = False
        self._logs = Path(tempfile.mkdtemp(prefix="smddp-test-"))
        self.bed = bed
        self._store = self._make_store()
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._backend, self._env = backend, env or {}
        for rank in range(len(layout)):
            pipe, process = self._start(rank)
            self._pipes.append(pipe)
            self._processes.append(process)
        self._busy = set(range(len(layout)))  # each rank answers once when it has joined
        self._joined = False

    def _make_store(self) -> dist.TCPStore:
        def store(address: str) -> dist.TCPStore:
            return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

        if self.bed is None:
            return store(LOOPBACK["MASTER_ADDR"])
        # The network of a thread is that of its sockets and of the threads that it starts.
        pid, address = self.bed.switch_pid, self.bed.switch_addresses[-1]
        with ThreadPoolExecutor(1, initializer=enter, initargs=(pid, ("net",))) as inside:
            return inside.submit(store, address).result()

    def _start(self, rank: int) -> tuple[connection.Connection, Any]:
        ours, theirs = _processes.Pipe()
        environment = {**rank_environment(self.layout, rank, self._store.port), **self._env}
        host = None
        if self.bed is not None:
            host = self.bed.hosts[ord(self.layout[rank]) - ord("A")]
            environment["MASTER_ADDR"] = self.bed.switch_addresses[-1]
            environment["GLOO_SOCKET_IFNAME"] = host.interfaces[0]
            environment["SMDDP_FABRIC_INTERFACE"] = host.interfaces[0]
        process = _processes.Process(
            target=worker.main,
            args=(
                rank,
                self.layout,
                self._backend,
                environment,
                host.pid if host else None,
                str(self._logs / f"rank{rank}.log"),
                theirs,
            ),
            daemon=True,
        )
        process.start()
        theirs.close()
        return ours, process

    def replace(self, rank: int) -> None:
        """Kills a rank and starts another process for it, if ranks make their groups themselves."""
        assert self._backend is None
        self._processes[rank].kill()
        self._processes[rank].join(10)
        self._pipes[rank].close()
        self._pipes[rank], self._processes[rank] = self._start(rank)
        self._busy.add(rank)
        self.collect([rank])

    def join(self, timeout: float | None = None) -> World:
        if not self._joined:
            self._joined = True
            self.collect(timeout=timeout or self.deadline + 30)
        return self

    @property
    def size(self) -> int:
        return len(self.layout)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``function(context, *args)`` in every rank; ``collect`` has the answers."""
        self.submit_to(range(self.size), function, *args, **kwargs)

    def submit_to(
        self, ranks: Sequence[int], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        self.join()
        message = pickle.dumps((function, args, kwargs))
        for rank in ranks:
            assert rank not in self._busy, f"rank {rank} has not answered its last call"
            self._busy.add(rank)
            self._pipes[rank].send_bytes(message)

    def outcomes(
        self, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """Each rank's result, or its ``Failure``; raises if a rank is dead or late."""
        waiting = set(self._busy if ranks is None else ranks)
        results: dict[int, Any] = {}
        end = time.monotonic() + (timeout or self.deadline)
        try:
            while waiting:
                by_pipe = {self._pipes[rank]: rank for rank in waiting}
                ready = connection.wait(list(by_pipe), max(0.0, end - time.monotonic()))
                if not ready:
                    self._fail(f"no answer from ranks {sorted(waiting)} in time", results, waiting)
                for pipe in ready:
                    rank = by_pipe[pipe]  # type: ignore[index]
                    try:
                        results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    except (EOFError, ConnectionError):
                        self._processes[rank].join(5)
                        code = self._processes[rank].exitcode
                        self._fail(f"rank {rank} died, exit code {code}", results, waiting)
                    waiting.discard(rank)
                    self._busy.discard(rank)
        except BaseException:  # also the test's own time limit: an unfinished world is not reused
            self.close()
            raise
        return results

    def collect(
        self, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Each rank's result, in rank order; raises if a rank raised."""
        results = self.outcomes(ranks, timeout)
        failed = [value for value in results.values() if isinstance(value, Failure)]
        if failed:
            self._fail("ranks raised", results, set())
        return [results[rank] for rank in sorted(results)]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs ``function(context, *args)`` in every rank; returns the results in rank order."""
        self.submit(function, *args, **kwargs)
        return self.collect(timeout=timeout)

    def failures(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Failure]:
        """Like ``run`` for a function that must raise in every rank."""
        self.submit(function, *args)
        results = self.outcomes(timeout=timeout)
        quiet = {r: v for r, v in results.items() if not isinstance(v, Failure)}
        if quiet:
            self._fail(f"ranks {sorted(quiet)} did not raise: {quiet}", results, set())
        return [results[rank] for rank in sorted(results)]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._processes[rank].pid, number)

    def exit_status(self, rank: int, timeout: float) -> int | None:
        """Of a rank's process, which ends by itself; None if it does not within ``timeout`` s."""
        self.broken = True
        self._busy.discard(rank)
        self._processes[rank].join(timeout)
        return self._processes[rank].exitcode

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def _fail(self, reason: str, results: dict[int, Any], late: set[int]) -> None:
        __tracebackhide__ = True
        self.broken = True
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, signal.SIGUSR1)  # writes its threads' stacks to its log
        if late:
            time.sleep(0.3)
        lines = [f"world {self.layout}: {reason}"]
        failures = {r: v for r, v in results.items() if isinstance(v, Failure)}
        seen: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            seen.setdefault(failure.trace, []).append(rank)
        for trace, ranks in seen.items():
            lines.append(f"--- raised in ranks {ranks}:\n{trace.rstrip()}")
        for rank in range(self.size):
            log = self._logs / f"rank{rank}.log"
            text = log.read_text(errors="replace").strip() if log.exists() else ""
            if text:
                lines.append(f"--- output of rank {rank}:\n{text[-3000:]}")
        self.close()
        raise WorldError("\n".join(lines), failures)

    def log(self, rank: int) -> str:
        return (self._logs / f"rank{rank}.log").read_text(errors="replace")

    def close(self) -> None:
        """End every process, in any state, and remove the world's files."""
        self.broken = True
        if self._store is None:
            return
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._store = None  # type: ignore[assignment]
        shutil.rmtree(self._logs, ignore_errors=True)


class Pool:
    """Worlds kept alive between tests, at most ``limit`` processes of them."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._worlds: dict[tuple[Any, ...], World] = {}

    def __call__(
        self, layout: str, backend: str = "smddp", env: dict[str, str | None] | None = None
    ) -> World:
        key = (layout, backend, tuple(sorted((env or {}).items())))
        world = self._worlds.pop(key, None)
        if world is None or world.broken:
            while self._worlds and sum(w.size for w in self._worlds.values()) > (
                self._limit - len(layout)
            ):
                self._worlds.pop(next(iter(self._worlds))).close()
            world = World(layout, backend, env)
        self._worlds[key] = world  # most recently used last
        return world.join()

    def close(self) -> None:
        """Ends all worlds; every group that is still usable must end without an error."""
        worlds, self._worlds = list(self._worlds.values()), {}
        try:
            for world in worlds:
                if not world.broken:
                    world.run(worker.leave)
        finally:
            for world in worlds:
                world.close()


@contextlib.contextmanager
def fresh(layout: str, **options: Any) -> Iterator[World]:
    """A world for one test, which may kill, stop or desynchronise it."""
    world = World(layout, **options)
    try:
        yield world.join()
    finally:
        world.close()


def shared_memory_left() -> list[str]:
    """Names of this project in /dev/shm; an unlinked segment has none."""
    return sorted(name for name in os.listdir("/dev/shm") if "smddp" in name.lower())
