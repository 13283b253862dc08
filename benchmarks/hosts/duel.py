"""Turns: for every case, all competitors one after the other, again and again."""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .competitors import Competitor
from .crew import Crew, CrewFailed
from .field import Field
from .plan import Case, lower_bound
from .record import Row

MOST_ITERATIONS = 2_000_000


@dataclass
class Turn:
    iterations: int
    seconds: float  # per iteration, on the slowest rank
    p90: float  # of single calls, on the slowest rank
    cpu: float  # seconds of CPU per iteration, all ranks together
    wire: float  # bytes per iteration on the busiest interface, in its busier direction


@dataclass
class Score:
    """What one competitor did in one case."""

    turns: list[Turn] = field(default_factory=list)
    drops: int | None = None
    checked: bool = False
    next_iterations: int = 1


@dataclass
class Rules:
    turns: int
    seconds_per_turn: float
    least_iterations: int = 3
    patience: float = 120.0  # seconds that a turn may take beyond what it should


class Duel:
    """The crews of all competitors, from their start to their end."""

    def __init__(
        self,
        ground: Field,
        competitors: Sequence[Competitor],
        rules: Rules,
        say: Callable[[str], None],
    ) -> None:
        self.ground = ground
        self.rules = rules
        self.say = say
        self.failed: dict[str, str] = {}
        self.crews: dict[str, Crew] = {}
        for competitor in competitors:
            why = competitor.missing(ground)
            if why is None:
                try:
                    self.crews[competitor.name] = competitor.start(ground)
                    continue
                except (CrewFailed, OSError) as error:
                    why = str(error)
            self._drop(competitor.name, why)

    def _drop(self, name: str, why: str) -> None:
        self.failed[name] = why
        self.say(f"[red]{name} takes no part:[/red] {why}")
        crew = self.crews.pop(name, None)
        if crew is not None:
            crew.close()

    def play(self, case: Case, names: Sequence[str], step: Callable[[str], None]) -> list[Row]:
        """All turns of one case; `step` is told who is about to take one."""
        scores = {name: Score() for name in names if name in self.crews}
        lean = self._is_short_of_memory(case, len(scores))
        for turn in range(self.rules.turns + 1):  # in the first: correctness, warm-up, estimate
            for name in [n for n in scores if n in self.crews]:
                step(name)
                try:
                    if turn == 0:
                        self._prepare(self.crews[name], case, scores[name])
                    else:
                        if lean:  # the buffers are new: some share or register them first
                            self._run(self.crews[name], case, 1)
                        self._take_turn(self.crews[name], case, scores[name])
                    if lean:
                        self.crews[name].ask("free", self.rules.patience)
                except CrewFailed as error:
                    self._drop(name, f"{case.op} of {case.bytes:,} bytes: {error}")
        for name in [n for n in scores if n in self.crews]:
            with contextlib.suppress(CrewFailed):
                self.crews[name].ask("free", self.rules.patience)
        return [self._row(case, self.crews[n], s) for n, s in scores.items() if n in self.crews]

    def _is_short_of_memory(self, case: Case, competitors: int) -> bool:
        """Whether all competitors' buffers, kept between turns, would take much of it."""
        with open("/proc/meminfo") as file:
            available = next(int(x.split()[1]) for x in file if x.startswith("MemAvailable")) << 10
        need = competitors * self.ground.ranks * case.bytes * (1 + 1 / self.ground.ranks)
        return need > 0.4 * available

    def _prepare(self, crew: Crew, case: Case, score: Score) -> None:
        words = f"{case.op} {case.dtype} {case.bytes}"
        answers = crew.ask(f"check {words}", self.rules.patience)
        wrong = [rank for rank, answer in enumerate(answers) if answer["right"] is False]
        if wrong:
            raise CrewFailed(f"wrong result on rank {wrong[0]}")
        score.checked = all(answer["right"] for answer in answers)
        # One call says about how long it takes, a tenth of a turn says it better.
        seconds = self._run(crew, case, 1).seconds
        warm_up = int(0.1 * self.rules.seconds_per_turn / seconds)
        if warm_up > 1:
            seconds = self._run(crew, case, min(warm_up, MOST_ITERATIONS)).seconds
        score.next_iterations = self._iterations(seconds)

    def _iterations(self, seconds: float) -> int:
        fit = math.ceil(self.rules.seconds_per_turn / seconds)
        return min(MOST_ITERATIONS, max(self.rules.least_iterations, fit))

    def _take_turn(self, crew: Crew, case: Case, score: Score) -> None:
        before = self.ground.drops()
        turn = self._run(crew, case, score.next_iterations)
        after = self.ground.drops()
        if before is not None and after is not None:
            score.drops = (score.drops or 0) + after - before
        score.turns.append(turn)
        score.next_iterations = self._iterations(turn.seconds)

    def _ask_for_turn(self, crew: Crew, command: str) -> list[dict[str, Any]]:
        answers = crew.ask(command, self.rules.patience + 20 * self.rules.seconds_per_turn)
        crew.idle_cpu += sum(answer["idle_cpu"] for answer in answers)
        return answers

    def _run(self, crew: Crew, case: Case, iterations: int) -> Turn:
        before = self.ground.wire_bytes()
        command = f"run {case.op} {case.dtype} {case.bytes} {iterations}"
        answers = self._ask_for_turn(crew, command)
        moved = self.ground.moved_since(before)
        return Turn(
            iterations,
            max(answer["seconds"] for answer in answers) / iterations,
            max(answer["p90"] for answer in answers),
            sum(answer["cpu"] for answer in answers) / iterations,
            (moved or 0) / iterations,
        )

    def _row(self, case: Case, crew: Crew, score: Score) -> Row:
        ground, turns = self.ground, score.turns
        times = [turn.seconds for turn in turns]
        median = statistics.median(times)
        bound = lower_bound(case.op, case.bytes, len(ground.hosts))
        wire = statistics.median(turn.wire for turn in turns)
        return Row(
            date=datetime.date.today().isoformat(),
            machine="",
            versions="",
            op=case.op,
            dtype=case.dtype,
            bytes=case.bytes,
            hosts=len(ground.hosts),
            ranks_per_host=ground.ranks_per_host,
            rate="",
            nics=ground.nics,
            competitor=crew.name,
            version=crew.version,
            median_us=1e6 * median,
            min_us=1e6 * min(times),
            p90_us=1e6 * statistics.median(turn.p90 for turn in turns),
            utilisation=bound / median / ground.rate if ground.rate else None,
            of_ceiling=None,
            wire_ratio=wire / bound if ground.networked and bound else None,
            drops=score.drops,
            cpu_us=1e6 * statistics.median(turn.cpu for turn in turns),
            iterations=sum(turn.iterations for turn in turns),
            turns=len(turns),
            checked="all elements" if score.checked else "no",
        )

    def close(self) -> None:
        for crew in self.crews.values():
            crew.close()
        self.crews.clear()
