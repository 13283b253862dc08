"""Trains a tiny GPT-NeoX with DeepSpeed ZeRO-3: one process that forks the ranks of each job.

Importing DeepSpeed and transformers takes seconds per process, so one process does it for all
ranks. It reads one job per line of standard input and answers each with one line: the results of
its ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import layout as layouts

RankMain = Callable[[dict[str, Any], int, int], dict[str, Any]]

STEPS = 4
MODEL = {
    "vocab_size": 256,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 144,
    "max_position_embeddings": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def config(backend: str, precision: str) -> dict[str, Any]:
    """A DeepSpeed config; the one key that users write chooses smddp."""
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 2e-3, "eps": 1e-6}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 30_000,
            "stage3_prefetch_bucket_size": 20_000,
            "stage3_param_persistence_threshold": 200,
            "stage3_max_live_parameters": 100_000,
        },
        "steps_per_print": 1_000_000,
    }
    if precision == "bf16":
        chosen["bf16"] = {"enabled": True}
    if backend == "smddp":
        chosen["comm_backend"] = "smddp"
    return chosen


def train(backend: str, precision: str) -> list[float]:
    """The mean losses of all ranks, one per step."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(3)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**MODEL, use_cache=False))
    model.config.use_cache = False
    if backend != "smddp" and not dist.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(backend, precision)
    )
    assert dist.get_backend() == backend, dist.get_backend()
    losses = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 64, (2, 33), generator=random)
        tokens[:, 1::2] = tokens[:, :-1:2] + 1  # a pattern to learn
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    engine.destroy()
    return losses


def rank_main(job: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from harness.world import rank_environment

    os.environ.update(rank_environment(job["layout"], rank, port))
    os.environ["LOCAL_RANK"] = str(layouts.local_rank(job["layout"], rank))
    torch.set_num_threads(1)
    if "call" in job:
        module, _, function = job["call"].partition(":")
        answer: dict[str, Any] = getattr(importlib.import_module(module), function)(job)
        return answer
    losses = {precision: train(job["backend"], precision) for precision in job["precisions"]}
    rows: list[dict[str, Any]] = []
    if job["backend"] == "smddp":
        import deepspeed_smddp

        rows = [dict(row) for row in deepspeed_smddp.statistics()]
    dist.destroy_process_group()
    return {"losses": losses, "statistics": rows}


def serve(main: RankMain = rank_main) -> None:
    """Answer jobs until standard input ends. The real standard output carries only answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import torch.distributed as dist
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    import deepspeed  # noqa: F401
    from deepspeed.accelerator import get_accelerator
    from transformers import GPTNeoXForCausalLM  # noqa: F401

    # init_distributed loads it on every rank; it is compiled once here, then read from the cache.
    with contextlib.suppress(Exception):
        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
    answers.write(json.dumps("ready") + "\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        size = len(job["layout"])
        probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = probe.port
        del probe
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_fork(main, job, rank, port, Path(folder) / str(rank)) for rank in range(size)]
            late = _reap(ranks, job["limit"])
            results = []
            for rank in range(size):
                path = Path(folder) / str(rank)
                text = path.read_text() if path.exists() else ""
                results.append(json.loads(text) if text else {"error": "late" if late else "died"})
        for left in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{port}_*"):
            left.unlink(missing_ok=True)  # DeepSpeed's own shared memory, which it never unlinks
        answers.write(json.dumps(results) + "\n")
        answers.flush()


def _fork(main: RankMain, job: dict[str, Any], rank: int, port: int, path: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child != 0:
        return child
    try:
        result = main(job, rank, port)
    except BaseException:
        result = {"error": traceback.format_exc()}
    path.write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)


def _reap(children: list[int], limit: float) -> bool:
    """Wait for all children; True if the limit passed and the rest was killed."""
    end = time.monotonic() + limit
    running = set(children)
    while running and time.monotonic() < end:
        for child in list(running):
            if os.waitpid(child, os.WNOHANG)[0]:
                running.discard(child)
        time.sleep(0.02)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return bool(running)


class Trainer:
    """The test's side of a process that serves jobs."""

    def __init__(self, module: str = "harness.training") -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the trainer
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import serve; serve()"],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self._answer() == "ready"

    def run(self, layout: str, backend: str, limit: float = 120) -> list[dict[str, Any]]:
        return self.ask(
            {
                "layout": layout,
                "backend": backend,
                "precisions": ["fp32", "bf16"],
                "limit": limit,
            }
        )

    def call(
        self, function: str, layout: str, backend: str, limit: float = 120, **given: Any
    ) -> list[dict[str, Any]]:
        """The result of ``function`` ("module:name") on each rank; it is called with the job."""
        job = {"call": function, "layout": layout, "backend": backend, "limit": limit}
        return self.ask({**job, **given})

    def ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """The result of each rank; the job has at least a ``layout`` and a ``limit``."""
        results = self.attempt(job)
        errors = [result["error"] for result in results if "error" in result]
        assert not errors, "\n".join([*errors, self._tail()])
        return results

    def attempt(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Like :meth:`ask`, but ranks may fail: their "error" is "died", "late" or a traceback."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        results: list[dict[str, Any]] = self._answer()
        return results

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the trainer ended:\n{self._tail()}"
        return json.loads(line)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-6000:]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()
