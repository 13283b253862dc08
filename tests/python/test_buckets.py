"""Bucket sizes in a ZeRO-3 config: they bound AllGathers on the wire, and "auto" chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.training import STEPS, Trainer

pytestmark = [
    pytest.mark.timeout(300, method="signal"),  # at first DeepSpeed compiles an operation
]

KIB, MIB = 1 << 10, 1 << 20
WIDE = {"hidden_size": 256, "intermediate_size": 1200}  # its largest parameter has 1.2 MiB


def train(trainer: Trainer, cache: Path, layout: str = "AA", **changes: Any) -> dict[str, Any]:
    zero = {"reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 500_000}
    zero |= {"stage3_max_live_parameters": 10_000_000, **changes.pop("zero", {})}
    results = trainer.call(
        "harness.zero_jobs:run",
        layout,
        "smddp",
        limit=200,
        scenarios=["wide"],
        env={"XDG_CACHE_HOME": str(cache)},
        changes={"model": WIDE, "zero": zero, **changes},
    )
    losses = [result["wide"]["losses"] for result in results]
    assert all(len(found) == STEPS for found in losses)
    return results[0]["wide"]


def gathers(result: dict[str, Any]) -> dict[str, int]:
    rows = [row for row in result["statistics"] if row["collective"] == "all_gather"]
    return {
        "calls": sum(row["calls"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "rounds": sum(row["rounds"] for row in rows),
        "largest": max(row["largest_round"] for row in rows),
    }


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_allgathers_follow_the_bucket_size(trainer: Trainer, tmp_path: Path, layout: str) -> None:
    sizes = {"64 KiB": 64 * KIB, "1 MiB": MIB, "no bound": 1 << 40}
    runs = {
        name: train(
            trainer,
            tmp_path,
            layout,
            smddp={"allgather_bucket_size": size, "reduce_scatter_bucket_size": MIB},
        )
        for name, size in sizes.items()
    }
    seen = {name: gathers(run) for name, run in runs.items()}
    print(json.dumps(seen, indent=1))
    for name, size in sizes.items():
        assert seen[name]["largest"] <= size
        # As few rounds as the bound allows, except that an operation's last round may be smaller.
        assert seen[name]["bytes"] / size <= seen[name]["rounds"]
        assert seen[name]["rounds"] <= seen[name]["bytes"] / size + seen[name]["calls"]
        assert seen[name]["bytes"] == seen["no bound"]["bytes"]
        assert runs[name]["losses"] == runs["no bound"]["losses"]
        assert runs[name]["state"] == runs["no bound"]["state"]
    assert seen["64 KiB"]["largest"] > 32 * KIB
    assert seen["1 MiB"]["largest"] > 512 * KIB
    assert seen["no bound"]["largest"] > MIB
    assert seen["64 KiB"]["rounds"] > 4 * seen["1 MiB"]["rounds"]


def test_deepspeeds_own_key_counts_elements(trainer: Trainer, tmp_path: Path) -> None:
    run = train(
        trainer,
        tmp_path,
        zero={"allgather_bucket_size": 50_000},
        smddp={"allgather_bucket_size": MIB, "reduce_scatter_bucket_size": MIB},
    )
    assert 100_000 < gathers(run)["largest"] <= 50_000 * 4


def test_auto_measures_chooses_and_applies(trainer: Trainer, tmp_path: Path) -> None:
    left_open = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    auto = train(trainer, tmp_path, zero=dict.fromkeys(left_open, "auto"))
    again = train(trainer, tmp_path, zero=dict.fromkeys(left_open, "auto"))
    (curve,) = (tmp_path / "deepspeed_smddp" / "tune").glob("*.json")
    assert len(json.loads(curve.read_text())["allgather"]) >= 2
    choice = auto["choice"]
    assert gathers(auto)["largest"] <= choice["allgather_bucket_size"]
    assert auto["zero"]["reduce_bucket_size"] == choice["reduce_bucket_size"]
    assert auto["zero"]["prefetch_bucket_size"] == choice["stage3_prefetch_bucket_size"]
    assert auto["zero"]["param_persistence_threshold"] == 200, "the config says so"
    assert again["losses"] == auto["losses"]
    fixed = train(
        trainer, tmp_path, smddp={"allgather_bucket_size": MIB, "reduce_scatter_bucket_size": MIB}
    )
    assert fixed["choice"] is None, "nothing was left open"
    assert fixed["losses"] == auto["losses"]


def test_tune_writes_a_config(tmp_path: Path) -> None:
    import ranks

    config = {
        "bf16": {"enabled": True},
        "smddp": {"timeout_seconds": 50},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 4321},
    }
    (tmp_path / "in.json").write_text(json.dumps(config))
    program = f"""
        import sys
        sys.argv = ["smddp", "tune", "--ds-config", {str(tmp_path / "in.json")!r},
                    "--write", {str(tmp_path / "out.json")!r}]
        from deepspeed_smddp.commands.main import main
        main()
    """
    printed = ranks.run(program, 2, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert "stage3_prefetch_bucket_size" in printed[0]
    assert printed[1] == ""
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["zero_optimization"]["reduce_bucket_size"] == 4321
    assert written["zero_optimization"]["stage3_prefetch_bucket_size"] > 0
    assert written["smddp"]["allgather_bucket_size"] >= 64 * KIB
    assert written["smddp"]["timeout_seconds"] == 50


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"zero_optimization": {"stage": 2}}, "only ZeRO-3 has sizes to choose"),
        ({"zero_optimization": {"stage": 3}}, "start it with the job's launcher"),
        ({"zero_optimization": {"stage": 3}, "smddp": {"fallback": 3}}, '"warn"'),
    ],
)
def test_tune_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], sentence: str
) -> None:
    from typer.testing import CliRunner

    from deepspeed_smddp.commands.main import app

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["tune", "--ds-config", str(path)])
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
