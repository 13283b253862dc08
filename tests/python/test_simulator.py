"""``smddp_simulate``: what a collective takes on a cluster that is not there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(__file__).parents[2] / "build" / "smddp_simulate"


def simulate(*options: str) -> dict[str, Any]:
    run = subprocess.run(
        [COMMAND, *options], capture_output=True, text=True, check=True, timeout=300
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_every_size_is_answered_and_no_time_is_below_the_bound(collective: str) -> None:
    options = f"--hosts 4 --ranks-per-host 2 --collective {collective} --bytes 4096,1048576"
    answer = simulate(*options.split())
    assert [result["bytes"] for result in answer["results"]] == [4096, 1048576]
    for result in answer["results"]:
        assert result["seconds"] >= result["bound_seconds"]
        assert result["idle_looks"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--hosts", "none"], '--hosts is "none"; it may be a number from 1 on'),
        (
            ["--collective", "scan"],
            "it may be all_gather, reduce_scatter, all_reduce or all_to_all",
        ),
        (["--nics", "9"], "--nics may be at most 8"),
        (["--bytes"], "--bytes needs a value"),
    ],
)
def test_a_bad_option_is_refused_with_what_it_may_be(options: list[str], sentence: str) -> None:
    run = subprocess.run([COMMAND, *options], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert sentence in run.stderr
