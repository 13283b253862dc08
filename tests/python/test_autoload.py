"""The entry point: registers the backend's name without an import, and breaks no import."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ranks
from harness.ports import free_port

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


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_installed_with_entry_points(group: str) -> None:
    found = {point.value for point in entry_points(group=group) if point.name == "smddp"}
    assert found == {"smddp_autoload:register"}, "install the package first: make build"


def test_import_torch_registers_the_name_and_loads_nothing() -> None:
    output = run(
        """
        import sys, torch
        from torch.distributed import Backend
        assert Backend.backend_capability["smddp"] == ["cpu", "cuda"]
        assert Backend.default_device_backend_map["cpu"] == "gloo"
        assert Backend.default_device_backend_map["cuda"] == "nccl"
        named = {name for name in sys.modules if "smddp" in name}
        print(sorted(name for name in named if not name.startswith("_editable_")))
        """
    )
    assert output.strip() == "['smddp_autoload']"


def test_a_first_operation_imports_nothing_that_it_does_not_need() -> None:
    """Their imports take longer than the rest of the start."""
    output = run(
        f"""
        import sys, torch
        before = set(sys.modules)
        {GROUP.replace(chr(10), chr(10) + " " * 8).format(port=free_port())}
        dist.all_reduce(torch.ones(1))
        packages = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        costly = "pydantic", "pydantic_core", "hjson", "rich", "typer", "deepspeed", "numpy"
        print([name for name in costly if name in packages])
        dist.destroy_process_group()
        """,
        SMDDP_FABRIC_INTERFACE="",  # not set: pydantic is needed to check a setting
    )
    assert output.strip() == "[]"


def test_group_without_an_import_of_the_package() -> None:
    output = run(
        f"""
        import torch
        {GROUP.format(port=free_port()).strip().replace(chr(10), chr(10) + " " * 8)}
        tensor = torch.arange(3.0)
        dist.all_reduce(tensor)
        gathered = torch.empty(3)
        dist.all_gather_into_tensor(gathered, tensor)
        print(dist.get_backend(), gathered.tolist())
        other = dist.new_group(backend="gloo")
        dist.all_reduce(tensor, group=other)
        print(dist.get_backend(other))
        dist.destroy_process_group()
        """
    )
    assert output.split("\n")[:2] == ["smddp [0.0, 1.0, 2.0]", "gloo"]


def test_composite_backend() -> None:
    output = run(
        f"""
        import torch, torch.distributed as dist
        dist.init_process_group(
            "cpu:gloo,cuda:smddp", rank=0, world_size=1,
            init_method="tcp://127.0.0.1:{free_port()}",
        )
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        print(dist.get_backend_config())
        """
    )
    assert output.strip() == "cpu:gloo,cuda:smddp"


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
        """
        import deepspeed_smddp, sys
        from deepspeed_smddp.commands import main
        print([name for name in ("torch", "numpy") if name in sys.modules])
        import torch
        assert "SMDDP" in torch.distributed.Backend._plugins
        assert type(torch.__spec__).__name__ == "ModuleSpec"
        import deepspeed
        print(hasattr(deepspeed.initialize, "_smddp_wraps"))
        """,
        SMDDP_AUTOLOAD="0",
        SMDDP_DEEPSPEED_HOOK=hooks,
    )
    assert output.split("\n")[0] == "[]"
    assert output.split("\n")[-2] == str(hooks == "1")


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
    assert done.stderr.count("UserWarning: smddp:") == 1, done.stderr


@pytest.mark.parametrize("warnings", ["default", "error::UserWarning"])
def test_a_failing_registration_is_one_warning(warnings: str) -> None:
    done = ranks.python(
        """
        import smddp_autoload
        def fail():
            raise OSError("no room")
        smddp_autoload.register_backend = fail
        import torch
        smddp_autoload.register()
        """,
        PYTHONWARNINGS=warnings,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the backend could not be registered: no room") == 1


def test_extension_missing_is_one_sentence(source_copy: Path) -> None:
    done = ranks.python(GROUP.format(port=free_port()), **first(source_copy))
    assert done.returncode != 0
    assert last_line(done) == (
        "ImportError: the compiled module deepspeed_smddp._C is missing; build it in its source "
        "tree with `pip install --no-build-isolation --force-reinstall --no-deps .`"
    )


def test_extension_for_another_torch_is_one_sentence(source_copy: Path) -> None:
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    (source_copy / "deepspeed_smddp/_build_info.py").write_text('TORCH_VERSION = "2.4.1+cu121"\n')
    (source_copy / "deepspeed_smddp/_C.so").write_bytes(b"not for this torch")
    done = ranks.python(GROUP.format(port=free_port()), **first(source_copy))
    assert done.returncode != 0
    assert last_line(done) == (
        f"ImportError: deepspeed_smddp was built for torch 2.4.1+cu121 but runs under torch "
        f"{torch.__version__}; install the wheel for torch {minor}, or rebuild it in its source "
        "tree with `pip install --no-build-isolation --force-reinstall --no-deps .`"
    )


HOOKED = 'hasattr(deepspeed.initialize, "_smddp_wraps")'


@pytest.mark.parametrize("before", ["", "import torch", "import transformers, accelerate"])
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


def test_deepspeed_imported_first_is_hooked_by_the_import_of_the_package() -> None:
    run(
        f"""
        import deepspeed
        assert not {HOOKED}
        import deepspeed_smddp
        assert {HOOKED}
        """,
        SMDDP_AUTOLOAD="0",
    )


def test_a_reload_is_hooked_again_and_once() -> None:
    run(
        f"""
        import deepspeed, importlib
        import accelerate.utils.deepspeed as accelerate, transformers.training_args as transformers
        import deepspeed_smddp
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
        """
    )


def test_hook_is_switched_off_by_the_environment() -> None:
    run(
        f"""
        import deepspeed, deepspeed_smddp, transformers.training_args as arguments
        assert not {HOOKED}
        assert not hasattr(arguments.TrainingArguments.__post_init__, "_smddp_wraps")
        """,
        SMDDP_DEEPSPEED_HOOK="0",
    )


def test_an_import_that_fails_is_not_hooked(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\nraise ImportError('half installed')\n")
    done = ranks.python("import deepspeed", **first(tmp_path))
    assert last_line(done) == "ImportError: half installed"
    assert "smddp" not in done.stderr
