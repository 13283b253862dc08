"""One rank of ``smddp doctor --json`` on an emulated host, made to deviate by its arguments.

    doctor_rank.py [busy=PROCESSES] [clock=SECONDS] [package=FOLDER]

``busy``: this rank has one core, which it shares with so many processes that never rest and that
have precedence over it, so that it gets less of its core than others whatever else runs. ``clock``:
its clock is ahead by so much. ``package``: it imports the package that lies in this folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time


def never_rest() -> None:
    while True:
        pass


def main() -> int:
    wanted = dict(word.split("=") for word in sys.argv[1:])
    if "package" in wanted:  # before the tree that an editable installation names
        sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
        sys.path.insert(0, wanted["package"])
    from deepspeed_smddp.diagnostics import output_files
    from deepspeed_smddp.diagnostics.doctor import job_doctor

    if "clock" in wanted:
        true = time.time_ns
        time.time_ns = lambda: true() + int(float(wanted["clock"]) * 1e9)
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=never_rest, daemon=True) for _ in range(int(wanted.get("busy", 0)))
    ]
    if others:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for process in others:
        process.start()
    if others:
        os.nice(5)
    try:
        return job_doctor.run(None, output_files.STANDARD_OUTPUT, 120.0)
    finally:
        for process in others:
            process.kill()
            process.join()


if __name__ == "__main__":
    sys.exit(main())
