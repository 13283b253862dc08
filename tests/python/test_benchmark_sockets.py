"""The bare sockets among the competitors of calls: where they take part; they are no peer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def missing(tmp_path: Path, hosts: int, ranks_per_host: int, doubling: bool) -> str | None:
    from calls.competitors import Sockets
    from shared.host_set import ThisMachine

    program = tmp_path / "plain_sockets"
    program.touch()
    return Sockets("sockets", program, doubling).missing(
        ThisMachine(hosts, ranks_per_host, tmp_path)
    )


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "doubling", "why"),
    [
        (2, 2, False, None),
        (1, 2, False, "it is for several hosts"),
        (4, 1, True, None),
        (3, 1, True, "doubling needs a power of two of hosts with one rank each"),
        (2, 2, True, "doubling needs a power of two of hosts with one rank each"),
    ],
)
def test_sockets_take_part_between_hosts(
    tmp_path: Path, hosts: int, ranks_per_host: int, doubling: bool, why: str | None
) -> None:
    assert missing(tmp_path, hosts, ranks_per_host, doubling) == why


def test_sockets_gather_and_sum_small_fp32_only() -> None:
    from calls.cases import Case
    from calls.competitors import Sockets

    plain = Sockets("sockets", Path("plain_sockets"), False)
    doubling = Sockets("sockets-doubling", Path("plain_sockets"), True)
    assert plain.measures(Case("reduce_scatter", "fp32", 4096))
    assert not doubling.measures(Case("reduce_scatter", "fp32", 4096))
    assert not plain.measures(Case("all_gather", "bf16", 4096))
    assert not plain.measures(Case("all_gather", "fp32", 1 << 20))
    assert not plain.measures(Case("all_reduce", "fp32", 4096))


def test_sockets_are_never_the_best_peer() -> None:
    from calls.comparison import best_peer

    times = {"smddp": 30.0, "sockets": 10.0, "sockets-doubling": 9.0, "impi": 14.0}
    rows: dict[str, Any] = {name: SimpleNamespace(median_us=us) for name, us in times.items()}
    found = best_peer(rows)
    assert found is not None
    assert found.median_us == 14.0
