"""``smddp plan``'s times of collectives between hosts, beside fresh simulations."""

from __future__ import annotations

import json
import statistics

import pytest
from typer.testing import CliRunner

from deepspeed_smddp.commands.main import app
from deepspeed_smddp.planning import collective_time
from deepspeed_smddp.planning.constants import values
from deepspeed_smddp.planning.hardware import CLUSTERS, gbit
from test_simulator import simulate

COLLECTIVES = ("all_gather", "reduce_scatter")
TABLE = collective_time.table()


def fresh(collective: str, hosts: int, rate: float, shards: tuple[int, ...]) -> list[float]:
    """Seconds for each shard, simulated now on the network of the table; ``rate`` in Gbit/s."""
    network = f"--gbit {rate} --latency-us {TABLE.latency_us} --message-us {TABLE.message_us}"
    sizes = ",".join(str(hosts * shard) for shard in shards)
    options = f"--hosts {hosts} --collective {collective} {network} --bytes {sizes}"
    return [result["seconds"] for result in simulate(*options.split())["results"]]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("hosts", "rate"), [(2, 400.0), (4, 50.0), (8, 12.5)])
def test_the_table_is_what_the_core_does_now(collective: str, hosts: int, rate: float) -> None:
    row = TABLE.microseconds[collective][TABLE.gbit.index(rate)][TABLE.hosts.index(hosts)]
    kept = {n: us for n, us in zip(TABLE.shard_bytes, row, strict=True) if us is not None}
    now = fresh(collective, hosts, rate, tuple(kept))
    for (shard, before), seconds in zip(kept.items(), now, strict=True):
        assert seconds == pytest.approx(before * 1e-6, rel=0.03), (
            f"{collective} between {hosts} hosts of {rate:g} Gbit/s, shards of {shard} bytes: the "
            "core's schedules have changed since the planner's table was made; run "
            f"`{TABLE.made_by}`, then benchmarks/planner.py and benchmarks/planner_emulated.py"
        )


def test_between_the_points_of_the_table() -> None:
    shards = (2000, 8000, 32000, 100_000, 150_000, 500_000, 2_000_000)
    errors = []
    for name in COLLECTIVES:
        for hosts, rate in ((3, 45.0), (6, 180.0), (12, 360.0), (24, 90.0)):
            for shard, now in zip(shards, fresh(name, hosts, rate, shards), strict=True):
                planned = collective_time.simulated(name, hosts, shard, gbit(rate))
                errors.append(abs(planned.seconds / now - 1))
    assert statistics.median(errors) < 0.05
    assert statistics.quantiles(errors, n=10)[-1] < 0.12


def test_beyond_the_table_the_last_ratio_of_the_bound_holds() -> None:
    last, rate = TABLE.hosts[-1], gbit(50)
    shard = 16 * 1024
    there = collective_time.simulated("all_gather", last, shard, rate)
    beyond = collective_time.simulated("all_gather", 4 * last, shard, rate)
    assert there.origin == "simulated"
    assert beyond.origin == f"extended from {last} hosts"
    ratio = TABLE.bound(4 * last, shard, rate) / TABLE.bound(last, shard, rate)
    assert beyond.seconds == pytest.approx(ratio * there.seconds)
    assert "shards" in collective_time.simulated("all_gather", 2, 1e9, rate).origin
    assert "Gbit/s" in collective_time.simulated("all_gather", 2, 1e6, gbit(1600)).origin


def test_no_time_is_below_the_bound() -> None:
    for hosts in (2, 5, 64, 300, 2048):
        for shard in (1.0, 3e3, 1e6, 1e9):
            for rate in (0.1, 40, 400, 3200):
                seconds = collective_time.simulated("all_gather", hosts, shard, gbit(rate)).seconds
                assert seconds >= TABLE.bound(hosts, shard, gbit(rate))


@pytest.mark.parametrize("cluster", ["p4d", "p5"])
def test_a_gather_of_a_layer_takes_what_a_rail_of_its_hosts_takes(cluster: str) -> None:
    """8 ranks per host: the simulator divides NICs and bytes itself."""
    c, hosts, nbytes = values(), 8, 634_000_000
    of = CLUSTERS[cluster]
    rate = of.network_rate * 8e-9 * c["smddp.network"]
    options = f"--hosts {hosts} --ranks-per-host 8 --nics 1 --gbit {rate} --view rail"
    network = f"--latency-us {TABLE.latency_us} --message-us {TABLE.message_us} --bytes {nbytes}"
    (now,) = simulate(*options.split(), *network.split())["results"]
    group = collective_time.RankGroup(8 * hosts, 1, of, "smddp")
    inside = collective_time.collective_seconds(
        "all_gather", nbytes / hosts, group._replace(ranks=8), c
    )
    planned = collective_time.collective_seconds("all_gather", nbytes, group, c) - inside
    assert planned == pytest.approx(now["seconds"], rel=0.05)


def test_page_and_json_say_what_is_extended() -> None:
    words = ("plan", "llama-2-13b", "p4d", "--gpus", "512")
    runner = CliRunner(env={"COLUMNS": "80"})
    page = runner.invoke(app, [*words]).output
    assert "With 16 to 4,096 GPUs, smddp's communication is partly beyond" in page
    answer = json.loads(runner.invoke(app, [*words, "--json", "-"]).output)
    assert answer["recommended"]["communication"] == "simulated, reductions extended from 16 hosts"
    origins = {(p["gpus"], p["library"]): p["communication"] for p in answer["curve"]}
    assert origins[8, "smddp"] == "none between hosts"
    assert origins[512, "smddp"] == "simulated, reductions extended from 16 hosts"
    assert origins[512, "nccl"] == "a formula with fitted constants"
    assert "hosts" in origins[4096, "smddp"]
