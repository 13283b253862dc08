"""The entry point: registers the backend's name without an import, and breaks no import."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ranks
from harness.ports import free_port

HOOKED = 'hasattr(deepspeed.initialize, "_smddp_wraps")'
GROUP = """
import torch.distributed as dist
dist.init_process_group("smddp", rank=0, world_size=1, init_method="tcp://127.0.0.1:{port}")
"""


def run(program: str, **env: str) -> str:
    """Standard output of a program that must succeed."""
    done = ranks.python(program, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """The package's Python files without build outputs, for the first place on the path."""
    shutil.copytree(
        ranks.ROOT / "deepspeed_smddp",
        tmp_path / "deepspeed_smddp",
        ignore=shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__"),
    )
    shutil.copy(ranks.ROOT / "smddp_autoload.py", tmp_path)
    # An editable installation finds packages before the path does; this copy must come first.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if '_editable_' not in type(f).__module__]\n"
    )
    return tmp_path


def first(path: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{path}:{ranks.environment()['PYTHONPATH']}"}


def test_installed_with_entry_points() -> None:
    for group in ("torch.backends", "torch.distributed.backends"):
        found = {point.value for point in entry_points(group=group) if point.name == "smddp"}
        assert found == {"smddp_autoload:register"}, "install the package first: make build"


def test_torch_alone_finds_the_backend() -> None:
    """Nothing is loaded before the first group, and of what takes long only what it needs."""
    run(
        f"""
        import sys, torch, torch.distributed as dist
        from torch.distributed import Backend
        assert Backend.backend_capability["smddp"] == ["cpu", "cuda"]
        assert Backend.default_device_backend_map["cpu"] == "gloo"
        assert Backend.default_device_backend_map["cuda"] == "nccl"
        ours = {{name for name in sys.modules if "smddp" in name and "_editable_" not in name}}
        assert ours == {{"smddp_autoload"}}, ours
        before = set(sys.modules)

        def join(backend, port):
            method = f"tcp://127.0.0.1:{{port}}"
            dist.init_process_group(backend, rank=0, world_size=1, init_method=method)

        join("smddp", {free_port()})
        tensor = torch.arange(3.0)
        dist.all_reduce(tensor)
        packages = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        costly = {{"pydantic", "pydantic_core", "hjson", "rich", "typer", "deepspeed", "numpy"}}
        assert not packages & costly, packages & costly
        gathered = torch.empty(3)
        dist.all_gather_into_tensor(gathered, tensor)
        assert dist.get_backend() == "smddp" and gathered.tolist() == [0, 1, 2]
        other = dist.new_group(backend="gloo")
        dist.all_reduce(tensor, group=other)
        assert dist.get_backend(other) == "gloo"
        dist.destroy_process_group()

        join("cpu:gloo,cuda:smddp", {free_port()})
        dist.all_reduce(tensor)
        assert dist.get_backend_config() == "cpu:gloo,cuda:smddp"
        """,
        SMDDP_FABRIC_INTERFACE="",  # not set: pydantic is needed to check a setting
    )


def test_import_order_and_repeats_do_not_matter() -> None:
    run(
        """
        import deepspeed_smddp, smddp_autoload, torch, sys
        creator = torch.distributed.Backend._plugins["SMDDP"].creator_fn
        smddp_autoload.register()
        smddp_autoload.register_once()
        import deepspeed_smddp.distributed.backend
        assert torch.distributed.Backend._plugins["SMDDP"].creator_fn is creator
        assert torch.distributed.Backend.backend_list.count("smddp") == 1
        finders = [type(finder).__name__ for finder in sys.meta_path]
        assert finders.count("_HookFinder") == 1, finders
        """
    )


@pytest.mark.parametrize("hooks", ["1", "0"])
def test_an_import_before_torch_registers_at_the_end_of_torch(hooks: str) -> None:
    output = run(
        f"""
        import deepspeed_smddp, sys
        from deepspeed_smddp.commands import main
        slow = ("torch", "numpy", "matplotlib", "deepspeed")  # for a command that is there at once
        print([name for name in slow if name in sys.modules])
        import torch
        assert "SMDDP" in torch.distributed.Backend._plugins
        assert type(torch.__spec__).__name__ == "ModuleSpec"
        import deepspeed, transformers.training_args as arguments
        trainer = hasattr(arguments.TrainingArguments.__post_init__, "_smddp_wraps")
        print({HOOKED}, trainer)
        """,
        SMDDP_AUTOLOAD="0",
        SMDDP_DEEPSPEED_HOOK=hooks,
    )
    assert output.split("\n")[0] == "[]"
    assert output.split("\n")[-2] == f"{hooks == '1'} {hooks == '1'}"


def test_switched_off_by_the_environment() -> None:
    run(
        """
        import torch
        assert "SMDDP" not in torch.distributed.Backend._plugins
        import deepspeed_smddp  # an explicit import still registers
        assert "SMDDP" in torch.distributed.Backend._plugins
        """,
        SMDDP_AUTOLOAD="0",
    )


def test_a_broken_package_does_not_break_torch_or_other_backends(source_copy: Path) -> None:
    (source_copy / "deepspeed_smddp/__init__.py").write_text("raise RuntimeError('broken')\n")
    done = ranks.python(
        """
        import torch
        import accelerate.utils.deepspeed
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
        )
        """,
        **first(source_copy),
    )
    assert done.returncode == 0, done.stderr
    assert "smddp" not in done.stderr, done.stderr


def test_a_failing_registration_is_one_warning() -> None:
    done = ranks.python(
        """
        import smddp_autoload
        def fail():
            raise OSError("no room")
        smddp_autoload.register_backend = fail
        import torch
        smddp_autoload.register()
        """,
        PYTHONWARNINGS="error::UserWarning",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the backend could not be registered: no room") == 1


def test_extension_missing_is_one_sentence(source_copy: Path) -> None:
    done = ranks.python(GROUP.format(port=free_port()), **first(source_copy))
    assert done.returncode != 0
    assert last_line(done).startswith(
        "ImportError: the compiled module deepspeed_smddp._C is missing"
    )
    assert "pip install --no-build-isolation" in last_line(done)


def test_extension_for_another_torch_is_one_sentence(source_copy: Path) -> None:
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    (source_copy / "deepspeed_smddp/_build_info.py").write_text('TORCH_VERSION = "2.4.1+cu121"\n')
    (source_copy / "deepspeed_smddp/_C.so").write_bytes(b"not for this torch")
    done = ranks.python(GROUP.format(port=free_port()), **first(source_copy))
    assert done.returncode != 0
    said = last_line(done)
    for part in ("built for torch 2.4.1+cu121", f"under torch {torch.__version__}", "reinstall"):
        assert part in said
    assert f"the wheel for torch {minor}" in said


@pytest.mark.parametrize("before", ["", "import transformers, accelerate"])
def test_deepspeed_is_hooked_in_every_import_order(before: str) -> None:
    # Without an earlier import, `import deepspeed` imports torch while it is half imported itself.
    run(
        f"""
        {before}
        import deepspeed, inspect
        assert {HOOKED}
        assert hasattr(deepspeed.zero.Init.__init__, "_smddp_wraps")
        for module in (deepspeed, deepspeed.comm, deepspeed.comm.comm):
            assert hasattr(module.init_distributed, "_smddp_wraps"), module
        assert "config_params" in inspect.signature(deepspeed.initialize).parameters
        """
    )


CHOICES = {
    "a config": 'accelerate.HfDeepSpeedConfig({"comm_backend": "smddp"})',
    "a file on the command line": """
import argparse, pathlib, tempfile
file = pathlib.Path(tempfile.mkdtemp(), "ds.hjson")
file.write_text("{comm_backend: smddp}")
sys.argv.append(f"--deepspeed_config={file}")
transformers.TrainingArguments("out", use_cpu=True)
""",
    "the package": "import deepspeed_smddp",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_program_loads_nothing_of_the_package_until_it_chooses_smddp(choice: str) -> None:
    run(
        f"""
        import os, sys, torch, deepspeed
        import accelerate.utils.deepspeed as accelerate, transformers.training_args as transformers
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
        )
        made, post_init = deepspeed.initialize, transformers.TrainingArguments.__post_init__
        def train():
            model, step = torch.nn.Linear(2, 2), {{"train_batch_size": 1}}
            weights = torch.optim.SGD(model.parameters())
            os.environ["LOCAL_RANK"] = "0"
            made(model=model, optimizer=weights, config=step)
            with deepspeed.zero.Init(config_dict_or_path={{**step, "zero_optimization": {{}}}}):
                pass
            del os.environ["LOCAL_RANK"]
        train()
        accelerate.HfDeepSpeedConfig({{"zero_optimization": {{"stage": 3}}}})
        transformers.TrainingArguments("out", use_cpu=True)
        ours = {{name for name in sys.modules if "smddp" in name and "_editable_" not in name}}
        assert ours == {{"smddp_autoload"}}, ours
        exec({CHOICES[choice]!r})
        assert "deepspeed_smddp.deepspeed.hooks" in sys.modules
        functions = (
            deepspeed.initialize,
            deepspeed.comm.init_distributed,
            deepspeed.zero.Init.__init__,
            accelerate.HfDeepSpeedConfig.__init__,
            transformers.TrainingArguments.__post_init__,
        )
        assert not any("smddp_autoload" in f.__code__.co_filename for f in functions)
        assert not any(hasattr(f._smddp_wraps, "_smddp_wraps") for f in functions)
        train()  # by the function that was taken before
        torch.distributed.destroy_process_group()
        """,
        DS_ACCELERATOR="cpu",
    )


def test_an_import_of_the_package_hooks_what_is_there_and_a_reload_hooks_again_once() -> None:
    run(
        f"""
        import deepspeed, importlib
        import accelerate.utils.deepspeed as accelerate, transformers.training_args as transformers
        assert not {HOOKED}
        import deepspeed_smddp
        assert {HOOKED}
        modules = (deepspeed, accelerate, transformers)
        loaders = [(type(m.__loader__), m.__spec__.loader is m.__loader__) for m in modules]
        for module in (*modules, deepspeed_smddp):
            importlib.reload(module)
        assert {HOOKED}
        for function in (
            deepspeed.initialize,
            deepspeed.init_distributed,
            deepspeed.zero.Init.__init__,
            accelerate.HfDeepSpeedConfig.__init__,
            transformers.TrainingArguments.__post_init__,
        ):
            assert not hasattr(function._smddp_wraps, "_smddp_wraps"), function
        after = [(type(m.__loader__), m.__spec__.loader is m.__loader__) for m in modules]
        assert after == loaders
        """,
        SMDDP_AUTOLOAD="0",
    )


def test_an_import_that_fails_is_not_hooked(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\nraise ImportError('half installed')\n")
    done = ranks.python("import deepspeed", **first(tmp_path))
    assert last_line(done) == "ImportError: half installed"
    assert "smddp" not in done.stderr
