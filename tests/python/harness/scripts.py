"""Runs a script of tests/python/scripts, unchanged, as one rank of a job."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "scripts"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The script's ``losses``, averaged over the ranks, its ``found``, and the backend's counters.

    If the job has ``fails``: the sentence of the exception that the script raises.
    """
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(FOLDER))
    sys.argv = [str(FOLDER / f"{job['script']}.py")]
    if not torch.cuda.is_available():
        _without_gpu()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec")
    if job.get("fails"):
        try:
            exec(code, namespace)
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {error}"}
        return {"raised": None}
    exec(code, namespace)
    losses = torch.tensor(namespace["losses"], dtype=torch.float64)
    counters: list[dict[str, Any]] = []
    backend = None
    if dist.is_initialized():
        backend = dist.get_backend()
        import deepspeed_smddp

        counters = [dict(row) for row in deepspeed_smddp.statistics()]
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        dist.destroy_process_group()
    return {
        "losses": losses.tolist(),
        "found": namespace.get("found", {}),
        "statistics": counters,
        "backend": backend,
    }


def example(job: dict[str, Any]) -> dict[str, Any]:
    """The output of a script of examples/ that is run with ``arguments`` and must succeed.

    Nothing may go to the fallback.
    """
    os.environ["SMDDP_FALLBACK"] = "error"
    os.environ["FORCE_COLOR"] = "1"  # as on a terminal, which shows progress bars
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(EXAMPLES / job["script"]), *job["arguments"]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{sys.argv[0]} ended with status {end.code}"
    return {"printed": printed.getvalue()}


def example_without_bf16(job: dict[str, Any]) -> dict[str, Any]:
    """The same on a processor that has no instructions for bf16."""
    import torch

    torch.cpu.get_capabilities = lambda: {"avx2": True, "avx512_bf16": False}
    return example(job)


def _without_gpu() -> None:
    # The scripts name CUDA devices, as they must on a machine with GPUs.
    import torch

    torch.cuda.set_device = lambda device: None
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
            return self
        return original(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign]
