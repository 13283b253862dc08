"""The competitors of a run, whose turns alternate: A B C A B C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .competitor import Competitor
from .host_set import HostSet
from .launched_ranks import LaunchedRanks, RanksFailed


@dataclass
class Rules:
    turns: int
    seconds_per_turn: float
    least_iterations: int = 3
    timeout: float = 120.0  # seconds; a turn has 20 times its planned length in addition


class Alternation:
    """The running ranks of all competitors, from their start to their end.

    Subclasses measure the turns. A competitor that fails is dropped, and the others go on.
    """

    def __init__(
        self,
        hosts: HostSet,
        competitors: Sequence[Competitor],
        rules: Rules,
        log: Callable[[str], None],
    ) -> None:
        self.hosts = hosts
        self.rules = rules
        self.log = log
        self.failed: dict[str, str] = {}
        self.running: dict[str, LaunchedRanks] = {}
        for competitor in competitors:
            why = competitor.missing(hosts)
            if why is None:
                try:
                    self.running[competitor.name] = competitor.start(hosts)
                    continue
                except (RanksFailed, OSError) as error:
                    why = str(error)
            self._drop(competitor.name, why)

    def _drop(self, name: str, why: str) -> None:
        self.failed[name] = why
        self.log(f"[red]{name} takes no part:[/red] {why}")
        ranks = self.running.pop(name, None)
        if ranks is not None:
            ranks.close()

    def _ask_for_turn(self, ranks: LaunchedRanks, command: str) -> list[dict[str, Any]]:
        timeout = self.rules.timeout + 20 * self.rules.seconds_per_turn
        return ranks.ask_for_turn(command, timeout)

    def idle_cpu(self) -> str:
        """CPU seconds that each competitor's processes used during the turns of others."""
        return ", ".join(f"{name} {ranks.idle_cpu:.2f} s" for name, ranks in self.running.items())

    def close(self) -> None:
        for ranks in self.running.values():
            ranks.close()
        self.running.clear()
