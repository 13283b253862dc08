"""How far the clocks of a job's hosts are apart, and how sure that is.

Ranks of one host share its clock. One rank of every other host has asked rank 0 for the time
(``rank_ports.measure``). Where none has, collectives say it: on no rank does an AllGather,
ReduceScatter, AllReduce or barrier end before the last rank has called it. With o as the offset of
a host's clock, two hosts A and B and any such collective,

    call_B - o_B <= end_A - o_A    and    call_A - o_A <= end_B - o_B,

so that o_A - o_B lies between the largest call_A - end_B and the smallest end_A - call_B, over all
collectives. As with a ping, the middle is the estimate, and half the width its uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deepspeed_smddp.diagnostics.report.dump import Dump

# All members of the group take part in these, and each of them gets something from all others.
_ALL_WITH_ALL = ("all_gather", "reduce_scatter", "all_reduce", "barrier")


@dataclass(frozen=True)
class HostClock:
    """The clock of a host: what it shows minus what the reference shows, in seconds.

    The true offset lies within ``uncertainty`` of ``offset``; infinite if nothing bounds it.
    ``source`` says in words where the two come from, ``warning`` that the record contradicts them.
    """

    host: str
    offset: float = 0.0
    uncertainty: float = 0.0
    source: str = "the reference"
    warning: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the uncertainty is bounded."""
        return math.isfinite(self.uncertainty)

    @property
    def text(self) -> str:
        """``+3.20 ms, within 0.05 ms``, for people."""
        if not self.is_known:
            return "not known"
        return f"{self.offset * 1e3:+.3f} ms, within {self.uncertainty * 1e3:.3f} ms"


@dataclass
class _Times:
    """One collective on one host: the last call and the first end of its ranks."""

    call: float = -math.inf
    end: float = math.inf


_Collectives = list[dict[str, _Times]]


def host_clocks(dumps: Mapping[int, Dump]) -> dict[str, HostClock]:
    """The clock of each host that has left a dump, by its name.

    The reference is the clock of rank 0, which ranks ask; without a dump of a rank that was asked
    or has asked, that of the lowest rank.
    """
    hosts = list(dict.fromkeys(dump.host for _, dump in sorted(dumps.items())))
    collectives = list(_collectives(dumps))
    reference = dumps[0].host if 0 in dumps else None
    clocks = {} if reference is None else {reference: HostClock(reference)}
    for dump in dumps.values():
        asked = dump.clock
        if asked is not None and dump.host not in clocks:
            source = f"{asked.round_trips} round trips to rank 0"
            clock = HostClock(dump.host, asked.offset, asked.uncertainty, source)
            clocks[dump.host] = _checked(clock, reference, collectives)
    if not clocks and hosts:
        clocks[hosts[0]] = HostClock(hosts[0])
    _place_others(hosts, clocks, collectives)
    return {host: clocks[host] for host in hosts}


def _between(first: str, second: str | None, collectives: _Collectives) -> tuple[float, float]:
    """Between which values the clock of the first host minus that of the second lies.

    Infinite without a bound; the low value is above the high one if the clocks have drifted.
    """
    low, high = -math.inf, math.inf
    for times in collectives:
        if first in times and second in times:
            low = max(low, times[first].call - times[second].end)
            high = min(high, times[first].end - times[second].call)
    return low, high


def _collectives(dumps: Mapping[int, Dump]) -> Iterator[dict[str, _Times]]:
    """For each collective that several hosts have in their rings, its times by host."""
    found: dict[tuple[str, tuple[int, ...], int, str], dict[str, _Times]] = {}
    for dump in dumps.values():
        members = {group.name: tuple(group.members) for group in dump.groups}
        for op in dump.operations:
            if op.operation not in _ALL_WITH_ALL or op.sequence == 0 or op.bytes == 0:
                continue
            key = (op.group, members.get(op.group, ()), op.sequence, op.operation)
            times = found.setdefault(key, {}).setdefault(dump.host, _Times())
            if op.called is not None:
                times.call = max(times.call, op.called)
            if op.last_byte is not None and op.state == "done":
                times.end = min(times.end, op.last_byte)
    return (times for times in found.values() if len(times) > 1)


def _checked(clock: HostClock, reference: str | None, collectives: _Collectives) -> HostClock:
    """The clock, with a larger uncertainty if the collectives contradict it."""
    low, high = _between(clock.host, reference, collectives)
    beyond = max(low - clock.offset, clock.offset - high) - clock.uncertainty
    if beyond <= 0:
        return clock
    return replace(
        clock,
        uncertainty=clock.uncertainty + beyond,
        warning=f"during the record this clock and the reference drifted by {beyond * 1e3:.3g} ms",
    )


def _place_others(
    hosts: list[str], clocks: dict[str, HostClock], collectives: _Collectives
) -> None:
    """Adds the hosts of which no rank has asked, the surest ones first."""
    while others := [host for host in hosts if host not in clocks]:
        ways = []
        for known in clocks.values():
            for host in others:
                low, high = _between(host, known.host, collectives)
                if math.isfinite(high - low):
                    uncertainty = known.uncertainty + abs(high - low) / 2
                    ways.append((uncertainty, host, known.host, known.offset + (low + high) / 2))
        if not ways:
            for host in others:
                clocks[host] = HostClock(host, 0.0, math.inf, "nothing: taken as equal")
            return
        uncertainty, host, via, offset = min(ways)
        clocks[host] = HostClock(host, offset, uncertainty, f"collectives with {via}")
