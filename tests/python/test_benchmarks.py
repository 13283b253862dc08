"""Two builds compared in turns: which differences count, and that they are two builds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def row(competitor: str, turns: list[float]) -> Any:
    from calls.call_rows import Row

    median = sorted(turns)[len(turns) // 2]
    where = {"hosts": 1, "ranks_per_host": 2, "rate": "", "nics": None}
    figures = {"median_us": median, "min_us": min(turns), "p90_us": 0.0, "cpu_us": 0.0}
    links = {"utilisation": None, "of_ceiling": None, "wire_ratio": None, "drops": None}
    return Row(
        date="",
        machine="",
        versions="",
        op="all_gather",
        dtype="bf16",
        bytes=4096,
        competitor=competitor,
        version="",
        iterations=1,
        turns=len(turns),
        turns_us=" ".join(str(turn) for turn in turns),
        **where,
        **figures,
        **links,
    )


@pytest.mark.parametrize(
    ("this", "other", "verdict"),
    [
        ([11.0, 12.0, 13.0], [8.0, 9.0, 10.0], "slower"),
        ([8.0, 9.0, 10.0], [11.0, 12.0, 13.0], "faster"),
        ([8.0, 9.0, 12.0], [11.0, 12.0, 13.0], "no"),
    ],
)
def test_builds_differ_beyond_the_spread_if_all_turns_do(
    this: list[float], other: list[float], verdict: str
) -> None:
    from calls import tables_of_builds

    cells = tables_of_builds.lines_of([row("smddp", this), row("smddp-other", other)])
    ratios = sorted(a / b for a, b in zip(this, other, strict=True))
    shown = [f"{figure:.3f}" for figure in (this[1] / other[1], *ratios)]
    assert cells == [
        [
            *("all_gather", "bf16", "4,096", "smddp"),
            *(f"{this[1]:.3g}", f"{other[1]:.3g}", *shown, verdict),
        ]
    ]


def test_the_other_build_must_be_there_and_be_its_own(tmp_path: Path) -> None:
    from shared.build import imported_tree, other_build

    build = other_build(tmp_path)
    assert "core_collectives is not built; `make bench-programs`" in (build.missing_core() or "")
    assert "does not exist" in (build.missing_package() or "")
    build.python.parent.mkdir(parents=True)
    build.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    build.python.chmod(0o755)
    found = f"imports deepspeed_smddp from {imported_tree()}, not from"
    assert found in (build.missing_package() or "")
