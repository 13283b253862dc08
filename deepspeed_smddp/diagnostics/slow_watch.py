"""Names the rank or the link that holds up the others, while a job runs.

A thread of each rank hands over what the rank has counted, once per interval and over the store;
rank 0 compares, and writes a line to the log.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.diagnostics.report_exchange import remove
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.errors import logger

# Their models need pydantic, whose import takes as long as that of the rest of the package. So they
# are imported by the thread, once the first interval is over.
if TYPE_CHECKING:
    from deepspeed_smddp.diagnostics.report.dump import Group

_PREFIX = "smddp-slow"
_ANSWER = timedelta(seconds=3)
# Rank 0 gives the others so much of an interval to hand over theirs.
_PATIENCE = 0.1
_MOST_PATIENCE_SECONDS = 2.0


class Watcher(threading.Thread):
    """The thread of one rank. It ends with :meth:`stop`, with the store, or with the process."""

    def __init__(self, store: Any, rank: int, ranks: int, interval: float) -> None:
        super().__init__(name="smddp-slow", daemon=True)
        self._store: Any = dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]
        # Over the connection that there is: rank 0 may leave at once, and another connection to a
        # store whose process has ended would be tried for minutes.
        self._store.set(str(rank), "")
        self._rank, self._ranks, self._interval = rank, ranks, interval
        self._ended = threading.Event()
        self._known: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._number = 0
        self._taken: dict[int, bytes] = {}  # the latest number of each rank that rank 0 has seen
        self._said: set[str] = set()

    def run(self) -> None:
        """Hands over what each interval has counted."""
        started = time.monotonic()
        try:
            # A process that ends sooner opens no connection: the store may have ended before it,
            # and a thread that still tries when the interpreter has ended aborts the process.
            if self._ended.wait(self._interval):
                return
            # A connection of its own: others may wait for minutes on the store's, under its lock.
            self._store = self._store.clone()
            self._store.set_timeout(_ANSWER)
            while not self._ended.wait(max(0.0, started + self._interval - time.monotonic())):
                now = time.monotonic()
                self._hand_over(now - started)
                started = now
                if self._rank == 0:
                    patience = min(_PATIENCE * self._interval, _MOST_PATIENCE_SECONDS)
                    if self._ended.wait(patience):
                        return
                    self._compare()
        except RuntimeError:  # the store has ended: so does the job
            return
        except Exception as error:  # training goes on
            logger.warning("smddp: slow ranks are looked for no longer: %s", error)
        finally:
            remove(self._store, str(self._rank))

    def stop(self) -> None:
        """Ends the thread, at most after a request to the store."""
        self._ended.set()
        if self is not threading.current_thread():
            self.join(timeout=_ANSWER.total_seconds())

    def _hand_over(self, seconds: float) -> None:
        from deepspeed_smddp.diagnostics.report import dump, slowness

        seen = slowness.Seen(rank=self._rank, host="", seconds=seconds)
        states = [dump.Group.model_validate(state) for state in backend.states()]
        groups = {(group.name, tuple(group.members)): group for group in states}
        for key, group in groups.items():
            seen.host = group.hosts[group.rank] if group.hosts else ""
            seen.count(group, self._known.get(key))
        self._known = groups
        self._number += 1
        self._store.set(str(self._rank), f"{self._number} {seen.model_dump_json()}")

    def _compare(self) -> None:
        from deepspeed_smddp.diagnostics.report import slowness

        found = []
        for rank, text in enumerate(self._store.multi_get([str(r) for r in range(self._ranks)])):
            number, _, seen = text.partition(b" ")
            if seen and self._taken.get(rank) != number:
                self._taken[rank] = number
                found.append(slowness.Seen.model_validate_json(seen))
        for slow in slowness.news(found, self._said):
            logger.warning("smddp: %s (see docs/my-job-hangs.md, slow but not hung)", slow.text)


def start(ends: ExitStack, store: Any, rank: int, ranks: int) -> None:
    """A default group is made; ``slow_seconds`` says how often its ranks are compared, 0: never.

    ``ends`` gets what ends the watch.
    """
    interval = settings.current().section.slow_seconds
    if interval == 0 or ranks < 2:
        return
    try:
        watcher = Watcher(store, rank, ranks, interval)
    except (RuntimeError, AttributeError) as error:
        logger.info("smddp: slow ranks are not looked for: %s", error)
        return
    watcher.start()
    ends.callback(watcher.stop)
