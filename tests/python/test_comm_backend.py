"""``"comm_backend": "smddp"`` in a DeepSpeed config, and the group for what smddp does not own."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ranks
from deepspeed_smddp.config import SmddpConfig
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.zero import comm_backend, ds_config, hooks

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
def test_no_config_and_unreadable_ones_ask_for_nothing(config: Any) -> None:
    assert comm_backend.parse(config) == comm_backend.Request()


def test_arguments_of_initialize_are_searched() -> None:
    args = SimpleNamespace(deepspeed_config="from_args", deepscale_config=None)
    assert ds_config.of_initialize({"config": "a", "config_params": "b"}) == "a"
    assert ds_config.of_initialize({"config": None, "config_params": "b"}) == "b"
    assert ds_config.of_initialize({"args": args}) == "from_args"
    assert ds_config.of_initialize({"args": None}) is None


@pytest.mark.parametrize("size", ["auto", True, None])
def test_allgather_bucket_of_zero_counts_only_where_it_is_a_number(size: object) -> None:
    assert ds_config.allgather_elements({"zero_optimization": {"allgather_bucket_size": size}}) == 0
    assert ds_config.allgather_elements({"zero_optimization": True}) == 0
    assert ds_config.allgather_elements({}) == 0


def test_misspelt_backend_is_one_sentence() -> None:
    with pytest.raises(SmddpConfigError) as caught:
        comm_backend.parse({"comm_backend": "smdpp"})
    assert re.fullmatch(
        r'"comm_backend" in the DeepSpeed config is "smdpp", which torch.distributed does not '
        r'know; did you mean "smddp"\? known: smddp, gloo, nccl, .*',
        str(caught.value),
    )


@pytest.mark.parametrize("backend", [None, 3, "", ["smddp"]])
def test_backend_that_is_no_name(backend: object) -> None:
    with pytest.raises(SmddpConfigError, match="but may hold the name of a backend: smddp, "):
        comm_backend.parse({"comm_backend": backend})


@pytest.mark.parametrize("backend", ["nccl", "gloo", "mpi", "ccl", "SMDDP", "cpu:gloo,cuda:smddp"])
def test_known_backends(backend: str) -> None:
    request = comm_backend.parse({"comm_backend": backend})
    assert request.backend == backend.lower()
    assert request.wants_smddp == ("smddp" in backend.lower())


def test_accelerate_launch_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert ds_config.of_accelerate_launch() is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert ds_config.of_accelerate_launch() == "ds.json"


def test_unknown_deepspeed_is_left_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def initialize(args: Any, config: Any) -> None: ...

    unknown = SimpleNamespace(
        __version__="0.99.1", __version_major__=0, __version_minor__=99, initialize=initialize
    )
    with caplog.at_level(logging.WARNING):
        hooks.hook_deepspeed(unknown)
    assert unknown.initialize is initialize
    assert [record.getMessage() for record in caplog.records] == [
        'smddp: "comm_backend" in a DeepSpeed config will not be read by way of deepspeed, as '
        "version 0.99.1 is not one this package knows; "
        'use deepspeed.init_distributed(dist_backend="smddp")'
    ]


def test_changed_signature_is_left_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def initialize(args: Any, settings: Any) -> None: ...

    changed = SimpleNamespace(
        __version__="0.19.8",
        __version_major__=0,
        __version_minor__=19,
        initialize=initialize,
        zero=SimpleNamespace(Init=type("Init", (), {})),
        comm=SimpleNamespace(comm=SimpleNamespace(init_distributed=lambda: None)),
    )
    with caplog.at_level(logging.WARNING):
        hooks.hook_deepspeed(changed)
    assert changed.initialize is initialize
    assert len(caplog.records) == 1
    assert "initialize has no argument config;" in caplog.records[0].getMessage()


# Every real run below needs DeepSpeed's shared-memory operation, which DeepSpeed compiles on its
# first use (about a minute).
COMPILES = pytest.mark.timeout(400)
PRELUDE = f"""
import argparse, base64, json, os, tempfile, traceback
import deepspeed, torch, torch.distributed as dist
CONFIG = {CONFIG!r}
HJSON = {HJSON!r}

