"""Processor time of a rank's start: imports, ``init_process_group`` and a first AllReduce.

    python benchmarks/start_up.py --out FOLDER --before ~/before/.venv/bin/python

Each run starts all ranks of a layout over Gloo, over smddp, over smddp without the measurement of
the network between hosts, and over the smddp of another interpreter, in turns. With ``--libfabric``
layouts of several hosts start over that libfabric as well. A rank counts the seconds of its
process, user and system, when its first AllReduce is done. Hosts are emulated by
``SMDDP_HOST_ID``; their network is the loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

# Layout -> hosts, ranks of each, turns.
LAYOUTS = {"1 x 1": (1, 1, 5), "1 x 2": (1, 2, 3), "1 x 8": (1, 8, 1), "2 x 1": (2, 1, 3)}
# Only if they are asked for: minutes on two cores, and 0.1 GB of memory per rank.
LARGE_LAYOUTS = {"4 x 8": (4, 8, 1), "16 x 8": (16, 8, 1)}
_LONGEST_START = 600  # seconds
RANK = """
import resource, sys
import torch, torch.distributed as dist

def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

imported = seconds()
if sys.argv[1] == "smddp":
    import deepspeed_smddp
ours = seconds()
dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(1))
print(imported, ours - imported, seconds() - ours)
dist.destroy_process_group()
"""


class Kind(NamedTuple):
    """What is started."""

    name: str
    python: str
    backend: str = "smddp"
    curve: str = "auto"
    libfabric: str = ""  # the path of one; empty: the one that smddp finds


def start(kind: Kind, layout: tuple[int, int]) -> list[list[float]]:
    """One start; of each rank the seconds of torch's import, of the package's, and of the rest."""
    hosts, per_host = layout
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(hosts * per_host):
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(hosts * per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "LOCAL_RANK": str(rank % per_host),
            "SMDDP_HOST_ID": f"host-{rank // per_host}",
            "GLOO_SOCKET_IFNAME": "lo",
            "SMDDP_FABRIC_INTERFACE": "lo",
            "OMP_NUM_THREADS": "1",
            "SMDDP_DEBUG": f"curve={kind.curve}",
            "SMDDP_LIBFABRIC": kind.libfabric,
        }
        command = [kind.python, "-c", RANK, kind.backend]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    texts = [rank.communicate(timeout=_LONGEST_START)[0] for rank in ranks]
    return [[float(word) for word in text.split()] for text in texts]


def kinds_of(before: str | None, libfabric: str | None, hosts: int) -> list[Kind]:
    versions = [("smddp before", before)] if before is not None else []
    versions.append(("smddp", sys.executable))
    kinds = [Kind("gloo", sys.executable, "gloo")]
    for name, python in versions:
        kinds.append(Kind(name, python))
        if hosts == 1:
            continue
        kinds.append(Kind(f"{name}, network not measured", python, curve="default"))
        if libfabric is None:
            continue
        other = f"{name}, other libfabric"
        kinds.append(Kind(other, python, libfabric=libfabric))
        kinds.append(Kind(f"{other}, network not measured", python, "smddp", "default", libfabric))
    return kinds


def measure(before: str | None, libfabric: str | None, layouts: list[str]) -> list[dict[str, Any]]:
    """A row per layout, library and turn."""
    rows = []
    for layout in layouts:
        hosts, per_host, turns = {**LAYOUTS, **LARGE_LAYOUTS}[layout]
        for turn in range(turns):
            for kind in kinds_of(before, libfabric, hosts):
                ranks = start(kind, (hosts, per_host))
                rows.append({"layout": layout, "library": kind.name, "turn": turn, "ranks": ranks})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over ranks and turns, in Markdown."""
    lines = [
        "| hosts x ranks | library | CPU seconds of a rank | of these the package's import "
        "| group and first AllReduce | over Gloo's |",
        "|---|---|---|---|---|---|",
    ]
    for layout in dict.fromkeys(row["layout"] for row in rows):
        base = 0.0
        for library in dict.fromkeys(row["library"] for row in rows):
            mine = [r for r in rows if r["layout"] == layout and r["library"] == library]
            if not mine:
                continue
            ranks = [rank for row in mine for rank in row["ranks"]]
            own, rest = (statistics.median(rank[i] for rank in ranks) for i in (1, 2))
            whole = statistics.median(sum(rank) for rank in ranks)
            base = base or own + rest
            over = "" if library == "gloo" else f"{own + rest - base:.3f}"
            lines.append(
                f"| {layout} | {library} | {whole:.2f} | {own:.3f} | {rest:.3f} | {over} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures, writes ``start-up.json``, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the raw data")
    parser.add_argument("--before", help="the python of another version of smddp")
    parser.add_argument("--libfabric", help="the path of another libfabric.so.1")
    parser.add_argument(
        "--layouts", nargs="*", default=list(LAYOUTS), choices=[*LAYOUTS, *LARGE_LAYOUTS]
    )
    parser.add_argument("--tables-only", action="store_true", help="of the raw data that is there")
    args = parser.parse_args()
    raw = args.out / "start-up.json"
    known = json.loads(raw.read_text()) if raw.exists() else []
    if not args.tables_only:
        args.out.mkdir(parents=True, exist_ok=True)
        known = [row for row in known if row["layout"] not in args.layouts]
        known += measure(args.before, args.libfabric, args.layouts)
        raw.write_text(json.dumps(known) + "\n")
    print(table(known), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
