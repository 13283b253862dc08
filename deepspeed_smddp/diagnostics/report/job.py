"""All dumps of a job beside each other: groups with the ranks in them, and who waits where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from deepspeed_smddp.diagnostics.report.dump import Dump, Group, Operation
from deepspeed_smddp.diagnostics.report.stack import UNKNOWN, Place, place_of
from deepspeed_smddp.diagnostics.report.wording import rank_list, verb


class Weight(IntEnum):
    """How likely a cause of this kind is the first one; the least number comes first."""

    MISMATCH_ERROR = 10
    OWN_ERROR = 20
    GONE = 30
    DIFFERENT_CALLS = 40
    CROSSED_GROUPS = 50
    NO_DUMP = 60
    DIFFERENT_LABELS = 70
    LATE = 80
    TRANSFER = 90
    LATE_BEHIND_OTHERS = 100
    LATER_ERROR = 110
    HEALTHY = 115  # before notes: it is the answer
    NOTE = 120


@dataclass(frozen=True)
class Cause:
    """``text`` is one sentence or two, the subject first; ``ranks`` are the ones to look at.

    ``remedy`` says what to do, "" if the dumps do not tell.
    """

    weight: Weight
    text: str
    ranks: tuple[int, ...] = ()
    remedy: str = ""


# A group is known by its name and its members: groups apart may share a name.
Key = tuple[str, tuple[int, ...]]


@dataclass
class GroupView:
    """One group as all its ranks see it; ranks are global."""

    name: str
    members: tuple[int, ...]
    seen: dict[int, Group] = field(default_factory=dict)  # ranks that have left a dump with it
    rings: dict[int, dict[int, Operation]] = field(default_factory=dict)  # rank -> by sequence

    def pending(self, rank: int) -> Operation | None:
        """The oldest operation of the rank in this group that has not ended."""
        group = self.seen.get(rank)
        ring = self.rings.get(rank, {})
        oldest = group.oldest if group is not None else None
        if oldest is not None:
            known = ring.get(oldest.sequence)
            return known or Operation(
                id=0,
                group=self.name,
                sequence=oldest.sequence,
                operation=oldest.operation,
                state="running",
            )
        return next((ring[s] for s in sorted(ring) if ring[s].unfinished), None)

    @property
    def broken(self) -> bool:
        """If a rank has raised an error of this group: no operation of it goes on."""
        return any(group.error for group in self.seen.values())

    def submitted(self, rank: int) -> int:
        """How many operations the rank has called in this group; 0 without the group."""
        group = self.seen.get(rank)
        return max(group.submitted if group else 0, max(self.rings.get(rank, {}), default=0))


@dataclass(frozen=True)
class Stall:
    """An operation that some ranks of a group wait in, and what keeps it.

    ``late`` are members with a dump that have not called it, ``absent`` those without a dump.
    Without either, every member has called it.
    """

    group: GroupView
    operation: Operation
    waiting: tuple[int, ...]
    late: tuple[int, ...]
    absent: tuple[int, ...]

    @cached_property
    def late_set(self) -> frozenset[int]:
        """The late ranks, for look-ups."""
        return frozenset(self.late)


class Job:
    """The dumps by rank, sentences about ranks known to be gone, and the size of the world."""

    def __init__(self, dumps: Mapping[int, Dump], gone: Mapping[int, str], ranks: int) -> None:
        self.dumps = dict(sorted(dumps.items()))
        self.gone = dict(sorted(gone.items()))
        self.ranks = max([ranks, *(r + 1 for r in dumps), *(r + 1 for r in gone)], default=ranks)

    @cached_property
    def missing(self) -> list[int]:
        """Ranks without a dump that are not known to be gone."""
        return [r for r in range(self.ranks) if r not in self.dumps and r not in self.gone]

    @cached_property
    def groups(self) -> dict[Key, GroupView]:
        """Every group that a dump names."""
        found: dict[Key, GroupView] = {}
        for rank, dump in self.dumps.items():
            rings: dict[str, dict[int, Operation]] = {}
            for operation in dump.operations:
                if operation.sequence > 0:
                    # A fallback operation may share a number: the backend's own one counts.
                    ring = rings.setdefault(operation.group, {})
                    ring.setdefault(operation.sequence, operation)
            for group in dump.groups:
                members = tuple(group.members)
                view = found.setdefault((group.name, members), GroupView(group.name, members))
                view.seen[rank] = group
                view.rings[rank] = rings.get(group.name, {})
        return found

    @cached_property
    def stalls(self) -> list[Stall]:
        """One for each group with an unfinished operation."""
        return [stall for view in self.groups.values() if (stall := self._stall(view)) is not None]

    def _stall(self, view: GroupView) -> Stall | None:
        pending = {r: op for r in view.seen if (op := view.pending(r)) is not None}
        if not pending:
            return None
        absent = tuple(m for m in view.members if m not in self.dumps)
        present = [m for m in view.members if m in self.dumps]
        for sequence in sorted({op.sequence for op in pending.values()}):
            late = tuple(m for m in present if view.submitted(m) < sequence)
            if late:
                break
        else:
            sequence = min(op.sequence for op in pending.values())
            late = ()
        waiting = tuple(r for r, op in pending.items() if op.sequence == sequence)
        return Stall(view, pending[waiting[0]], waiting, late, absent)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that a dump knows."""
        known = {r: d.host for r, d in self.dumps.items()}
        for view in self.groups.values():
            for group in view.seen.values():
                for member, host in zip(group.members, group.hosts, strict=False):
                    known.setdefault(member, host)
                if len(known) >= self.ranks:
                    return known
        return known

    @cached_property
    def several_hosts(self) -> bool:
        """If the dumps name more than one host."""
        return len(set(self.hosts.values())) > 1

    @cached_property
    def _places(self) -> dict[int, Place]:
        return {rank: place_of(dump.stacks) for rank, dump in self.dumps.items()}

    def place(self, rank: int) -> Place:
        """Where the Python of a rank stands."""
        return self._places.get(rank, UNKNOWN)

    def waits_in(self, rank: int) -> Operation | None:
        """The operation that a thread of the rank waits for, or its oldest unfinished one."""
        return self._waits.get(rank)

    @cached_property
    def _waits(self) -> dict[int, Operation]:
        found: dict[int, Operation] = {}
        for rank, dump in self.dumps.items():
            alive = {group.name for group in dump.groups}
            unfinished = [
                op
                for op in dump.operations
                if op.unfinished and (op.state != "failed" or op.group in alive)
            ]
            entered = [op for op in unfinished if op.waited_for]
            if unfinished:
                found[rank] = entered[-1] if entered else unfinished[0]
        for view in self.groups.values():
            for rank in view.seen:
                if rank not in found and (operation := view.pending(rank)) is not None:
                    found[rank] = operation
        return found

    def named(self, ranks: list[int] | tuple[int, ...]) -> str:
        """The ranks, with the host if it is one rank of a world on several hosts."""
        text = rank_list(ranks)
        if len(ranks) == 1 and self.several_hosts:
            host = self.hosts.get(ranks[0], "")
            return f"{text} ({host})" if host else text
        return text

    def waiting(self, stall: Stall) -> str:
        """``ranks 0-2 wait``."""
        return f"{self.named(stall.waiting)} {verb(stall.waiting, 'waits', 'wait')}"

    def ages(self, stall: Stall) -> list[float]:
        """How long the ranks that wait have been in their operations, where that is known."""
        pending = [(rank, stall.group.pending(rank)) for rank in stall.waiting]
        found = [self.waited(rank, operation) for rank, operation in pending if operation]
        return [age for age in found if age is not None]

    def waited(self, rank: int, operation: Operation) -> float | None:
        """How long the rank has been in an operation, in seconds by its host's clock."""
        times = (operation.wait_entered, operation.called, operation.started)
        since = next((time for time in times if time is not None), None)
        dump = self.dumps.get(rank)
        return None if since is None or dump is None else max(dump.time - since, 0.0)

    def idle(self, rank: int) -> float | None:
        """Seconds since the rank last called an operation, by its host's clock."""
        dump = self.dumps[rank]
        calls = [op.called for op in dump.operations if op.called is not None]
        return max(dump.time - max(calls), 0.0) if calls else None
