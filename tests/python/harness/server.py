"""A process that has done a job's imports once and forks the ranks of each job.

Importing torch, DeepSpeed and transformers takes seconds per process, most of what a test of tiny
models costs. The server executes a preamble, the imports, and then reads one job per line of
standard input; it answers each job with one line, what each rank returned.

Called by ``harness.training`` (functions of the harness as ranks) and ``harness.programs`` (texts
of programs as ranks). A test of the imports themselves starts interpreters of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any


class Server:
    """The test's side of a server. ``preamble`` is Python text, executed once in the server."""

    def __init__(self, preamble: str) -> None:
        self.closed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from harness.server import serve; serve()"],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self.ask(preamble) == "ready"

    def ask(self, job: Any) -> Any:
        """What the server answers to ``job``; see :func:`serve`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, f"the server ended:\n{self.log()}"
        except BaseException:  # also the test's own time limit: a late answer is for no other job
            self.close()
            raise
        return json.loads(line)

    def log(self) -> str:
        """The end of what the server and its ranks wrote to standard error."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-6000:]

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


_servers: dict[str, Server] = {}


def with_imports(preamble: str) -> Server:
    """The server of this test process for ``preamble``, started when it is first needed."""
    if preamble not in _servers or _servers[preamble].closed:
        _servers[preamble] = Server(preamble)
    return _servers[preamble]


def close_all() -> None:
    """End all servers and their ranks."""
    while _servers:
        _servers.popitem()[1].close()


# ---- in the server's process


def serve() -> None:
    """Execute the preamble, then answer jobs until standard input ends.

    ``start`` in a job is the text of a program that each rank executes as ``__main__``, with its
    environment of ``envs``. It is not waited for: the ranks write into ``folder``, each has a
    session of its own, and the answer is their process ids. ``ended`` names such processes; the
    answer is the exit codes of those that have ended.

    Any other job has ``size``, the number of ranks; ``limit``, in seconds; and ``main``, the
    function ("module:name") that each rank calls with the job, its rank and the job's ``port``, and
    whose answer is returned. A ``main`` that fails answers with an ``error``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the real standard output carries only answers

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    namespace = vars(sys.modules["__main__"])
    exec(json.loads(sys.stdin.readline()), namespace)
    gc.collect()
    gc.freeze()  # the ranks' garbage collections leave what was imported alone
    answer("ready")
    for line in sys.stdin:
        job = json.loads(line)
        if "start" in job:
            answer(_start(job, namespace))
            continue
        if "ended" in job:
            answer(_codes(job["ended"]))
            continue
        # No context manager: a rank that ends like an interpreter would remove the folder.
        folder = Path(tempfile.mkdtemp())
        results = _run_functions(job, folder)
        shutil.rmtree(folder)
        answer(results)


def _start(job: dict[str, Any], namespace: dict[str, Any]) -> list[int]:
    pids = []
    for rank, env in enumerate(job["envs"]):
        pids.append(_fork())
        if pids[-1] == 0:
            os.setsid()
            os.chdir(job["folder"])
            out = _new_file(Path(f"{rank}.out"))
            err = out if job["merged"] else _new_file(Path(f"{rank}.err"))
            _execute(job["start"], env, (out, err), namespace)
    return pids


def _codes(pids: list[int]) -> dict[int, int]:
    ended = (os.waitpid(pid, os.WNOHANG) for pid in pids)
    return {pid: os.waitstatus_to_exitcode(status) for pid, status in ended if pid}


def _run_functions(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    children = {}
    for rank in range(job["size"]):
        child = _fork()
        if child == 0:
            _call(job, rank, folder / str(rank))
        children[child] = rank
    codes = _reap(children, job["limit"])
    results = []
    for rank in range(job["size"]):
        path = folder / str(rank)
        text = path.read_text() if path.exists() else ""
        late = None in codes.values()
        results.append(json.loads(text) if text else {"error": "late" if late else "died"})
    for left in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{job['port']}_*"):
        left.unlink(missing_ok=True)  # DeepSpeed's own shared memory, which it never unlinks
    return results


def _call(job: dict[str, Any], rank: int, path: Path) -> None:
    try:
        module, _, function = job["main"].partition(":")
        result = getattr(importlib.import_module(module), function)(job, rank, job["port"])
    except BaseException:
        result = {"error": traceback.format_exc()}
    path.write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


def _execute(
    program: str, env: dict[str, str], files: tuple[int, int], namespace: dict[str, Any]
) -> None:
    """Ends like an interpreter that was given ``program``: with its exit handlers, and its code.

    ``files``: the descriptors of its standard output and standard error.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in zip((nothing, *files), (0, 1, 2), strict=True):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c"]
    try:
        exec(compile(program, "<program>", "exec"), namespace)
    except SystemExit:
        raise
    except BaseException as error:  # as the interpreter itself does
        sys.last_value = error
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _reap(children: dict[int, int], limit: float) -> dict[int, Any]:
    """Exit codes by rank; None for a rank that had to be killed at the limit."""
    codes: dict[int, Any] = {}
    end = time.monotonic() + limit
    while len(codes) < len(children) and time.monotonic() < end:
        for child, rank in children.items():
            if rank in codes:
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child, rank in children.items():
        if rank not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes[rank] = None
    return codes