def path(text):
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        file.write(text)
    return file.name

def train(engine, steps=2):
    for _ in range(steps):
        batch = torch.ones(1, 8)
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()

def forked(name, action):
    # DeepSpeed keeps its groups for the life of a process.
    child = os.fork()
    if child == 0:
        try:
            action()
            dist.destroy_process_group()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def run(program: str, size: int, **env: str) -> list[str]:
    lines = program.splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    body = "\n".join(line[margin:] for line in lines)
    return ranks.run(PRELUDE + body, size, timeout=300, env=env)


@COMPILES
def test_initialize_and_zero_init_pick_smddp_in_every_form() -> None:
    run(
        """
        args = argparse.Namespace(deepspeed_config=path(json.dumps(CONFIG)), local_rank=0)
        encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
        forms = {
            "dict": dict(config=CONFIG),
            "path": dict(config=path(json.dumps(CONFIG))),
            "hjson": dict(config=path(HJSON)),
            "base64": dict(config=encoded),
            "config_params": dict(config_params=CONFIG),
            "args": dict(args=args),
        }
        from deepspeed_smddp import settings

        def initialize(arguments):
            model = torch.nn.Linear(8, 8)
            engine = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), **arguments
            )[0]
            assert dist.get_backend() == "smddp"
            assert settings.current().zero_allgather_elements == 5000
            assert settings.current().section.timeout_seconds == 77
            train(engine)

        def zero_init(config):
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = torch.nn.Linear(8, 8)
            assert dist.get_backend() == "smddp"
            assert model.weight.ds_numel == 64 and model.weight.numel() < 64

        for name, arguments in forms.items():
            forked(name, lambda: initialize(arguments))
        for config in (CONFIG, path(HJSON), encoded):
            forked(f"zero.Init({config})", lambda: zero_init(config))
        """,
        1,
    )


@COMPILES
def test_two_ranks_train_with_one_line_of_json() -> None:
    run(
        """
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=CONFIG
        )[0]
        assert dist.get_backend() == "smddp"
        before, after = train(engine, 1), train(engine, 5)
        assert after < before, (before, after)
        import deepspeed_smddp
        own = {row["collective"] for row in deepspeed_smddp.statistics() if row["calls"]}
        lost = {row["collective"] for row in deepspeed_smddp.fallback_ledger()}
        print(own, lost)
        assert {"all_gather", "reduce_scatter"} <= own - lost, (own, lost)
        dist.destroy_process_group()
        """,
        2,
    )


@COMPILES
def test_group_made_before_deepspeed() -> None:
    # The same backend: adopted, with the section's timeout. Another: one sentence, on every rank.
    run(
        """
        model = torch.nn.Linear(8, 8)

        def adopted():
            deepspeed.init_distributed(dist_backend="smddp")
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
            group = dist.distributed_c10d._get_default_group()
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            assert timeout.total_seconds() == 77, timeout

        forked("adopted", adopted)
        dist.init_process_group("gloo")
        for call in (
            lambda: deepspeed.initialize(model=model, config=CONFIG),
            lambda: deepspeed.zero.Init(config_dict_or_path=CONFIG),
        ):
            try:
                call()
            except ValueError as error:
                assert str(error) == (
                    'the DeepSpeed config has "comm_backend": "smddp", but the default process '
                    'group was already made with "gloo"; make it with init_process_group("smddp"), '
                    'or leave making it to DeepSpeed'
                ), error
            else:
                raise AssertionError("no error")
        """,
        1,
    )


