"""The time of a ZeRO-3 step with given sizes, from a measured network: a simulation.

It goes through the step as DeepSpeed's parameter coordinator and smddp's reductions do
(``fetch_sub_module`` in DeepSpeed's partitioned_param_coordinator.py, ``deepspeed/gather.py``,
``deepspeed/overlap.py``). A module gathers what is missing, waits for it, starts to gather what
follows up to the prefetch bucket, and computes; gradients travel in pieces while the backward pass
goes on.
Operations follow each other on the network in the order of their start, each for the time that
was measured for its size. Left out: the time of DeepSpeed's own Python, and that moving bytes takes
processor time from computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_smddp.tuning.choice import Choice, NetworkModel, Point

# Those of deepspeed/gather.py and deepspeed/overlap.py, in bytes.
_TOGETHER = 256 << 10
_PIECE = 1 << 20
_PART = 64 << 10


@dataclass(frozen=True)
class ModuleCost:
    """A module: elements of its parameters, seconds of its passes without communication."""

    params: Sequence[int]
    forward: float
    backward: float


@dataclass(frozen=True)
class StepKind:
    """What the sizes apply to: the network, the job, and limits of the config that stay.

    ``optimizer``: seconds. ``max_live``, ``max_reuse``: elements, as DeepSpeed's keys.
    """

    network: NetworkModel
    modules: Sequence[ModuleCost]
    ranks: int
    element_size: int = 2
    optimizer: float = 0.0
    max_live: float = 1e9
    max_reuse: float = 1e9


def seconds(points: Sequence[Point], nbytes: float) -> float:
    """The time of an operation: between measured sizes a line, above them at the last rate."""
    last = points[-1]
    if nbytes >= last.size:
        before = points[-2]
        rate = (last.size - before.size) / max(1e-12, last.seconds - before.seconds)
        return last.seconds + (nbytes - last.size) / max(rate, last.rate)
    return float(np.interp(nbytes, [p.size for p in points], [p.seconds for p in points]))


def step_seconds(kind: StepKind, sizes: Choice) -> float:
    """Seconds of one step in steady state."""
    return _Step(kind, sizes).run()


class _Step:
    def __init__(self, kind: StepKind, sizes: Choice) -> None:
        self.kind, self.sizes = kind, sizes
        self.now = 0.0
        self.network_free = 0.0
        count = len(kind.modules)
        # Forward and backward pass as a series of module numbers.
        self.order = [*range(count), *reversed(range(count))]
        self.arrival: dict[tuple[int, int], float] = {}  # (module, parameter) that is gathered
        self.queue = deque(
            (place, key) for place, m in enumerate(self.order) for key in self._keys(m)
        )
        self.looked_at: dict[tuple[int, int], int] = {}  # the last use that prefetching has seen
        self.pending = 0.0  # bytes of gradients that no ReduceScatter has
        self.filled = 0  # elements in the bucket
        self.last_piece = self.previous_bucket = 0.0  # when they have been reduced

    def run(self) -> float:
        kind = self.kind
        count = len(kind.modules)
        for place, number in enumerate(self.order):
            module = kind.modules[number]
            self._fetch(place, number)
            self.now += module.forward if place < count else module.backward
            self._release(place, number)
            if place >= count:
                for elements in module.params:
                    self._reduce(elements)
        self._send_gradients()
        self.now = max(self.now, self.last_piece) + kind.optimizer
        persistent = sum(sum(n for n in m.params if self._persists(n)) for m in kind.modules)
        if persistent:
            self.now = self._gather(persistent)
        return self.now

    def _persists(self, elements: int) -> bool:
        return elements <= self.sizes.stage3_param_persistence_threshold

    def _elements(self, key: tuple[int, int]) -> int:
        return self.kind.modules[key[0]].params[key[1]]

    def _keys(self, number: int) -> list[tuple[int, int]]:
        params = self.kind.modules[number].params
        return [(number, i) for i, n in enumerate(params) if not self._persists(n)]

    def _fetch(self, place: int, number: int) -> None:
        keys = self._keys(number)
        self._start_gather([key for key in keys if key not in self.arrival])
        self.now = max([self.now, *(self.arrival[key] for key in keys)])
        while self.queue and self.queue[0][0] <= place:
            self.queue.popleft()
        live = sum(self._elements(key) for key in self.arrival)
        most = min(self.sizes.stage3_prefetch_bucket_size, self.kind.max_live - live)
        ahead: list[tuple[int, int]] = []
        taken = 0
        while self.queue and taken < most:
            use, key = self.queue.popleft()
            self.looked_at[key] = use
            if key not in self.arrival and key not in ahead:
                ahead.append(key)
                taken += self._elements(key)
        self._start_gather(ahead)

    def _release(self, place: int, number: int) -> None:
        """A parameter stays if its next use is near, or prefetching has gone past that use."""
        again = len(self.order) - 1 - place  # the same module in the backward pass
        between = self.order[place + 1 : again]
        distance = sum(sum(self.kind.modules[m].params) for m in between)
        near = again > place and distance < self.kind.max_reuse
        for key in self._keys(number):
            if not near and self.looked_at.get(key, 0) <= place:
                self.arrival.pop(key, None)

    def _start_gather(self, keys: list[tuple[int, int]]) -> None:
        """Small neighbours travel together, a large parameter by itself."""
        most = _TOGETHER // self.kind.element_size
        pieces: list[list[tuple[int, int]]] = []
        size = 0
        for key in keys:
            size += self._elements(key)
            if not pieces or size > most:
                pieces.append([])
                size = self._elements(key)
            pieces[-1].append(key)
        for piece in pieces:
            at = self._gather(sum(map(self._elements, piece)))
            self.arrival.update(dict.fromkeys(piece, at))

    def _gather(self, elements: int) -> float:
        size = elements * self.kind.element_size
        return self._transfer(self.kind.network.allgather, size, self.sizes.allgather_bucket_size)

    def _transfer(self, points: Sequence[Point], size: float, bound: int) -> float:
        """When an operation that starts now is complete; parts above ``bound`` take turns."""
        whole, rest = divmod(size, bound) if bound else (0, size)
        took = whole * seconds(points, bound) + (seconds(points, rest) if rest else 0)
        self.network_free = max(self.network_free, self.now) + took
        return self.network_free

    def _reduce(self, elements: int) -> None:
        if self.filled and self.filled + elements > self.sizes.reduce_bucket_size:
            self._send_gradients()
            # The next bucket takes the buffer of the one before this one.
            self.now = max(self.now, self.previous_bucket)
            self.previous_bucket, self.filled = self.last_piece, 0
        self.filled += elements
        self.pending += elements * self.kind.element_size
        if self.pending >= max(_PIECE, _PART * self.kind.ranks):
            self._send_gradients()

    def _send_gradients(self) -> None:
        if self.pending:
            points, bound = self.kind.network.reduce_scatter, self.sizes.reduce_scatter_bucket_size
            self.last_piece = self._transfer(points, self.pending, bound)
            self.pending = 0.0
