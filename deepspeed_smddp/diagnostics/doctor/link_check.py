"""One rank's part in the test of the links: a pair with one rank of each other host, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_smddp.diagnostics.doctor import host_pairs, pair_rate
from deepspeed_smddp.diagnostics.doctor.meeting import Meeting

# The timeout of one pair; the time after which no further pair begins.
PAIR_SECONDS = 5.0
ALL_SECONDS = 30.0
# After as many failed pairs and no other, a host is not tried with the rest.
MOST_FAILED = 2

MEASURED, BLOCKED, SKIPPED = "measured", "blocked", "skipped"


@dataclass(frozen=True)
class Half:
    """What one rank says of a pair: its rate in bytes per second each way, or why it has none."""

    round: int
    partner: int  # a rank
    state: str
    rate: float = 0.0
    why: str = ""
    network: str = ""  # the network model that the pair's group used
    network_source: str = ""


def run(meeting: Meeting, ranks: Sequence[int], most_rounds: int) -> list[Half]:
    """Measures this rank with each of the others in turn; rank 0's store keeps them in step.

    Args:
        ranks: one rank of each host. A rank that is not among them measures nothing.
    """
    if meeting.rank not in ranks:
        return []
    found: list[Half] = []
    end = time.monotonic() + ALL_SECONDS
    own = ranks.index(meeting.rank)
    for number, pairs in enumerate(host_pairs.schedule(len(ranks), most_rounds)):
        other = host_pairs.partner(pairs, own)
        if other is not None:
            refusal = _refusal(found, ranks[other], end)
            found.append(_pair(meeting, number, ranks[other], refusal, end))
    return found


def _refusal(found: Sequence[Half], partner: int, end: float) -> str:
    """Why this rank does not measure with a partner; "" if it does."""
    states = [half.state for half in found]
    if any(half.partner == partner and half.state == BLOCKED for half in found):
        return "no data passed before"
    if states.count(BLOCKED) >= MOST_FAILED and MEASURED not in states:
        return f"no data passed in {MOST_FAILED} other pairs of it"
    return "" if time.monotonic() < end else f"the test ends after {ALL_SECONDS:.0f} s"


def _pair(meeting: Meeting, number: int, partner: int, refusal: str, end: float) -> Half:
    name = f"{min(meeting.rank, partner)}-{max(meeting.rank, partner)}"
    # A partner may still be in a pair that fails. Only when both have come does the time begin.
    meeting.put(f"pair/{number}/{meeting.rank}", refusal)
    if refusal:
        return Half(number, partner, SKIPPED, why=refusal)
    answer = meeting.get(f"pair/{number}/{partner}", max(end - time.monotonic(), PAIR_SECONDS))
    if answer is None:
        answer = f"rank {partner} did not come to this pair"
        meeting.put(f"pair/{number}/{meeting.rank}", answer)  # should it come yet
    if answer:
        return Half(number, partner, SKIPPED, why=answer)
    place = int(meeting.rank > partner)
    try:
        store = meeting.part(f"pair-store/{number}/{name}")
        rate, network, source = pair_rate.measure(store, place, f"doctor {name}", PAIR_SECONDS)
    except Exception as error:  # the other pairs are still to be measured
        return Half(number, partner, BLOCKED, why=str(error).strip() or type(error).__name__)
    return Half(number, partner, MEASURED, rate, network=network, network_source=source)
