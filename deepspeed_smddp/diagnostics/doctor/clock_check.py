"""How far the clocks of the hosts are from that of rank 0's host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_smddp.diagnostics.clock_exchange import ClockServer, measure
from deepspeed_smddp.diagnostics.doctor import deviations
from deepspeed_smddp.diagnostics.doctor.deviations import Deviation
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.diagnostics.doctor.rank_facts import RankFacts, of_its_host

# NTP keeps clocks within some milliseconds. Beyond this, logs of two hosts are hard to compare.
MOST_SECONDS = 0.1


@dataclass(frozen=True)
class Clock:
    """A host's clock minus that of rank 0's host, in seconds; None if rank 0 did not answer."""

    offset: float | None = None
    uncertainty: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"offset": self.offset, "uncertainty": self.uncertainty}


def server() -> ClockServer | None:
    """The server of rank 0, started; None if it can open no port."""
    try:
        found = ClockServer(os.environ.get("MASTER_ADDR", "localhost"))
    except OSError:
        return None
    found.start()
    return found


def ask(contact: str) -> Clock:
    """This host's clock, asked over UDP; takes a second at most."""
    found = measure(contact) if contact else None
    return Clock() if found is None else Clock(found["offset"], found["uncertainty"])


def judge(clocks: Mapping[int, Clock], ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    """Hosts whose clocks differ from rank 0's by more than ``MOST_SECONDS``, for certain."""
    for rank, clock in sorted(clocks.items()):
        if clock.offset is None or abs(clock.offset) - clock.uncertainty <= MOST_SECONDS:
            continue
        members = of_its_host(rank, ranks)
        direction = "ahead of" if clock.offset > 0 else "behind"
        text = (
            f"{deviations.named(members, ranks)}: {abs(clock.offset):.3g} s {direction} the clock "
            f"of rank 0's host (within {clock.uncertainty * 1e3:.2g} ms), so that times in logs of "
            "these hosts do not match: run chrony or another NTP client on all hosts"
        )
        yield Deviation("clock", text, Verdict.LIMITED, tuple(members))
