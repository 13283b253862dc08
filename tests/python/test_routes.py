"""``smddp.routes``: who carries which sizes of a collective, given or measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

import deepspeed_smddp
from deepspeed_smddp import SmddpConfigError
from deepspeed_smddp.commands.main import app
from deepspeed_smddp.config.parsing import given_keys, parse_section
from deepspeed_smddp.diagnostics.doctor import job_doctor, routes_check
from deepspeed_smddp.tuning import cache, routes
from deepspeed_smddp.tuning.cache import MeasuredRoutes
from harness import cases, host_device
from harness.cases import FORMS, Case
from harness.variables import section
from harness.worker import Context
from harness.world import WorldError, fresh

GLOO = "route:gloo"


# ---- the keys


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("nccl", ((0, "nccl"),)),
        ("auto", ((0, "auto"),)),
        ([{"path": "gloo"}], ((0, "gloo"),)),
        (
            [{"up_to": 65536.0, "path": "fallback"}, {"path": "smddp"}],
            ((65536, "fallback"), (0, "smddp")),
        ),
        ([{"up_to": 1, "path": "gloo"}], ((1, "gloo"),)),
    ],
)
def test_steps(given: Any, steps: Any) -> None:
    parsed = parse_section({"routes": {"all_gather": given}})
    assert parsed.routes.all_gather == steps
    assert parsed.routes.all_reduce == ((0, "default"),)
    assert given_keys(parsed) == {"routes.all_gather": steps}


@pytest.mark.parametrize(
    "given",
    [
        "mpi",
        [],
        [{"up_to": 8}],
        [{"up_to": 0, "path": "gloo"}],
        [{"up_to": 8, "path": "gloo", "from": 2}],
        [{"up_to": 8, "path": "gloo"}, {"up_to": 8, "path": "smddp"}],
        [{"up_to": 8, "path": "auto"}, {"path": "smddp"}],
    ],
)
def test_wrong_steps_are_named(given: Any) -> None:
    with pytest.raises(SmddpConfigError, match=r"smddp\.routes\.all_reduce.* may hold"):
        parse_section({"routes": {"all_reduce": given}})


# ---- given routes


def taken(ctx: Context, wanted: list[Case]) -> dict[str, int]:
    return host_device.check(ctx, wanted)


def every_form() -> list[Case]:
    return [Case(collective, form) for collective, forms in FORMS.items() for form in forms]


# Gloo can't: these stay with smddp.
BEYOND_GLOO = [
    Case("all_gather", dtype=torch.int16),
    Case("reduce_scatter", operation="AVG"),
    Case("all_gather", "stack"),
    Case("reduce_scatter", "stack"),
]


def environment(**routes: Any) -> dict[str, str | None]:
    return {**section(routes=routes)}


def test_a_routed_collective_is_carried_by_gloo_in_every_form() -> None:
    # An operation that was chosen is not one that smddp lacks.
    env = environment(all_gather="gloo", reduce_scatter="fallback") | {"SMDDP_FALLBACK": "error"}
    # Gloo sums in an order of its own; here each element has two addends, in fp32.
    with fresh("AA", env=env) as world:
        wanted = [case for case in every_form() if case not in BEYOND_GLOO]
        for counted in world.run(taken, wanted):
            paths = {name: calls for name, calls in counted.items() if "route" in name}
            assert paths == {
                f"all_gather {GLOO}": len(FORMS["all_gather"]) - 1,
                f"reduce_scatter {GLOO}": len(FORMS["reduce_scatter"]) - 1,
            }
            (own,) = set(counted) - set(paths)
            assert own.startswith("all_reduce shm") and counted[own] == len(FORMS["all_reduce"])
        for counted in world.run(taken, BEYOND_GLOO):
            assert sum(counted.values()) == len(BEYOND_GLOO)
            assert not any("route" in name for name in counted), counted
        assert "goes to gloo" not in world.log(0)


def test_a_route_by_size_and_one_for_gpus_only() -> None:
    small, large = 4 * 1000 * 2, 4 * 1001 * 2  # bytes of the output
    steps = [{"up_to": small, "path": "gloo"}, {"path": "smddp"}]
    with fresh("AA", env=environment(all_gather=steps, all_reduce="nccl")) as world:
        wanted = [Case("all_gather", numels=(numel,)) for numel in (1000, 1001, 1)]
        for counted in world.run(taken, [*wanted, Case("all_reduce")]):
            assert counted.pop(f"all_gather {GLOO}") == 2
            assert sorted(counted.values()) == [1, 1] and not any("route" in n for n in counted)
    assert large > small


def make_and_gather(ctx: Context) -> None:
    deepspeed_smddp.configure(routes={"all_gather": "gloo" if ctx.rank == 1 else "smddp"})
    store = dist.FileStore(os.environ["RENDEZVOUS"], ctx.size)
    dist.init_process_group("smddp", store=store, rank=ctx.rank, world_size=ctx.size)


def test_ranks_with_different_routes_make_no_group(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"RENDEZVOUS": str(tmp_path / "store")}
    with fresh("AAA", backend=None, env=env) as world:
        failures = world.failures(make_and_gather)
        assert all("rank 1" in f.message and '"routes"' in f.message for f in failures), failures


# ---- measured routes


def test_choice_between_measured_sizes() -> None:
    points = [(4096, 10.0, 5.0), (16384, 10.0, 9.6), (65536, 10.0, 9.0), (262144, 10.0, 2.0)]
    steps = routes.choose(points)
    assert steps == [(8192, "fallback"), (32768, "smddp"), (0, "fallback")]
    assert (
        routes.describe(steps, "gloo") == "gloo up to 8192 bytes, then smddp up to 32768 bytes"
        ", then gloo"
    )
    assert routes.choose([(1, 1.0, 2.0), (2, 1.0, 2.0)]) == [(0, "smddp")]


def test_stored_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Up to the largest size that is measured on GPUs.
    points = [(4096, 1e-4, 2e-4), (routes.SIZES["cuda"][-1], 1e-3, 2e-3)]
    known = MeasuredRoutes("all_gather", "cuda", "2 ranks of one host", points)
    assert cache.load("x", cache.ROUTES) is None
    cache.store("x", known, cache.ROUTES)
    assert cache.load("x", cache.ROUTES) == known
    path = cache.directory() / "x.json"
    stored = json.loads(path.read_text())
    assert cache.ROUTES.validate_json(json.dumps(stored), strict=True) == known
    for wrong in ([], [[1, 2]], [[2, 1, 1], [1, 1, 1]], [[1, 1, -1], [2, 1, 1]], 3):
        path.write_text(json.dumps(stored | {"points": wrong}))
        assert cache.load("x", cache.ROUTES) is None, wrong
    path.write_text("{")
    assert cache.load("x", cache.ROUTES) is None


def test_doctor_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not list(routes_check.findings())
    points = [(4096, 31e-5, 14e-5), (1 << 30, 2.0, 3.0)]
    known = MeasuredRoutes("all_gather", "cpu", "4 ranks of 2 hosts", points)
    cache.store("x", known, cache.ROUTES)
    (cache.directory() / "of another kind.json").write_text("{}")
    (found,) = routes_check.findings()
    assert found.text.startswith(
        "all_gather on 4 ranks of 2 hosts: gloo up to 2097152 bytes, then smddp; "
        "us of smddp/gloo: 4 KiB 310/140, 1 GiB 2000000/3000000 (20"
    )
    alone = json.loads(CliRunner().invoke(app, ["doctor", "--json", "-"]).output)
    assert found.text in [one["text"] for one in alone["findings"]]
    report = job_doctor.JobReport(2, routes=[found.text])
    console = Console(record=True, width=job_doctor.WIDTH)
    console.print(job_doctor.page(report))
    assert "4 KiB 310/140" in console.export_text()


def measured(ctx: Context) -> dict[str, Any]:
    """What a rank resolves for each collective, and the calls that are counted after it."""
    chosen: dict[str, Any] = {}
    resolve = routes.resolve

    def noted(group: Any, collective: str, device: str) -> Any:
        chosen[collective] = resolve(group, collective, device)
        return chosen[collective]

    routes.resolve = noted
    # Gloo's sums have another order: of integers.
    wanted = [Case(c, dtype=torch.int32, seed=s) for c in FORMS for s in range(3)]
    counted = taken(ctx, wanted)
    other = dist.new_group()  # measures for itself
    cases.check(ctx, Case("all_gather"), other)
    dist.destroy_process_group(other)
    return {"chosen": chosen, "counted": counted, "groups_tried": len(routes._tried)}


def test_auto_measures_once_and_all_ranks_agree(tmp_path: Path) -> None:
    env = environment(all_gather="auto", reduce_scatter="auto", all_reduce="auto")
    env |= {"XDG_CACHE_HOME": str(tmp_path)}
    for found in ("measured", "recalled or measured"):
        with fresh("AABB", env=env) as world:
            answers = world.run(measured)
            said = world.log(0)
        for answer in answers:
            assert answer["chosen"] == answers[0]["chosen"]
            assert set(answer["chosen"]) == set(FORMS)
            # The measurement's own calls are not counted.
            assert sum(answer["counted"].values()) == 3 * len(FORMS), answer["counted"]
        assert said.count("smddp: all_gather on cpu, ") == 2  # two groups
        assert any(f"all_gather on cpu, {word} in" in said for word in found.split(" or "))
    assert len(list((tmp_path / "deepspeed_smddp" / "tune").glob("*.json"))) == 3


def measured_as_on_gpus(ctx: Context, fallback_fails: bool = False) -> dict[str, Any]:
    """As :func:`measured`, in the way that is timed on GPUs: beside matmuls."""
    order: list[str] = []
    way, run = routes._way, routes._Matmuls.run

    def noted_way(group: Any, collective: str, route: str, *rest: Any) -> Any:
        timed = way(group, collective, route, *rest)

        def noted() -> None:
            order.append("call")
            if route == "fallback" and fallback_fails:
                raise RuntimeError("no communicator")
            timed()
            order.append("waited")

        return noted

    def noted_run(self: Any) -> None:
        order.append("matmuls")
        run(self)

    routes._way, routes._Matmuls.run = noted_way, noted_run  # type: ignore[method-assign]
    routes.BESIDE_MATMULS, routes.MATMUL = ("cpu",), 64
    routes._free_bytes = lambda _: 1 << 26
    return {**measured(ctx), "order": " ".join(order)}


def test_on_gpus_it_is_timed_beside_matmuls(tmp_path: Path) -> None:
    env = environment(all_gather="auto", reduce_scatter="auto", all_reduce="auto")
    with fresh("AA", env=env | {"XDG_CACHE_HOME": str(tmp_path)}) as world:
        for answer in world.run(measured_as_on_gpus):
            assert set(answer["chosen"]) == set(FORMS)
            assert "call matmuls waited call matmuls waited" in answer["order"]
    # At most a sixteenth of the free memory of the rank that has least.
    for path in (tmp_path / "deepspeed_smddp" / "tune").glob("*.json"):
        assert all(size <= (1 << 26) / 16 for size, *_ in json.loads(path.read_text())["points"])


def test_without_a_working_fallback_smddp_carries_all(tmp_path: Path) -> None:
    env = environment(all_gather="auto", reduce_scatter="auto", all_reduce="auto")
    with fresh("AAA", env=env | {"XDG_CACHE_HOME": str(tmp_path)}) as world:
        for answer in world.run(measured_as_on_gpus, True):
            assert all(steps == [(0, "smddp")] for steps in answer["chosen"].values())
            assert answer["order"] == "call call"  # once in each of the two groups
            assert answer["groups_tried"] == 1  # the other one has ended
        assert "stays with smddp: the fallback failed: no communicator" in world.log(0)


def all_slow(group: Any, collective: str, device: str) -> Any:
    return [(0, "fallback")]


def resolved_away(ctx: Context) -> dict[str, int]:
    routes.resolve = all_slow
    return taken(ctx, [Case("all_gather", seed=s) for s in range(3)])


def not_now(ctx: Context) -> dict[str, int]:
    routes.resolve = lambda *_: None
    counted = taken(ctx, [Case("all_gather")])
    routes.resolve = all_slow
    return counted | taken(ctx, [Case("all_gather")])


def test_auto_takes_what_was_measured_once_it_was() -> None:
    with fresh("AA", env=environment(all_gather="auto")) as world:
        assert world.run(not_now)[0] == {"all_gather shm": 1, f"all_gather {GLOO}": 1}
    with fresh("AA", env=environment(all_gather="auto")) as world:
        assert world.run(resolved_away)[0] == {f"all_gather {GLOO}": 3}


def failing(ctx: Context) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no clock")

    routes.resolve = fails
    dist.all_gather_into_tensor(torch.empty(2 * ctx.size), torch.ones(2))


def test_an_error_of_the_measurement_reaches_the_caller() -> None:
    env = environment(all_gather="auto")
    with fresh("AA", env=env) as world, pytest.raises(WorldError, match="no clock"):
        world.run(failing)
