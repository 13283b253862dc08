"""``"comm_backend": "smddp"`` in a DeepSpeed config, and the group for foreign operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ranks
from harness.ports import free_port
from harness.training import IMPORTS
from test_ds_config import CONFIG, HJSON

# Every real run below needs DeepSpeed's shared-memory operation, which DeepSpeed compiles on its
# first use (about a minute).
COMPILES = pytest.mark.timeout(400)
PRELUDE = f"""
import argparse, json, os, tempfile, traceback
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
    # DeepSpeed keeps its groups for the life of a process. One rank may end a case before the
    # other: the next one has a store of its own.
    print("case", name, flush=True)
    os.environ["MASTER_PORT"] = str(PORTS.pop())
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
    ports = f"PORTS = {[free_port() for _ in range(10)]}\n"
    return ranks.run(ports + PRELUDE + body, size, timeout=300, env=env, imports=IMPORTS)


@COMPILES
def test_initialize_zero_init_and_the_command_line_pick_smddp() -> None:
    """test_ds_config.py reads a config in its other forms."""
    run(
        """
        import sys
        from deepspeed_smddp.config import settings

        def initialize(**arguments):
            model = torch.nn.Linear(8, 8)
            engine = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), **arguments
            )[0]
            assert dist.get_backend() == "smddp"
            assert settings.current().zero_allgather_elements == 5000
            assert settings.current().section.timeout_seconds == 77
            train(engine)

        def zero_init():
            with deepspeed.zero.Init(config_dict_or_path=path(HJSON)):
                model = torch.nn.Linear(8, 8)
            assert dist.get_backend() == "smddp"
            assert model.weight.ds_numel == 64 and model.weight.numel() < 64

        def command_line():
            sys.argv = ["train.py", "--deepspeed", "--deepspeed_config", path(json.dumps(CONFIG))]
            deepspeed.init_distributed()
            assert dist.get_backend() == "smddp"

        args = argparse.Namespace(deepspeed_config=path(json.dumps(CONFIG)), local_rank=0)
        forked("args", lambda: initialize(args=args))
        forked("config", lambda: initialize(config=CONFIG))
        forked("zero.Init", zero_init)
        forked("command line", command_line)
        """,
        1,
    )


@COMPILES
def test_two_ranks_train_with_one_line_of_json() -> None:
    run(
        """
        CONFIG["zero_optimization"]["allgather_bucket_size"] = 100
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
        # zero_optimization.allgather_bucket_size counts elements; these are fp32.
        for row in deepspeed_smddp.statistics():
            if row["collective"] == "all_gather":
                assert row["rounds"] > row["calls"] and row["largest_round"] <= 4 * 100, row
        dist.destroy_process_group()
        """,
        2,
    )


@COMPILES
def test_engines_share_their_settings_and_each_config_is_read_once() -> None:
    run(
        """
        from deepspeed_smddp.config import ds_json, settings
        files = []
        read = ds_json._read_text
        ds_json._read_text = lambda text: (files.append(text), read(text))[1]

        def initialize(config):
            model = torch.nn.Linear(8, 8)
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            return settings.current().section

        first = path(json.dumps({**CONFIG, "smddp": {"timeout_seconds": 77, "max_sms": 4}}))
        assert initialize(first).max_sms == 4
        assert files == [first], files
        bare = {key: value for key, value in CONFIG.items() if key != "smddp"}
        assert initialize(path(json.dumps(bare))).timeout_seconds == 77
        added = initialize({**CONFIG, "smddp": {"fallback": "silent"}})
        assert (added.timeout_seconds, added.max_sms, added.fallback) == (77, 4, "silent")
        try:
            initialize({**CONFIG, "smddp": {"max_sms": 5}})
        except ValueError as error:
            assert '"smddp.max_sms" of an earlier one is 4' in str(error), error
        else:
            raise AssertionError("no error")
        dist.destroy_process_group()
        """,
        1,
    )


@COMPILES
def test_groups_made_before_and_configs_without_the_backend() -> None:
    """A group of the same backend is adopted; one of another backend is refused."""
    output = run(
        """
        model = torch.nn.Linear(8, 8)

        def refused(words, config=CONFIG):
            for call in (
                lambda: deepspeed.initialize(model=model, config=config),
                lambda: deepspeed.zero.Init(config_dict_or_path=config),
            ):
                try:
                    call()
                except ValueError as error:
                    assert words in str(error), error
                else:
                    raise AssertionError("no error")

        def adopted():
            deepspeed.init_distributed(dist_backend="smddp")
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

        forked("adopted", adopted)
        refused('did you mean "smddp"?', {**CONFIG, "comm_backend": "smdpp"})
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        refused('"comm_backend": "smddp", but the default process group was already made with')
        plain = {key: value for key, value in CONFIG.items() if key != "comm_backend"}
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
        dist.destroy_process_group()
        """,
        1,
    )
    assert output[0].count('the section "smddp" of the DeepSpeed config has no effect') == 1


@COMPILES
def test_timeout_of_the_section_reaches_a_group_made_before() -> None:
    run(
        """
        import time
        dist.init_process_group("smddp")
        model = torch.nn.Linear(8, 8)
        deepspeed.initialize(
            model=model, model_parameters=model.parameters(),
            config={**CONFIG, "smddp": {"timeout_seconds": 2}},
        )
        store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
        if dist.get_rank() == 0:
            start = time.monotonic()
            try:
                dist.all_reduce(torch.ones(4))
            except RuntimeError as error:
                print(error)
                assert 1.5 < time.monotonic() - start < 30
            else:
                raise AssertionError("no error")
            store.set("done", "yes")
            store.wait(["seen"])  # rank 0 is the store's server
        else:
            store.wait(["done"])
            store.set("seen", "yes")
        os._exit(0)  # the group is broken: nothing to destroy
        """,
        2,
    )


@COMPILES
def test_accelerate_config_has_precedence_over_the_backend_that_accelerate_passes() -> None:
    run(
        """
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin
        from accelerate.utils.deepspeed import HfDeepSpeedConfig
        del CONFIG["optimizer"]
        HfDeepSpeedConfig(CONFIG)  # nothing keeps it: it does not choose for a later group
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        assert dist.get_backend() == "gloo"
        deepspeed.comm.destroy_process_group()

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
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    run(
        """
        import logging
        from deepspeed import comm
        from deepspeed_smddp.errors import logger
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logger.addHandler(handler)
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        assert dist.get_backend() == "smddp"
        # accelerate gives its accelerator's backend without having been asked to: no word about it.
        assert not any("was called with" in sentence for sentence in said), said
        dist.destroy_process_group()
        """,
        1,
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path),
    )


def test_launcher_is_not_changed() -> None:
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
