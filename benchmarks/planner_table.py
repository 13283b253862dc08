"""The planner's table of smddp's collectives between hosts, from simulations; some minutes.

    python benchmarks/planner_table.py    # deepspeed_smddp/planning/simulated_times.json

Runs smddp_simulate (docs/dev/scale.md) for each collective, rate and number of hosts: one rank of
each host, with its rail. The times are those of the second call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.simulated import simulate, sizes_option

from deepspeed_smddp.planning.collective_time import SimulatedTimes
from deepspeed_smddp.version import __version__

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "deepspeed_smddp" / "planning" / "simulated_times.json"
LATENCY_US, MESSAGE_US = 20, 1
# Of a rail. 50, 200 and 400: a GPU's share in hosts of 8 GPUs with 400, 1,600 and 3,200 Gbit/s.
GBIT = (1.0, 12.5, 50.0, 100.0, 200.0, 400.0)
KIB, MIB = 1 << 10, 1 << 20
# Up to 64 KiB a shard leaves as messages, above as writes after a grant: a point on either side.
SHARDS = tuple(KIB * n for n in (1, 4, 16, 32, 64, 65, 128, 256, 1024, 2048, 4096, 16384))
# The largest shard of so many hosts: more takes minutes. The sums of a ReduceScatter are real work.
MOST = {
    "all_gather": {2: 16 * MIB, 4: 16 * MIB, 8: 16 * MIB, 16: 16 * MIB, 32: 4 * MIB, 64: 2 * MIB},
    "reduce_scatter": {2: 16 * MIB, 4: 4 * MIB, 8: 4 * MIB, 16: 4 * MIB, 32: MIB, 64: 256 * KIB},
}
HOSTS = tuple(MOST["all_gather"])


def microseconds(collective: str, gbit: float, hosts: int, shards: tuple[int, ...]) -> list[float]:
    """One simulation of the rails of so many hosts, one shard size after the other."""
    answer = simulate(
        hosts,
        1,
        *("--collective", collective, "--gbit", str(gbit)),
        *("--latency-us", str(LATENCY_US), "--message-us", str(MESSAGE_US)),
        *sizes_option([hosts * shard for shard in shards]),
    )
    return [round(result["seconds"] * 1e6, 3) for result in answer["results"]]


def shards_of(collective: str, hosts: int) -> tuple[int, ...]:
    """The shards that are simulated with so many hosts."""
    return tuple(shard for shard in SHARDS if shard <= MOST[collective][hosts])


def make(commit: str) -> SimulatedTimes:
    """Simulates every point, the largest clusters first."""
    cases = list(itertools.product(MOST, GBIT, HOSTS))
    order = sorted(cases, key=lambda case: -case[2])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        times = dict(
            zip(
                order,
                pool.map(lambda c: microseconds(*c, shards_of(c[0], c[2])), order),
                strict=True,
            )
        )

    def row(case: tuple[str, float, int]) -> tuple[float | None, ...]:
        found = times[case]
        return (*found, *[None] * (len(SHARDS) - len(found)))

    return SimulatedTimes(
        made_by="make plan-table",
        version=__version__,
        commit=commit,
        latency_us=LATENCY_US,
        message_us=MESSAGE_US,
        gbit=GBIT,
        hosts=HOSTS,
        shard_bytes=SHARDS,
        microseconds={
            name: tuple(tuple(row((name, rate, n)) for n in HOSTS) for rate in GBIT)
            for name in MOST
        },
    )


def core_commit() -> str:
    """The last commit that changed the core."""
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "csrc"]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()


def text(table: SimulatedTimes) -> str:
    """JSON with a line for each rate and number of hosts."""
    content = table.model_dump()
    rows = content.pop("microseconds")
    head = json.dumps(content)[:-1]
    by_name = []
    for name, rates in rows.items():
        lines = [",\n   ".join(json.dumps(row) for row in hosts) for hosts in rates]
        by_name.append(f'"{name}": [\n  [' + "],\n  [".join(lines) + "]]")
    return head + ',\n"microseconds": {' + ",\n ".join(by_name) + "}}\n"


def main() -> int:
    """Writes the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TABLE, help="the file of the table")
    options = parser.parse_args()
    start = time.monotonic()
    made = make(core_commit())
    options.out.write_text(text(made), encoding="utf-8")
    print(
        f"{options.out}: by smddp {made.version}, commit {made.commit}, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
