"""A rank's end of its pipes, for rank programs in Python. Those in C and C++ use ``turns.h``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def serve(
    pipes: Path,
    rank: int,
    hello: Mapping[str, Any],
    handle: Callable[[str, list[str], float], Mapping[str, Any]],
) -> None:
    """Answers commands until the command ``quit``.

    ``hello`` is the first answer. ``handle(verb, words, idle)`` returns the other answers; ``idle``
    is the CPU time in seconds that this process used while it waited for the command.
    """
    with (
        (pipes / f"{rank}.commands").open() as commands,
        (pipes / f"{rank}.answers").open("w") as answers,
    ):
        print(json.dumps(hello), file=answers, flush=True)
        waiting_since = time.process_time()
        while line := commands.readline():
            idle = time.process_time() - waiting_since
            verb, *words = line.split()
            if verb == "quit":
                break
            print(json.dumps(handle(verb, words, idle)), file=answers, flush=True)
            waiting_since = time.process_time()
