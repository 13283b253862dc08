"""The cells of the matrix: which versions are installed together, and what they need besides."""

from __future__ import annotations

from dataclasses import dataclass

TORCH, PYTHON, DEEPSPEED = "2.13.0", "3.11", "0.19.8"

DEEPSPEEDS = (
    *(f"0.14.{patch}" for patch in (0, 2, 3, 5)),
    *(f"0.15.{patch}" for patch in (0, 2, 4)),
    *(f"0.16.{patch}" for patch in range(10)),
    *(f"0.17.{patch}" for patch in range(7)),
    *(f"0.18.{patch}" for patch in range(10)),
    *(f"0.19.{patch}" for patch in range(9)),
)
# Run first, so that an interrupted run has what matters most.
FIRST = ("0.19.8", "0.16.9", "0.17.6", "0.18.9", "0.16.5", "0.16.0", "0.14.5", "0.15.4", "0.17.2")
FIRST += ("0.18.4", "0.19.2", "0.14.0", "0.15.0", "0.17.0", "0.18.0", "0.19.0", "0.19.4", "0.18.7")
TORCHES = ("2.11.0", "2.12.1", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.12", "3.13")

TREE = "tree"  # in place of DeepSpeed's version: a source tree that the command names


@dataclass(frozen=True)
class Cell:
    """Versions that are installed together."""

    deepspeed: str
    torch: str = TORCH
    python: str = PYTHON

    @property
    def name(self) -> str:
        """Identifies the cell in the results and on the command line."""
        return f"deepspeed {self.deepspeed}, torch {self.torch}, Python {self.python}"

    @property
    def venv(self) -> str:
        """The name of the venv; DeepSpeed's versions share one, one after the other."""
        return f"python{self.python}-torch{self.torch}"

    @property
    def pins(self) -> tuple[str, ...]:
        """Requirements that DeepSpeed's own metadata lacks, found by running."""
        return next((pins for start, pins in PINS.items() if self.deepspeed.startswith(start)), ())


# By the start of DeepSpeed's version.
PINS: dict[str, tuple[str, ...]] = {}
# Packages of the system that DeepSpeed needs on a CPU, in the same way.
SYSTEM = {"0.14.": "numactl", "0.15.": "numactl"}


def matrix(tree: bool) -> list[Cell]:
    """All cells, in the order in which they are run; ``tree``: with a source tree of DeepSpeed."""
    rest = [version for version in reversed(DEEPSPEEDS) if version not in FIRST]
    cells = [Cell(version) for version in (*FIRST, *([TREE] if tree else []), *rest)]
    cells += [Cell(DEEPSPEED, torch=version) for version in TORCHES]
    cells += [Cell(DEEPSPEED, python=version) for version in PYTHONS]
    return cells
