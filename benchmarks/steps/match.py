"""Turns of training: all competitors one after the other, again and again, the same steps each."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hosts.crew import Crew, CrewFailed
from hosts.duel import Duel, Rules
from hosts.field import Field

from .crews import FREE, Trainers
from .hiding import Trace
from .record import Row
from .workload import Workload, wire_bytes

WARM_UP = (
    4  # steps; DeepSpeed records the order of modules in the first and prefetches from then on
)
ESTIMATE = 2  # steps that tell how long one is
# bf16 has 8 bits, and sums that are taken in another order part slowly. Wrong data is a matter of
# tens of percent within a few steps.
LOSS_TOLERANCE = 0.02


class LossesDiffer(Exception):
    """Two backends trained differently."""


class Match(Duel):
    """The crews of all backends, from their start to their end."""

    def __init__(
        self, ground: Field, trainers: Sequence[Trainers], rules: Rules, say: Callable[[str], None]
    ) -> None:
        super().__init__(ground, trainers, rules, say)
        self.load: Workload = trainers[0].load
        self.over: Mapping[str, Any] = trainers[0].over
        self.scheme, self.carries = trainers[0].scheme, trainers[0].carries
        self.parameters = max(trainer.parameters for trainer in trainers)
        self.losses: dict[str, list[float]] = {name: [] for name in self.crews}
        self.steps = 0

    def warm_up(self, step: Callable[[str], None]) -> None:
        """All do the same first steps; then it is known how many fill a turn."""
        slowest = 0.0
        for name in list(self.crews):
            step(f"{name}, warm-up")
            try:
                self._ask(name, WARM_UP)
                answers = self._ask(name, ESTIMATE)
            except CrewFailed as error:
                self._drop(name, str(error))
                continue
            slowest = max(slowest, max(answer["seconds"] for answer in answers) / ESTIMATE)
        if not self.steps and slowest:
            fit = math.ceil(self.rules.seconds_per_turn / slowest)
            self.steps = max(self.rules.least_iterations, fit)

    def round(self, turn: int, step: Callable[[str], None]) -> list[Row]:
        """One turn of everybody."""
        rows = []
        for name in list(self.crews):
            step(f"{name}, turn {turn} of {self.rules.turns}")
            try:
                before = self.ground.wire_bytes()
                answers = self._ask(name, self.steps)
                moved = self.ground.moved_since(before)
                rows.append(self._turn(self.crews[name], turn, answers, moved))
            except CrewFailed as error:
                self._drop(name, str(error))
        return rows

    def _ask(self, name: str, steps: int) -> list[dict[str, Any]]:
        answers = self._ask_for_turn(self.crews[name], f"run {steps}")
        by_step = zip(*(answer["losses"] for answer in answers), strict=True)
        self.losses[name] += [statistics.fmean(losses) for losses in by_step]
        return answers

    def loss_difference(self, name: str) -> float | None:
        """The largest so far, relative to the first competitor's, over all steps of both."""
        first = next(iter(self.losses))
        if name in (first, FREE):
            return None
        pairs = zip(self.losses[first], self.losses[name], strict=False)
        return max((abs(a - b) / abs(b) for a, b in pairs), default=None)

    def check_losses(self) -> None:
        """
        Raises:
            LossesDiffer: by more than the tolerance, at some step.
        """
        for name in self.losses:
            difference = self.loss_difference(name)
            if difference is not None and not difference <= LOSS_TOLERANCE:
                first = next(iter(self.losses))
                raise LossesDiffer(
                    f"the losses of {first} and {name} differ by {100 * difference:.1f} % "
                    f"at some step; at most {100 * LOSS_TOLERANCE:g} % is rounding"
                )

    def _turn(self, crew: Crew, turn: int, answers: list[dict[str, Any]], moved: int | None) -> Row:
        ground, load, steps = self.ground, self.load, self.steps
        first, ranks = answers[0], ground.ranks
        seconds = max(answer["seconds"] for answer in answers) / steps
        kinds = ("gathered", "scattered", "reduced")
        gathered, scattered, reduced = (first["bytes"].get(kind, 0) / steps for kind in kinds)
        if crew.name == FREE and not all(first["bytes"].get(kind) for kind in self.carries):
            raise CrewFailed("this torch calls its collectives by names that steps/rank.py lacks")
        least = wire_bytes(gathered, scattered, reduced, len(ground.hosts))
        traces = [answer["trace"] for answer in answers if "trace" in answer]

        trace = Trace.of(traces) if traces else None

        def traced(name: str) -> float | None:
            return statistics.fmean(trace[name] for trace in traces) if traces else None

        waits = [answer["own_wait"] for answer in answers if answer["own_wait"] is not None]

        def milliseconds(values: Sequence[float]) -> float:
            return 1000 * statistics.fmean(values) / steps

        return Row(
            date=datetime.date.today().isoformat(),
            machine="",
            versions="",
            workload=load.name,
            layers=load.layers,
            hidden=load.hidden,
            heads=load.heads,
            vocabulary=load.vocabulary,
            sequence=load.sequence,
            batch=load.batch,
            parameters=self.parameters,
            changes=json.dumps(self.over, sort_keys=True) if self.over else "",
            hosts=len(ground.hosts),
            ranks_per_host=ground.ranks_per_host,
            rate="",
            nics=ground.nics,
            competitor=crew.name,
            version=crew.version,
            turn=turn,
            steps=steps,
            step_ms=1000 * seconds,
            samples_per_second=load.batch * ranks / seconds,
            tflops_per_rank=load.model_flop() / seconds / 1e12,
            call_ms=milliseconds([answer["in_calls"] for answer in answers]),
            own_wait_ms=milliseconds(waits) if waits else None,
            compute_ms=1000 * max(a["seconds"] - a["in_calls"] for a in answers) / steps,
            cpu_ms=1000 * sum(answer["cpu"] for answer in answers) / steps,
            wire_bytes=None if moved is None else moved / steps,
            gathered_bytes=gathered,
            scattered_bytes=scattered,
            reduced_bytes=reduced,
            least_wire_bytes=least if ground.networked else None,
            loss=self.losses[crew.name][-1],
            loss_difference=self.loss_difference(crew.name),
            scheme=self.scheme,
            backward_ms=thousand(traced("backward")),
            exposed_ms=thousand(traced("exposed")),
            crossed_bytes=trace.crossed() if trace and ground.networked else None,
            trace=trace.text() if trace else "",
        )


def thousand(value: float | None) -> float | None:
    return None if value is None else 1000 * value
