"""Synthetic dumps of ranks for tests of the hang report."""

from __future__ import annotations

from typing import Any

from deepspeed_smddp.diagnostics.report.dump import (
    Connection,
    Dump,
    Frame,
    Group,
    Oldest,
    Operation,
    Stack,
)

NOW = 1_800_000_000.0
MIB = 1 << 20
SITE = "/opt/venv/lib/python3.11/site-packages"


def frame(file: str, line: int, function: str, text: str = "") -> Frame:
    return Frame(file=file, line=line, function=function, text=text)


def main_thread(*frames: Frame) -> Stack:
    return Stack(thread="MainThread", main=True, frames=list(frames))


def user(line: int, function: str = "main", text: str = "", file: str = "train.py") -> Frame:
    return frame(f"/home/me/{file}", line, function, text)


GATHER = frame(f"{SITE}/torch/distributed/distributed_c10d.py", 4000, "all_gather_into_tensor")


def in_gather(line: int = 50, function: str = "step") -> Stack:
    return main_thread(user(line, function), GATHER)


class Rank:
    """One rank's dump: ``call`` adds finished operations, ``wait`` one that it stands in."""

    def __init__(self, rank: int, ranks: int, groups: dict[str, list[int]] | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self.groups = groups or {"default": list(range(ranks))}
        self.operations: list[Operation] = []
        self.fields: dict[str, Any] = {"reason": "SIGUSR2"}
        self.counts = dict.fromkeys(self.groups, 0)
        self.stacks: list[Stack] = []
        self.connections: list[Connection] = []
        self.host = f"host-{'ab'[rank * 2 // ranks]}"

    def call(self, operation: str = "all_gather", **more: Any) -> Rank:
        group = more.pop("group", "default")
        self.counts[group] += 1
        at = NOW - 60 + len(self.operations) * 0.1
        times = dict.fromkeys(("called", "started", "wait_entered"), at)
        times |= dict.fromkeys(("wait_left", "last_byte"), at + 0.05)
        values = {"bytes": 4 * MIB, "dtype": "float32", **times, **more}
        self.operations.append(
            Operation(
                id=len(self.operations) + 1,
                group=group,
                sequence=self.counts[group],
                operation=operation,
                **values,
            )
        )
        return self

    def wait(self, operation: str = "all_gather", **more: Any) -> Rank:
        late: dict[str, Any] = dict.fromkeys(("called", "started", "wait_entered"), NOW - 35)
        late |= {"wait_left": None, "last_byte": None, "state": "running"}
        self.call(operation, **{**late, **more})
        if not self.stacks:
            self.stacks = [in_gather()]
        return self

    def at(self, *frames: Frame) -> Rank:
        self.stacks = [main_thread(*frames)]
        return self

    def sees(self, rank: int, state: str, **more: Any) -> Rank:
        self.connections.append(Connection(rank=rank, state=state, **more))
        return self

    def dump(self) -> Dump:
        groups = []
        for name, members in self.groups.items():
            own = [op for op in self.operations if op.group == name]
            oldest = next((op for op in own if op.unfinished), None)
            hosts = [f"host-{'ab'[m * 2 // self.ranks]}" for m in members]
            groups.append(
                Group(
                    name=name,
                    rank=members.index(self.rank),
                    members=members,
                    hosts=hosts,
                    submitted=len(own),
                    finished=sum(not op.unfinished for op in own),
                    connections=self.connections,
                    oldest=oldest and Oldest(sequence=oldest.sequence, operation=oldest.operation),
                )
            )
        return Dump(
            version=1,
            job="pretraining",
            rank=self.rank,
            ranks=self.ranks,
            host=self.host,
            pid=100 + self.rank,
            time=NOW,
            operations=self.operations,
            groups=groups,
            stacks=self.stacks,
            **self.fields,
        )
