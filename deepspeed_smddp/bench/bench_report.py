"""What a run has measured, the figures that follow, and the files that rank 0 writes."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_smddp.bench.bench_case import Case


@dataclass(frozen=True)
class Sent:
    """What smddp sent to other hosts: ``sent`` bytes, which stand for ``raw`` ones.

    ``answer``: the last one to whether coding pays, ``coding`` of ``_C.group_states()``.
    """

    sent: int = 0
    raw: int = 0
    answer: dict[str, Any] = field(default_factory=lambda: {"answers": 0})

    def since(self, before: Sent) -> Sent:
        """What came after ``before``."""
        answers = self.answer["answers"] - before.answer["answers"]
        answer = {**self.answer, "answers": answers}
        return Sent(self.sent - before.sent, self.raw - before.raw, answer)

    def and_also(self, other: Sent) -> Sent:
        """Both together: of several turns or ranks."""
        answer = other.answer if other.answer["answers"] else self.answer
        return Sent(self.sent + other.sent, self.raw + other.raw, answer)

    @property
    def ratio(self) -> float | None:
        """The share of the bytes that was sent; None if none crossed to another host."""
        return self.sent / self.raw if self.raw else None

    def why(self, setting: str) -> str:
        """Whether the data was coded, and why, in few words; "" if none crossed.

        ``setting``: that of ``coding``.
        """
        if self.ratio is None:
            return ""
        if setting != "auto":
            return f'coding is "{setting}"'
        if not self.answer["answers"]:
            return "not coded: too small, or of a type that is not coded"
        found = self.answer
        rates = (f"{name} {found[name] / 1e9:.2g} GB/s" for name in ("network", "code"))
        coded = self.ratio < 0.99
        ratio = self.ratio if coded else found["ratio"]
        return f"{'coded' if coded else 'not coded'}: {', '.join(rates)}, ratio {ratio:.2f}"


@dataclass
class Result:
    """``turns``: seconds of each call on the slowest rank, turn by turn.

    ``wrong``: for each turn whose result was checked and is wrong, which element on which rank.
    ``sent``: by all ranks in the turns, over smddp.
    """

    case: Case
    backend: str
    turns: list[list[float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sent: Sent = Sent()

    @property
    def calls(self) -> list[float]:
        """Seconds of every call."""
        return [seconds for turn in self.turns for seconds in turn]

    @property
    def median(self) -> float:
        """Seconds that half of the calls need at most."""
        return self.percentile(50)

    def percentile(self, share: float) -> float:
        """Seconds that ``share`` per cent of the calls need at most (nearest rank)."""
        calls = sorted(self.calls)
        return calls[max(0, math.ceil(share / 100 * len(calls)) - 1)]

    @property
    def algbw(self) -> float:
        """Bytes per second: the size by the median time, as nccl-tests define it."""
        return self.case.size / self.median

    def busbw(self, ranks: int) -> float:
        """Bytes per second that nccl-tests compare with the hardware's rate."""
        return self.algbw * self.case.bus_factor(ranks)

    def utilisation(self, ranks_of_hosts: Sequence[int], rate: float) -> float | None:
        """Share of a host's NICs, ``rate`` bytes per second, that the least bytes take.

        None inside one host, and if the rate is not known (0).
        """
        if rate <= 0 or len(ranks_of_hosts) < 2:
            return None
        return self.case.link_bytes(ranks_of_hosts) / self.median / rate

    def row(self, ranks_of_hosts: Sequence[int], rate: float, coding: str) -> dict[str, Any]:
        """What a line of the CSV file and an entry of the JSON file hold; times in microseconds."""
        ranks = sum(ranks_of_hosts)
        utilisation = self.utilisation(ranks_of_hosts, rate)
        return {
            "op": self.case.op,
            "dtype": self.case.dtype,
            "bytes": self.case.size,
            "backend": self.backend,
            "ranks": ranks,
            "hosts": len(ranks_of_hosts),
            "turns": len(self.turns),
            "calls": len(self.calls),
            "p50_us": round(1e6 * self.median, 3),
            "p90_us": round(1e6 * self.percentile(90), 3),
            "p99_us": round(1e6 * self.percentile(99), 3),
            "min_us": round(1e6 * min(self.calls), 3),
            "algbw_gb_per_s": float(f"{self.algbw / 1e9:.6g}"),
            "busbw_gb_per_s": float(f"{self.busbw(ranks) / 1e9:.6g}"),
            "utilisation": None if utilisation is None else round(utilisation, 4),
            "sent_bytes": self.sent.sent,
            "sent_raw_bytes": self.sent.raw,
            "coding": self.sent.why(coding),
            "right": not self.wrong,
            "turn_medians_us": [round(1e6 * statistics.median(t), 3) for t in self.turns],
        }


# Exit statuses: all results are right; one is wrong or an operation failed; a signal ended it.
RIGHT, FAILED, STOPPED = 0, 1, 130


@dataclass
class BenchReport:
    """One run.

    ``hosts``: the ranks of each host by its name. ``rate``: bytes per second of a host's NICs, 0 if
    it is not known. ``data``: what the timed calls moved; ``coding``: the setting. ``stopped``: the
    signal that ended it; ``failure``: the error that did.
    """

    date: str
    versions: dict[str, str]
    device: str
    backends: list[str]
    hosts: dict[str, list[int]]
    rate: float
    rate_origin: str
    planned: int
    data: str = "weights"
    coding: str = "auto"
    results: list[Result] = field(default_factory=list)
    stopped: str = ""
    failure: str = ""

    @property
    def ranks_of_hosts(self) -> list[int]:
        """How many ranks each host has."""
        return [len(ranks) for ranks in self.hosts.values()]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(self.ranks_of_hosts)

    @property
    def measured(self) -> int:
        """How many cases have a result."""
        return len({result.case for result in self.results})

    @property
    def wrong(self) -> list[str]:
        """A sentence for each case and backend whose result was wrong in a turn."""
        return [
            f"{r.case.op} of {r.case.size} bytes, {r.case.dtype}, over {r.backend}: {r.wrong[0]}"
            + (f" (wrong {len(r.wrong)} times)" if len(r.wrong) > 1 else "")
            for r in self.results
            if r.wrong
        ]

    @property
    def status(self) -> int:
        """The exit status of all ranks."""
        if self.failure or self.wrong:
            return FAILED
        return STOPPED if self.stopped else RIGHT

    def rows(self) -> list[dict[str, Any]]:
        """A row for each case and backend."""
        return [r.row(self.ranks_of_hosts, self.rate, self.coding) for r in self.results]

    def to_json(self) -> dict[str, Any]:
        """Everything; ``partial`` says that not all planned cases were measured."""
        return {
            "date": self.date,
            "versions": self.versions,
            "device": self.device,
            "data": self.data,
            "backends": self.backends,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "host_gbit_per_s": round(self.rate * 8e-9, 6) or None,
            "partial": self.stopped or self.failure or False,
            "wrong": self.wrong,
            "results": self.rows(),
        }

    def to_csv(self) -> str:
        """The rows; times of turns are one column, with spaces."""
        rows, text = self.rows(), io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["op"])
        writer.writeheader()
        for row in rows:
            turns = " ".join(str(median) for median in row["turn_medians_us"])
            writer.writerow({**row, "turn_medians_us": turns})
        return text.getvalue()
