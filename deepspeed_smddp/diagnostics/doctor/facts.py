"""What a rank says of itself for ``smddp doctor``, and where ranks differ: plain data, compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from deepspeed_smddp.diagnostics.report.wording import rank_list


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

    def value(self, name: str) -> str:
        """The value of a fact; "" without it."""
        return next((fact.value for fact in self.facts if fact.name == name), "")


def of_its_host(rank: int, ranks: Sequence[RankFacts]) -> list[int]:
    """All ranks of the host of this one; of a rank without facts that one alone."""
    host_id = next((known.host_id for known in ranks if known.rank == rank), None)
    return [known.rank for known in ranks if known.host_id == host_id] or [rank]


ABSENT = "not set"


@dataclass(frozen=True)
class Deviation(Finding):
    """One thing that is wrong on some ranks, with the ranks by number."""

    ranks: tuple[int, ...] = ()


def of_ranks(
    name: str,
    who: Sequence[int],
    ranks: Sequence[RankFacts],
    text: str,
    verdict: Verdict = Verdict.LIMITED,
) -> Deviation:
    """A deviation whose text begins with the ranks ``who``."""
    return Deviation(name, f"{named(who, ranks)}: {text}", verdict, tuple(who))


def deviations(ranks: Sequence[RankFacts]) -> list[Deviation]:
    """Problems of ranks and facts in which ranks differ."""
    by_problem: dict[Finding, list[int]] = {}
    for rank in ranks:
        for problem in rank.problems:
            by_problem.setdefault(problem, []).append(rank.rank)
    problems = (
        of_ranks(found.name, who, ranks, found.text, found.verdict)
        for found, who in by_problem.items()
    )
    return [*problems, *_differences(ranks)]


def same(ranks: Sequence[RankFacts]) -> list[Fact]:
    """The facts that all ranks must share, and do."""
    first = [fact for fact in ranks[0].facts if fact.scope == "job"]
    others = [{fact.name: fact.value for fact in rank.facts} for rank in ranks[1:]]
    return [fact for fact in first if all(rank.get(fact.name) == fact.value for rank in others)]


def _differences(ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    for example in {fact.name: fact for rank in reversed(ranks) for fact in rank.facts}.values():
        together: dict[str, list[RankFacts]] = {}
        for rank in ranks if example.scope != "own" else ():
            together.setdefault("" if example.scope == "job" else rank.host_id, []).append(rank)
        for group in together.values():
            values: dict[str, list[int]] = {}
            shown = {}
            for rank in group:
                fact = next((fact for fact in rank.facts if fact.name == example.name), None)
                # Without the compiled module or libfabric, a rank has no facts that these would
                # give; the problem says so.
                if fact is None and any(problem.name == example.name for problem in rank.problems):
                    continue
                value = ABSENT if fact is None else fact.value
                values.setdefault(value, []).append(rank.rank)
                shown[value] = ABSENT if fact is None else fact.shown
            if len(values) > 1:
                yield _difference(example, values, shown, ranks)


def _difference(
    fact: Fact, values: dict[str, list[int]], shown: dict[str, str], ranks: Sequence[RankFacts]
) -> Deviation:
    """The smaller groups by their ranks, against the value of most ranks where there is one."""
    most = max(values, key=lambda value: len(values[value]))
    common = values.pop(most) if 2 * len(values[most]) > sum(map(len, values.values())) else []
    parts = [f"{named(who, ranks)}: {shown[value]}" for value, who in values.items()]
    if common:
        parts.append(f"{'the others' if common[1:] else named(common, ranks)}: {shown[most]}")
    who = sorted(rank for group in values.values() for rank in group)
    return Deviation(fact.name, "; ".join(parts), fact.if_different, tuple(who))


def named(who: Sequence[int], ranks: Sequence[RankFacts]) -> str:
    """``rank 3 (host b)``, ``host b (ranks 2, 3)``, ``all ranks``."""
    if len(who) == len(ranks):
        return "all ranks"
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank.rank)
    of = [host for host, members in hosts.items() if set(members) & set(who)]
    named_hosts = f"host{'s' if len(of) > 1 else ''} {', '.join(of[:4])}{', ...' if of[4:] else ''}"
    if sum(len(hosts[host]) for host in of) == len(who):
        return f"{named_hosts} ({rank_list(who)})"
    return f"{rank_list(who)} ({named_hosts})"
