"""What rank 0 knows at the end of a run, and the files that it writes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deepspeed_smddp.bench.bench_case import BenchError
from deepspeed_smddp.bench.bench_result import Result

# Exit statuses: all results are right; one is wrong or an operation failed; the question is wrong;
# a signal ended the sweep.
RIGHT, FAILED, REFUSED, STOPPED = 0, 1, 2, 130


@dataclass
class BenchReport:
    """One run.

    ``hosts``: the ranks of each host by its name. ``rate``: bytes per second of a host's NICs, 0 if
    it is not known. ``stopped``: the signal that ended it; ``failure``: the error that did.
    """

    date: str
    versions: dict[str, str]
    device: str
    backends: list[str]
    hosts: dict[str, list[int]]
    rate: float
    rate_origin: str
    planned: int
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
        return [result.row(self.ranks_of_hosts, self.rate) for result in self.results]

    def to_json(self) -> dict[str, Any]:
        """Everything; ``partial`` says that not all planned cases were measured."""
        return {
            "date": self.date,
            "versions": self.versions,
            "device": self.device,
            "backends": self.backends,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "host_gbit_per_s": round(self.rate * 8e-9, 6) or None,
            "partial": self.stopped or self.failure or False,
            "wrong": self.wrong,
            "results": self.rows(),
        }

    def write_json(self, path: Path) -> None:
        """Raises BenchError if the file can't be written."""
        _write(path, lambda file: json.dump(self.to_json(), file, indent=1))

    def write_csv(self, path: Path) -> None:
        """Times of turns are one column, with spaces. Raises BenchError as above."""

        def write(file: IO[str]) -> None:
            rows = self.rows()
            writer = csv.DictWriter(file, list(rows[0]) if rows else ["op"])
            writer.writeheader()
            for row in rows:
                turns = " ".join(str(median) for median in row["turn_medians_us"])
                writer.writerow({**row, "turn_medians_us": turns})

        _write(path, write)


def _write(path: Path, write: Callable[[IO[str]], None]) -> None:
    """Into a file beside it first, so that an earlier one stays whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            write(file)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BenchError(f"{path} can't be written: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Says before the sweep what its end would say.

    Raises:
        BenchError: the folder is missing or refuses new files.
    """
    folder = path.parent
    if not folder.is_dir():
        raise BenchError(f"{path} can't be written: there is no folder {folder}")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise BenchError(f"{path} can't be written: it is a folder, or {folder} is read-only")
