"""Turns of training: all competitors one after the other, again and again, the same steps each."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.alternation import Alternation, Rules
from shared.host_set import HostSet
from shared.launched_ranks import LaunchedRanks, RanksFailed

from .hiding import Trace
from .step_rows import Row
from .trainers import FREE, Trainers
from .workload import Workload, wire_bytes

# Steps. DeepSpeed records the order of modules in the first one, and prefetches in the others.
WARM_UP = 4
ESTIMATE = 2  # steps from which the duration of a step is estimated
# bf16 has 8 bits, and results of sums in another order differ more and more, slowly. Wrong data
# changes losses by tens of percent within a few steps.
LOSS_TOLERANCE = 0.02


class LossesDiffer(Exception):
    """Two backends trained differently."""


class StepAlternation(Alternation):
    """Turns of steps, the same number for every backend."""

    def __init__(
        self,
        hosts: HostSet,
        trainers: Sequence[Trainers],
        rules: Rules,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(hosts, trainers, rules, log)
        self.load: Workload = trainers[0].load
        self.over: Mapping[str, Any] = trainers[0].over
        self.scheme, self.carries = trainers[0].scheme, trainers[0].carries
        found = [int(ranks.hello["parameters"]) for ranks in self.running.values()]
        self.parameters = max(found, default=0)
        self.losses: dict[str, list[float]] = {name: [] for name in self.running}
        self.steps = 0

    def warm_up(self, on_turn: Callable[[str], None]) -> None:
        """All do the same first steps, which also give the number of steps in a turn."""
        slowest = 0.0
        for name in list(self.running):
            on_turn(f"{name}, warm-up")
            try:
                self._train(name, WARM_UP)
                answers = self._train(name, ESTIMATE)
            except RanksFailed as error:
                self._drop(name, str(error))
                continue
            slowest = max(slowest, max(answer["seconds"] for answer in answers) / ESTIMATE)
        if not self.steps and slowest:
            fit = math.ceil(self.rules.seconds_per_turn / slowest)
            self.steps = max(self.rules.least_iterations, fit)

    def measure(self, turn: int, on_turn: Callable[[str], None]) -> list[Row]:
        """One turn of every competitor."""
        rows = []
        for name in list(self.running):
            on_turn(f"{name}, turn {turn} of {self.rules.turns}")
            try:
                before = self.hosts.wire_bytes()
                answers = self._train(name, self.steps)
                moved = self.hosts.moved_since(before)
                rows.append(self._row(self.running[name], turn, answers, moved))
            except RanksFailed as error:
                self._drop(name, str(error))
        return rows

    def _train(self, name: str, steps: int) -> list[dict[str, Any]]:
        answers = self._ask_for_turn(self.running[name], f"run {steps}")
        by_step = zip(*(answer["losses"] for answer in answers), strict=True)
        self.losses[name] += [statistics.fmean(losses) for losses in by_step]
        return answers

    def loss_difference(self, name: str) -> float | None:
        """The largest one so far, relative to the first competitor, over all steps of both."""
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
                    f"at some step; rounding explains at most {100 * LOSS_TOLERANCE:g} %"
                )

    def _row(
        self, ranks: LaunchedRanks, turn: int, answers: list[dict[str, Any]], moved: int | None
    ) -> Row:
        """``moved``: bytes on the wire, if there are links."""
        hosts, load, steps = self.hosts, self.load, self.steps
        seconds = max(answer["seconds"] for answer in answers) / steps
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
            hosts=len(hosts),
            ranks_per_host=hosts.ranks_per_host,
            rate="",
            nics=hosts.nics,
            competitor=ranks.name,
            version=ranks.version,
            turn=turn,
            steps=steps,
            step_ms=1000 * seconds,
            samples_per_second=load.batch * hosts.ranks / seconds,
            tflops_per_rank=load.model_flop() / seconds / 1e12,
            **self._times(answers),
            wire_bytes=None if moved is None else moved / steps,
            **self._bytes(ranks.name, answers[0]["bytes"]),
            loss=self.losses[ranks.name][-1],
            loss_difference=self.loss_difference(ranks.name),
            scheme=self.scheme,
            **self._trace([answer["trace"] for answer in answers if "trace" in answer]),
        )

    def _times(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Columns about the time in calls and the CPU time, per step."""
        ms_per_step = 1000 / self.steps
        waits = [answer["own_wait"] for answer in answers if answer["own_wait"] is not None]
        return {
            "call_ms": ms_per_step * statistics.fmean(answer["in_calls"] for answer in answers),
            "own_wait_ms": ms_per_step * statistics.fmean(waits) if waits else None,
            "compute_ms": ms_per_step * max(a["seconds"] - a["in_calls"] for a in answers),
            "cpu_ms": ms_per_step * sum(answer["cpu"] for answer in answers),
        }

    def _bytes(self, name: str, counted: Mapping[str, int]) -> dict[str, Any]:
        """Columns about the bytes that one rank gave to collectives, per step.

        Raises:
            RanksFailed: if the competitor that tells the least bytes counted none of some kind.
        """
        if name == FREE and not all(counted.get(kind) for kind in self.carries):
            raise RanksFailed("this torch calls its collectives by names that steps/rank.py lacks")
        kinds = ("gathered", "scattered", "reduced")
        gathered, scattered, reduced = (counted.get(kind, 0) / self.steps for kind in kinds)
        least = wire_bytes(gathered, scattered, reduced, len(self.hosts))
        return {
            "gathered_bytes": gathered,
            "scattered_bytes": scattered,
            "reduced_bytes": reduced,
            "least_wire_bytes": least if self.hosts.networked else None,
        }

    def _trace(self, traces: list[dict[str, Any]]) -> dict[str, Any]:
        """Columns about DDP's buckets, from the traces of all ranks."""
        if not traces:
            return {}
        trace = Trace.of(traces)
        return {
            "backward_ms": 1000 * statistics.fmean(one["backward"] for one in traces),
            "exposed_ms": 1000 * statistics.fmean(one["exposed"] for one in traces),
            "crossed_bytes": trace.crossed() if self.hosts.networked else None,
            "trace": trace.text(),
        }
