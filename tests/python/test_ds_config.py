"""The communication keys of a DeepSpeed config, and DeepSpeed versions that are not hooked."""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config.schema import SmddpConfig
from deepspeed_smddp.config.settings import ZERO_BUCKET
from deepspeed_smddp.deepspeed import comm_backend, hooks
from deepspeed_smddp.errors import SmddpConfigError

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 3, "allgather_bucket_size": 5000},
    "comm_backend": "smddp",
    "smddp": {"timeout_seconds": 77},
}
HJSON = """{
  // hjson, as DeepSpeed reads it
  train_micro_batch_size_per_gpu: 1
  optimizer: {type: "AdamW", params: {torch_adam: true}}
  zero_optimization: {stage: 3, allgather_bucket_size: 5e3}
  comm_backend: "smddp"
  smddp: {timeout_seconds: 77}
}"""
REQUEST = comm_backend.Request("smddp", SmddpConfig(timeout_seconds=77), 5000)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    return path


FORMS: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: CONFIG,
    "path": lambda tmp: str(_file(tmp, json.dumps(CONFIG))),
    "pathlib": lambda tmp: _file(tmp, json.dumps(CONFIG)),
    "hjson": lambda tmp: str(_file(tmp, HJSON)),
    "base64": lambda _: base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode(),
    "base64 of hjson": lambda _: base64.urlsafe_b64encode(HJSON.encode()).decode(),
    "json text": lambda _: json.dumps(CONFIG),
    "DeepSpeedConfig": lambda _: SimpleNamespace(_param_dict=CONFIG),
    "HfDeepSpeedConfig": lambda _: SimpleNamespace(config=CONFIG),
}


@pytest.mark.parametrize("form", FORMS)
def test_config_is_read_in_every_form(form: str, tmp_path: Path) -> None:
    assert comm_backend.parse(FORMS[form](tmp_path)) == REQUEST


@pytest.mark.parametrize("config", [None, "/no/such/file", "%%%", "[1]", 7, {}])
def test_no_config_and_unreadable_configs_request_nothing(config: Any) -> None:
    assert comm_backend.parse(config) == comm_backend.Request()


def test_arguments_of_initialize_are_searched() -> None:
    args = SimpleNamespace(deepspeed_config="from_args", deepscale_config=None)
    assert ds_config.of_initialize({"config": "a", "config_params": "b"}) == "a"
    assert ds_config.of_initialize({"config": None, "config_params": "b"}) == "b"
    assert ds_config.of_initialize({"args": args}) == "from_args"
    assert ds_config.of_initialize({"args": None}) is None


@pytest.mark.parametrize("size", ["auto", True, None])
def test_allgather_bucket_size_of_zero_counts_only_if_it_is_a_number(size: object) -> None:
    assert (
        ds_config.number({"zero_optimization": {"allgather_bucket_size": size}}, ZERO_BUCKET) == 0
    )
    assert ds_config.number({"zero_optimization": True}, ZERO_BUCKET) == 0
    assert ds_config.number({}, ZERO_BUCKET) == 0


def test_misspelt_backend_is_one_sentence() -> None:
    with pytest.raises(SmddpConfigError) as caught:
        comm_backend.parse({"comm_backend": "smdpp"})
    assert re.fullmatch(
        r'"comm_backend" in the DeepSpeed config is "smdpp", which torch.distributed does not '
        r'know; did you mean "smddp"\? known: smddp, gloo, nccl, .*',
        str(caught.value),
    )


@pytest.mark.parametrize("backend", [None, 3, "", ["smddp"]])
def test_backend_that_is_not_a_name(backend: object) -> None:
    with pytest.raises(SmddpConfigError, match="but may hold the name of a backend: smddp, "):
        comm_backend.parse({"comm_backend": backend})


@pytest.mark.parametrize("backend", ["nccl", "gloo", "mpi", "ccl", "SMDDP", "cpu:smddp,cuda:nccl"])
def test_known_backends(backend: str) -> None:
    request = comm_backend.parse({"comm_backend": backend})
    assert request.backend == backend.lower()
    assert request.wants_smddp == ("smddp" in backend.lower())


def test_the_backend_of_the_device_that_computes_counts() -> None:
    assert not comm_backend.parse({"comm_backend": "cpu:gloo,cuda:smddp"}).wants_smddp
    assert not comm_backend._agrees("smddp", "cpu:gloo,cuda:smddp")
    assert comm_backend._agrees("smddp", "cpu:smddp,cuda:nccl")


def test_file_of_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert ds_config.of_accelerate_launch() is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert ds_config.of_accelerate_launch() == "ds.json"


@pytest.mark.parametrize("version", ["0.99.1", "0.19.8"])
def test_a_deepspeed_that_is_not_supported_refuses_the_key_and_nothing_else(
    version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def initialize(args: Any = None, settings: Any = None, config: Any = None) -> str:
        return "an engine"

    if version == "0.99.1":
        reason = "it works with DeepSpeed 0.14 to 0.19, and this is DeepSpeed 0.99.1;"
    else:
        reason = "initialize has no argument config_params;"
    unknown = SimpleNamespace(
        __version__=version,
        initialize=initialize,
        zero=SimpleNamespace(Init=type("Init", (), {})),
        comm=SimpleNamespace(comm=SimpleNamespace(init_distributed=lambda: None)),
    )
    monkeypatch.setitem(sys.modules, "deepspeed", unknown)
    with caplog.at_level(logging.INFO):
        hooks.hook_deepspeed(unknown)
        assert unknown.initialize(config={"comm_backend": "nccl"}) == "an engine"
    assert not caplog.records, "a program that has not chosen smddp is told nothing"
    with pytest.raises(SmddpConfigError, match=re.escape(reason)):
        unknown.initialize(config=CONFIG)