@COMPILES
def test_section_without_the_backend_says_so() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "comm_backend"}
    output = run(
        f"""
        dist.init_process_group("gloo")
        model = torch.nn.Linear(8, 8)
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config={config!r})
        dist.destroy_process_group()
        """,
        1,
    )
    assert output[0].count('the section "smddp" of the DeepSpeed config has no effect') == 1


@COMPILES
def test_misspelt_backend_stops_initialize_before_any_group_is_made() -> None:
    run(
        """
        model = torch.nn.Linear(8, 8)
        try:
            deepspeed.initialize(model=model, config={**CONFIG, "comm_backend": "smdpp"})
        except ValueError as error:
            assert 'did you mean "smddp"?' in str(error), error
        else:
            raise AssertionError("no error")
        assert not dist.is_initialized()
        """,
        1,
    )


@COMPILES
def test_accelerate_config_decides_over_the_backend_accelerate_hands_over() -> None:
    run(
        """
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin
        del CONFIG["optimizer"]
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
        assert dist.get_backend() == "smddp"
        model = torch.nn.Linear(8, 8)
        engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert type(engine).__name__ == "DeepSpeedEngine", type(engine)
        assert dist.get_backend() == "smddp"
        dist.destroy_process_group()

        comm = deepspeed.comm
        comm.comm.cdb = None
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        assert dist.get_backend() == "smddp"
        dist.destroy_process_group()
        """,
        1,
    )


@COMPILES
def test_accelerate_launch_file_decides_as_well(tmp_path: Path) -> None:
    run(
        """
        from deepspeed import comm
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        assert dist.get_backend() == "smddp"
        dist.destroy_process_group()
        """,
        1,
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(_file(tmp_path, json.dumps(CONFIG))),
    )


def test_launcher_is_not_disturbed() -> None:
    done = ranks.python(
        """
        import sys
        from deepspeed.launcher import runner
        assert runner.parse_args(["--num_gpus", "2", "train.py"]).num_gpus == 2
        assert "deepspeed_smddp._C" not in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr
    assert "smddp" not in done.stderr


def test_fallback_between_two_of_three_ranks_does_not_wait_for_the_third() -> None:
    outputs = ranks.run(
        """
        import os, time, torch, torch.distributed as dist
        import deepspeed_smddp
        deepspeed_smddp.configure(fallback="silent")
        dist.init_process_group("smddp")
        rank = dist.get_rank()
        store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
        if rank < 2:  # the third makes no call at all before these two are done
            tensor = torch.full((1000,), float(rank))
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
                assert tensor.eq(0).all()
            store.set(f"done {rank}", "yes")
        else:
            store.wait(["done 0", "done 1"])
        # Then all three, through the same fallback group.
        objects = [None] * 3
        dist.all_gather_object(objects, rank)
        assert objects == [0, 1, 2]
        values = [torch.tensor([float(10 * rank + i)]) for i in range(3)]
        received = [torch.empty(1) for _ in range(3)]
        dist.all_to_all_single(torch.cat(received), torch.cat(values))
        ledger = deepspeed_smddp.fallback_ledger()
        print([(row["collective"], row["path"], row["calls"]) for row in ledger])
        assert all(row["path"] == "fallback:gloo" for row in ledger)
        names = {row["collective"] for row in ledger if row["calls"]}
        assert ("send" if rank == 0 else "recv" if rank == 1 else "all_to_all") in names, names
        dist.barrier()
        dist.destroy_process_group()
        """,
        3,
        timeout=60,
    )
    assert len(outputs) == 3


def test_fallback_error_raises_with_the_operations_name() -> None:
    ranks.run(
        """
        import torch, torch.distributed as dist
        import deepspeed_smddp
        deepspeed_smddp.configure(fallback="error")
        dist.init_process_group("smddp")
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
        try:
            dist.all_to_all_single(torch.empty(4), tensor)
        except (RuntimeError, ValueError) as error:
            assert "all_to_all" in str(error), error
        else:
            raise AssertionError("no error")
        dist.destroy_process_group()
        """,
        2,
    )
