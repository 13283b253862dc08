"""What a rank says of itself for ``smddp doctor``, and where ranks differ: plain data, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Literal

from deepspeed_smddp.diagnostics.report.wording import consecutive


class Verdict(Enum):
    """The consequence of a finding for training."""

    OK = "ok"
    LIMITED = "limited"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    verdict: Verdict = Verdict.OK


def limited(name: str, text: str) -> Finding:
    """A finding that costs speed or a feature, and no training."""
    return Finding(name, text, Verdict.LIMITED)


# Ranks of the whole job must agree, or those of one host; or the value is only shown.
Scope = Literal["job", "host", "own"]


@dataclass(frozen=True)
class Fact:
    """A name, its value as text, and what follows if ranks have different values.

    ``detail`` is shown after the value and not compared.
    """

    name: str
    value: str
    scope: Scope = "job"
    if_different: Verdict = Verdict.LIMITED
    detail: str = ""

    @property
    def shown(self) -> str:
        """The value as people read it."""
        return f"{self.value} ({self.detail})" if self.detail else self.value


@dataclass
class RankFacts:
    """What one rank says of itself; ``host`` is its name for people, ``host_id`` for comparison."""

    rank: int
    host: str
    host_id: str
    local_rank: int
    facts: list[Fact] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)


def of_its_host(rank: int, ranks: Sequence[RankFacts]) -> list[int]:
    """All ranks of the host of this one; of a rank without facts that one alone."""
    host_id = next((known.host_id for known in ranks if known.rank == rank), None)
    return [known.rank for known in ranks if known.host_id == host_id] or [rank]


ABSENT = "not set"


@dataclass(frozen=True)
class Deviation:
    """One thing that is wrong on some ranks, with the ranks by number."""

    name: str
    text: str
    verdict: Verdict
    ranks: tuple[int, ...]


def deviations(ranks: Sequence[RankFacts]) -> list[Deviation]:
    """Problems of ranks and facts in which ranks differ, those that fail first."""
    found = [*_problems(ranks), *_differences(ranks)]
    return sorted(found, key=lambda deviation: deviation.verdict is not Verdict.FAILED)


def same(ranks: Sequence[RankFacts]) -> list[Fact]:
    """The facts that all ranks must share, and do."""
    first = [fact for fact in ranks[0].facts if fact.scope == "job"]
    others = [{fact.name: fact.value for fact in rank.facts} for rank in ranks[1:]]
    return [fact for fact in first if all(rank.get(fact.name) == fact.value for rank in others)]


def _problems(ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    by_problem: dict[tuple[str, str, Verdict], list[int]] = {}
    for rank in ranks:
        for problem in rank.problems:
            key = (problem.name, problem.text, problem.verdict)
            by_problem.setdefault(key, []).append(rank.rank)
    for (name, text, verdict), who in by_problem.items():
        yield Deviation(name, f"{named(who, ranks)}: {text}", verdict, tuple(who))


def _differences(ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    # A rank without the compiled module or libfabric has no facts that these would give; the
    # problem says so.
    by_rank = {rank.rank: {fact.name: fact for fact in rank.facts} for rank in ranks}
    troubled = {rank.rank: {problem.name for problem in rank.problems} for rank in ranks}
    names: dict[str, Fact] = {}
    for rank in ranks:
        names |= {fact.name: fact for fact in rank.facts if fact.name not in names}
    for name, example in names.items():
        for group in _compared_together(example, ranks):
            values: dict[str, list[int]] = {}
            shown = {}
            for rank in group:
                fact = by_rank[rank.rank].get(name)
                if fact is None and name in troubled[rank.rank]:
                    continue
                value = ABSENT if fact is None else fact.value
                values.setdefault(value, []).append(rank.rank)
                shown[value] = ABSENT if fact is None else fact.shown
            if len(values) > 1:
                yield _difference(example, values, shown, ranks)


def _compared_together(fact: Fact, ranks: Sequence[RankFacts]) -> Iterable[Sequence[RankFacts]]:
    if fact.scope == "own":
        return []
    if fact.scope == "job":
        return [ranks]
    ordered = sorted(ranks, key=lambda rank: rank.host_id)
    return [list(group) for _, group in groupby(ordered, key=lambda rank: rank.host_id)]


def _difference(
    fact: Fact, values: dict[str, list[int]], shown: dict[str, str], ranks: Sequence[RankFacts]
) -> Deviation:
    """The smaller groups by their ranks, against the value of most ranks where there is one."""
    counts = Counter({value: len(who) for value, who in values.items()})
    most, count = counts.most_common(1)[0]
    common = most if 2 * count > counts.total() else None
    parts = [
        f"{named(who, ranks)}: {shown[value]}" for value, who in values.items() if value != common
    ]
    if common is not None:
        parts.append(
            f"{'the others' if count > 1 else named(values[common], ranks)}: {shown[common]}"
        )
    who = sorted(rank for value, group in values.items() if value != common for rank in group)
    return Deviation(fact.name, "; ".join(parts), fact.if_different, tuple(who))


def named(who: Sequence[int], ranks: Sequence[RankFacts]) -> str:
    """``rank 3 (host b)``, ``host b (ranks 2-3)``, ``all ranks``."""
    if len(who) == len(ranks):
        return "all ranks"
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank.rank)
    named_hosts = [host for host, members in hosts.items() if set(members) & set(who)]
    numbers = f"rank{'' if len(who) == 1 else 's'} {ranges(who)}"
    many = ", ".join(named_hosts[:4]) + (", ..." if len(named_hosts) > 4 else "")
    plural = "" if len(named_hosts) == 1 else "s"
    if sum(len(hosts[host]) for host in named_hosts) == len(who):
        return f"host{plural} {many} ({numbers})"
    return f"{numbers} (host{plural} {many})"


def ranges(numbers: Iterable[int]) -> str:
    """``0-2,5`` of 0, 1, 2, 5."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in consecutive(numbers))
