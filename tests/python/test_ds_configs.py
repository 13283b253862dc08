"""The files of ds_configs/ load, validate, and agree with the arithmetic in their comments."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson
import pytest
import yaml

import ranks
from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.deepspeed import comm_backend

FOLDER = ranks.ROOT / "ds_configs"
# The other keys of a GPT-NeoX file are GPT-NeoX's own.
OF_DEEPSPEED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "zero_optimization",
    "steps_per_print",
    "wall_clock_breakdown",
)
KNOWN = {
    *OF_DEEPSPEED,
    *("comm_backend", "smddp", "train_batch_size", "bf16", "scheduler", "prescale_gradients"),
    *("activation_checkpointing", "gradient_clipping"),
}


@dataclass(frozen=True)
class Model:
    """The model and the ranks that a file is written for."""

    layers: int
    layer: float  # parameters of one layer
    parameters: float
    norm: int  # elements of its largest vector
    ranks: int
    data_parallel: int
    batch: int  # sequences per step
    tensor_parallel: int = 1
    degree: int = 0


MODELS = {
    "gpt-neox-65b.hjson": Model(80, 12 * 8192**2, 65e9, 4 * 8192, 512, 64, 2048, tensor_parallel=8),
    "gpt-neox-65b.yml": Model(80, 12 * 8192**2, 65e9, 4 * 8192, 512, 512, 2048),
    "gpt2-30b.hjson": Model(48, 12 * 7168**2, 30e9, 4 * 7168, 256, 256, 1536, degree=128),
    "llama2-13b.hjson": Model(
        40, 4 * 5120**2 + 3 * 5120 * 13824, 13e9, 5120, 512, 512, 1024, degree=64
    ),
}


def read(name: str) -> dict[str, Any]:
    """The config as DeepSpeed reads it."""
    text = (FOLDER / name).read_text()
    if not name.endswith(".yml"):
        return json.loads(json.dumps(hjson.loads(text)))  # plain dictionaries
    found = yaml.safe_load(text)
    config = {key: found[key] for key in OF_DEEPSPEED}
    # GPT-NeoX adds this if precision is bfloat16 (megatron/neox_arguments/arguments.py).
    return config | found["deepspeed_extra_args"] | {"bf16": {"enabled": True}}


@pytest.mark.parametrize("name", MODELS)
def test_smddp_section_is_read(name: str, tmp_path: Path) -> None:
    config = FOLDER / name
    if name.endswith(".yml"):
        config = tmp_path / "config.json"
        config.write_text(json.dumps(read(name)))
    request = comm_backend.parse(config)
    assert request.backend == "smddp"
    assert request.section is not None
    assert request.section.timeout_seconds == 1800
    assert request.section.sharded_data_parallel_degree == MODELS[name].degree


@pytest.mark.parametrize("name", MODELS)
def test_arithmetic(name: str) -> None:
    model, config = MODELS[name], read(name)
    assert set(config) <= KNOWN  # DeepSpeed ignores a misspelt key
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert batch * model.data_parallel == model.batch
    assert config.get("train_batch_size", model.batch) == model.batch
    assert model.data_parallel * model.tensor_parallel == model.ranks
    assert model.degree == 0 or model.data_parallel % model.degree == 0
    assert model.layers * model.layer == pytest.approx(model.parameters, rel=0.03)
    zero = config["zero_optimization"]
    layer = model.layer / model.tensor_parallel
    assert 1 <= zero["stage3_prefetch_bucket_size"] / layer < 1.02
    assert zero["reduce_bucket_size"] <= 1.02 * layer
    assert 2 <= zero["stage3_max_live_parameters"] / layer < 5
    # Vectors stay on every rank, matrices do not.
    assert model.norm < zero["stage3_param_persistence_threshold"] < 5120**2 / 8


def test_hjson_becomes_json_by_the_command_in_the_readme() -> None:
    name = "gpt2-30b.hjson"
    command = f"python -m hjson.tool -j {name} > gpt2-30b.json"
    assert command in (FOLDER / "README.md").read_text()
    argv = [sys.executable, "-m", "hjson.tool", "-j", str(FOLDER / name)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == read(name)


def test_deepspeed_accepts_the_files() -> None:
    """DeepSpeed's own loader and checks, in a world of the model's number of ranks."""
    cases = {
        name: (str(FOLDER / name) if name.endswith(".hjson") else read(name), model.ranks)
        for name, model in MODELS.items()
    }
    expected = {
        name: (read(name)["zero_optimization"], model.batch, model.data_parallel)
        for name, model in MODELS.items()
    }
    done = ranks.python(
        f"""
        import os
        from types import SimpleNamespace
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="512")
        import deepspeed, torch.distributed as dist
        from deepspeed.runtime.config import DeepSpeedConfig
        from torch.testing._internal.distributed.fake_pg import FakeStore
        cases, expected = {cases!r}, {expected!r}
        for name, (config, world) in cases.items():
            zero, batch, data_parallel = expected[name]
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
            deepspeed.comm.comm.cdb = None
            deepspeed.init_distributed(dist_backend="fake", verbose=False)
            mpu = SimpleNamespace(get_data_parallel_world_size=lambda: data_parallel)
            found = DeepSpeedConfig(config, mpu=mpu)
            assert found.train_batch_size == batch, found.train_batch_size
            assert found.zero_optimization_stage == 3 and found.bfloat16_config.enabled
            for key, value in zero.items():
                fields = type(found.zero_config).model_fields.items()
                names = {{field.alias or name: name for name, field in fields}}
                held = getattr(found.zero_config, names[key])
                assert held == value, (name, key, held, value)
            dist.destroy_process_group()
            print("took", name)
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"took {name}" in done.stdout for name in MODELS] == [True] * len(MODELS)


def test_command_line_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, found in (
        (["--deepspeed_config", "a.json", "--steps", "3"], "a.json"),
        (["--deepspeed_config=a=b.json"], "a=b.json"),
        (["--deepspeed_config"], None),
        (["--deepspeed_configuration", "a.json"], None),
        ([], None),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        assert ds_config.of_command_line() == found
