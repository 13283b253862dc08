"""The turns of the competitors: for every case, all of them in a row, again and again."""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.alternation import Alternation
from shared.launched_ranks import LaunchedRanks, RanksFailed

from .call_rows import Row
from .cases import Case, lower_bound

MOST_ITERATIONS = 2_000_000


@dataclass
class Turn:
    iterations: int
    seconds: float  # per iteration, on the slowest rank
    p90: float  # of single calls, on the slowest rank
    cpu: float  # seconds of CPU per iteration, all ranks together
    wire: float  # bytes per iteration on the busiest interface, in its busier direction


@dataclass
class Measurement:
    """Of one competitor in one case."""

    turns: list[Turn] = field(default_factory=list)
    drops: int | None = None
    checked: bool = False
    next_iterations: int = 1


class CallAlternation(Alternation):
    """Turns of calls, case by case."""

    def measure(
        self, case: Case, names: Sequence[str], on_turn: Callable[[str], None]
    ) -> list[Row]:
        """All turns of one case; `on_turn` is called with a competitor's name before its turn."""
        found = {name: Measurement() for name in names if name in self.running}
        free_buffers = self._is_short_of_memory(case, len(found))
        for turn in range(self.rules.turns + 1):  # turn 0: check, warm-up, estimate
            for name in [n for n in found if n in self.running]:
                on_turn(name)
                ranks = self.running[name]
                try:
                    if turn == 0:
                        self._prepare(ranks, case, found[name])
                    else:
                        if free_buffers:  # the buffers are new: some libraries register them first
                            self._run(ranks, case, 1)
                        self._take_turn(ranks, case, found[name])
                    if free_buffers:
                        ranks.ask("free", self.rules.timeout)
                except RanksFailed as error:
                    self._drop(name, f"{case.op} of {case.bytes:,} bytes: {error}")
        for name in [n for n in found if n in self.running]:
            with contextlib.suppress(RanksFailed):
                self.running[name].ask("free", self.rules.timeout)
        return [self._row(case, self.running[n], m) for n, m in found.items() if n in self.running]

    def _is_short_of_memory(self, case: Case, competitors: int) -> bool:
        """Whether the buffers of all competitors, kept between turns, would take much memory."""
        with open("/proc/meminfo") as file:
            available = next(int(x.split()[1]) for x in file if x.startswith("MemAvailable")) << 10
        need = competitors * self.hosts.ranks * case.bytes * (1 + 1 / self.hosts.ranks)
        return need > 0.4 * available

    def _prepare(self, ranks: LaunchedRanks, case: Case, found: Measurement) -> None:
        answers = ranks.ask(f"check {case.op} {case.dtype} {case.bytes}", self.rules.timeout)
        wrong = [rank for rank, answer in enumerate(answers) if answer["right"] is False]
        if wrong:
            raise RanksFailed(f"wrong result on rank {wrong[0]}")
        found.checked = all(answer["right"] for answer in answers)
        # One call gives a first estimate of its time, a tenth of a turn a better one.
        seconds = self._run(ranks, case, 1).seconds
        warm_up = int(0.1 * self.rules.seconds_per_turn / seconds)
        if warm_up > 1:
            seconds = self._run(ranks, case, min(warm_up, MOST_ITERATIONS)).seconds
        found.next_iterations = self._iterations(seconds)

    def _iterations(self, seconds: float) -> int:
        fit = math.ceil(self.rules.seconds_per_turn / seconds)
        return min(MOST_ITERATIONS, max(self.rules.least_iterations, fit))

    def _take_turn(self, ranks: LaunchedRanks, case: Case, found: Measurement) -> None:
        before = self.hosts.drops()
        turn = self._run(ranks, case, found.next_iterations)
        after = self.hosts.drops()
        if before is not None and after is not None:
            found.drops = (found.drops or 0) + after - before
        found.turns.append(turn)
        found.next_iterations = self._iterations(turn.seconds)

    def _run(self, ranks: LaunchedRanks, case: Case, iterations: int) -> Turn:
        before = self.hosts.wire_bytes()
        command = f"run {case.op} {case.dtype} {case.bytes} {iterations}"
        answers = self._ask_for_turn(ranks, command)
        moved = self.hosts.moved_since(before)
        return Turn(
            iterations,
            max(answer["seconds"] for answer in answers) / iterations,
            max(answer["p90"] for answer in answers),
            sum(answer["cpu"] for answer in answers) / iterations,
            (moved or 0) / iterations,
        )

    def _row(self, case: Case, ranks: LaunchedRanks, found: Measurement) -> Row:
        hosts, turns = self.hosts, found.turns
        times = [turn.seconds for turn in turns]
        median = statistics.median(times)
        bound = lower_bound(case.op, case.bytes, len(hosts), hosts.ranks_per_host)
        wire = statistics.median(turn.wire for turn in turns)
        return Row(
            date=datetime.date.today().isoformat(),
            machine="",
            versions="",
            op=case.op,
            dtype=case.dtype,
            bytes=case.bytes,
            hosts=len(hosts),
            ranks_per_host=hosts.ranks_per_host,
            rate="",
            nics=hosts.nics,
            competitor=ranks.name,
            version=ranks.version,
            median_us=1e6 * median,
            min_us=1e6 * min(times),
            p90_us=1e6 * statistics.median(turn.p90 for turn in turns),
            utilisation=bound / median / hosts.rate if hosts.rate else None,
            of_ceiling=None,
            wire_ratio=wire / bound if hosts.networked and bound else None,
            drops=found.drops,
            cpu_us=1e6 * statistics.median(turn.cpu for turn in turns),
            iterations=sum(turn.iterations for turn in turns),
            turns=len(turns),
            checked="all elements" if found.checked else "no",
            turns_us=" ".join(f"{1e6 * seconds:.2f}" for seconds in times),
        )
