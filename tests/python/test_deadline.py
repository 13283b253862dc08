"""Which timeout applies to a group, and the line that says who asked for it."""

from __future__ import annotations

import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import c10d_logger

from deepspeed_smddp import errors
from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import parse_section
from deepspeed_smddp.config.schema import VARIABLES
from deepspeed_smddp.distributed import deadline
from test_comm_backend import run

TORCHS = dist.constants.default_pg_timeout


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    monkeypatch.setattr(settings, "_file", settings._File())
    monkeypatch.setattr(deadline, "_of_default_group", None)
    monkeypatch.setattr(errors, "_warned", set())


def in_module(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a module of that name, which calls ``inner`` with its own arguments."""
    module = types.ModuleType(name)
    module.inner = inner  # type: ignore[attr-defined]
    exec("def call(*args, **kwargs):\n    return inner(*args, **kwargs)", module.__dict__)
    return module.call  # type: ignore[no-any-return]


MINUTE = timedelta(minutes=1)


@pytest.fixture
def torchs_call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Like init_process_group, in torch's module, with torch's loggers around it."""
    source = (
        "def init_process_group(backend=None, timeout=None):\n"
        "    return asked_for(timeout or default)"
    )
    module = types.ModuleType("torch.distributed.distributed_c10d")
    module.asked_for, module.default = deadline.asked_for, TORCHS  # type: ignore[attr-defined]
    exec(source, module.__dict__)
    logged = c10d_logger._time_logger(module.init_process_group)
    return c10d_logger._exception_logger(logged)


def test_a_package(torchs_call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline.sysconfig, "get_path", lambda _: "/opt/site")
    module = types.ModuleType("lightning.fabric.strategy")
    module.call = torchs_call  # type: ignore[attr-defined]
    code = compile("def start(t):\n    return call('smddp', t)", "/opt/site/lightning/s.py", "exec")
    exec(code, module.__dict__)
    assert module.start(MINUTE).by == "lightning"


def test_a_launcher_below_the_program_asks_for_nothing(torchs_call: Callable[..., Any]) -> None:
    def program(timeout: timedelta) -> Any:
        return torchs_call("smddp", timeout)

    launched = in_module("accelerate.utils.launch", program)
    assert launched(MINUTE).by == "the program"


def test_a_further_group_has_the_deadline_of_the_default_group(
    monkeypatch: pytest.MonkeyPatch, torchs_call: Callable[..., Any]
) -> None:
    current = settings.resolve()
    assert deadline.of_group(current, MINUTE, 1) == MINUTE
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert deadline.of_group(current, TORCHS, 0) == MINUTE
    assert deadline.of_group(current, 2 * MINUTE, 0) == 2 * MINUTE
    set_here = settings.resolve(parse_section({"timeout_seconds": 5}))
    assert deadline.of_group(set_here, 2 * MINUTE, 0) == timedelta(seconds=5)


@pytest.mark.timeout(400)
def test_groups_of_every_maker() -> None:
    outputs = run(
        """
        from datetime import timedelta
        import deepspeed_smddp

        def accelerated():
            from accelerate import Accelerator, InitProcessGroupKwargs
            from accelerate.utils import DeepSpeedPlugin
            handler = InitProcessGroupKwargs(timeout=timedelta(seconds=50))
            bare = {key: value for key, value in CONFIG.items() if key not in ("smddp",)}
            Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=bare), kwargs_handlers=[handler]
            )
            assert dist.get_backend() == "smddp"

        def late():
            dist.init_process_group("smddp")
            model = torch.nn.Linear(8, 8)
            deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=CONFIG
            )

        def trained():
            from transformers import TrainingArguments
            bare = {key: value for key, value in CONFIG.items() if key not in ("smddp",)}
            TrainingArguments(output_dir="/tmp/none", deepspeed=bare, ddp_timeout=70, use_cpu=True)

        def configured():
            deepspeed_smddp.configure(timeout_seconds=60)
            dist.init_process_group("smddp")

        def by_deepspeed(**more):
            deepspeed.init_distributed(dist_backend="smddp", **more)

        forked("torch", lambda: dist.init_process_group("smddp"))
        forked("program", lambda: dist.init_process_group("smddp", timeout=timedelta(seconds=40)))
        forked("configure", configured)
        forked("deepspeed", by_deepspeed)
        forked("by-deepspeed", lambda: by_deepspeed(timeout=timedelta(seconds=45)))
        forked("accelerate", accelerated)
        forked("transformers", trained)
        forked("late", late)
        os.environ["SMDDP_TIMEOUT_SECONDS"] = "30"
        forked("environment", by_deepspeed)
        del os.environ["SMDDP_TIMEOUT_SECONDS"]
        os.environ["DEEPSPEED_TIMEOUT"] = "10"
        forked("variable", by_deepspeed)
        """,
        2,
    )
    said = "smddp: operations time out after "
    section = '77 s (timeout_seconds of the section "smddp" of the DeepSpeed config)'
    wanted = {
        "torch": "600 s (the default of timeout_seconds); torch's own default of 1800 s does not "
        "apply",
        "program": "40 s (asked for by the program)",
        "configure": "60 s (timeout_seconds by configure()); torch's own default of 1800 s does "
        "not apply",
        "deepspeed": "600 s (asked for by DeepSpeed's default)",
        "by-deepspeed": "45 s (asked for by the program, by way of DeepSpeed)",
        "accelerate": "50 s (asked for by InitProcessGroupKwargs of accelerate)",
        "transformers": "70 s (asked for by ddp_timeout of transformers)",
        "late": "600 s (the default of timeout_seconds); torch's own default of 1800 s does not "
        "apply",
        "environment": "30 s (SMDDP_TIMEOUT_SECONDS); torch was asked for 600 s (by DeepSpeed's "
        "default)",
        "variable": "600 s (asked for by DEEPSPEED_TIMEOUT)",
    }
    parts = outputs[0].split("case ")[1:]
    assert [part.split()[0] for part in parts] == list(wanted)
    for part, (name, text) in zip(parts, wanted.items(), strict=True):
        lines = [line for line in part.splitlines() if said in line]
        assert len(lines) == 1 and lines[0].endswith(said + text), (name, lines)
    assert (
        f"smddp: from now on operations time out after {section}, no longer after 600 s"
        in (parts[list(wanted).index("late")])
    )
    assert "time out after" not in outputs[1]
