"""One rank: runs trainings (``zero3``, ``fsdp2``), each in a new process.

Needs torch alone, and DeepSpeed for ``zero3``. ``python training.py JOBS`` with a list as JSON,
each of ``program``, ``backend``, ``port``, ``steps``, ``folder`` for a checkpoint, ``save_at`` (a
step, or none), ``load`` (whether to start from the checkpoint), ``answer``: the file for losses and
what took part. RANK and the other variables of a launcher are set, but for MASTER_PORT. The
processes are forked from one that has imported the programs. After a training that failed there is
no other.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(job: dict[str, Any]) -> None:
    os.environ["MASTER_PORT"] = str(job["port"])
    calls: Counter[str] = Counter()
    program = importlib.import_module(job["program"])
    ours = job["backend"] == "smddp"
    if ours:
        program.count_calls(calls)
    answer: dict[str, Any] = {
        "losses": program.train(job),
        "autoloaded": "smddp_autoload" in sys.modules,
    }
    if ours:
        from deepspeed_smddp.distributed import backend

        answer["features"] = program.features(calls)
        answer["collectives"] = {
            f"{row['collective']} by {row['path']}": row["calls"] for row in backend.statistics()
        }
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(sys.argv[1])
    for job in jobs:
        importlib.import_module(job["program"])
    for job in jobs:
        child = os.fork()
        if child == 0:
            try:
                run(job)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(1)


main()
