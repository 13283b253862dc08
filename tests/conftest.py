"""Fixtures shared by every Python test: worlds of real processes, deadlines, leak checks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent / "python"
# torch's run-time compilations, outside the user's cache: trees with different interpreters would
# each discard the other's files there.
EXTENSIONS = HERE.parent.parent / "build" / "torch_extensions"
# Files that `make test-quick` runs: no or few processes, and a second or two for each.
QUICK = {
    "test_activation_offload",
    "test_config",
    "test_ddp",
    "test_delayed_init",
    "test_ds_config",
    "test_ds_configs",
    "test_fallback",
    "test_futures",
    "test_groups",
    "test_import_rules",
    "test_sharding_units",
    "test_tensor_parallel",
    "test_tune",
    "test_unsupported_features",
    "test_upstream",
    "test_work",
}
# Files that guard what rarely changes: other programs, launchers and versions, tools of the tests.
# `make test` leaves them out, and tests marked as rare. `make test-rare` has them, CI one of each.
RARE = {
    "test_compat",
    "test_compat_checkpoints",
    "test_doctor_launched",
    "test_examples",
    "test_gpu_check",
    "test_hf_trainer",
    "test_kubernetes",
    "test_measured_network",
    "test_testbed",
    "test_tune_gain",
}
# Files whose tests mostly wait, for silences, deadlines and slow links: one after another in a
# process of their own, beside which there is one for each core (Makefile).
WAITING = {
    "test_between_hosts",
    "test_death",
    "test_failures",
    "test_faults",
    "test_start_failures",
}
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent.parent / "tools"))
# tests.testbed is this tree's, even if the package is installed in place from another tree.
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [str(HERE.parent)]
# So that the fork server and every interpreter that a test starts find the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.update(
    {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SMDDP_FABRIC_INTERFACE": "lo",
        # The same patterns in every run; test_measured_network.py measures.
        "SMDDP_DEBUG": "curve=default,check_locks=1",
        # Of ranks that are meant to fail. The rest is as users have it.
        "SMDDP_REPORT_DIR": tempfile.mkdtemp(prefix="smddp-test-reports-"),
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
)

from compile_deepspeed_op import STALE, remove_stale_locks  # noqa: E402
from harness import world as world_module  # noqa: E402
from tests.testbed import Testbed  # noqa: E402

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=2000, **_COMMON)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_sessionstart() -> None:
    remove_stale_locks(EXTENSIONS, STALE)


@pytest.hookimpl(trylast=True)  # after pytest has noted what failed
def pytest_sessionfinish(session: pytest.Session) -> None:
    shutil.rmtree(os.environ["SMDDP_REPORT_DIR"], ignore_errors=True)
    cache = session.config.cache
    if cache is not None and not hasattr(session.config, "workerinput"):
        # Under the names of a run side by side, "name@group", no later run would find them.
        failed = cache.get("cache/lastfailed", {})
        cache.set("cache/lastfailed", {re.sub(r"@\w[\w:]*$", "", name): True for name in failed})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone",
        choices=("skip", "only"),
        help="leave out the tests marked as alone, or run these only: `make test` runs first the "
        "others side by side, then these one after another",
    )
    parser.addoption(
        "--rare",
        choices=("skip", "short", "only"),
        help="leave out tests marked as rare, or run these only, or of these one of each file",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            # By signal: a late test fails, and the worlds still end without an error.
            seconds = 3600 if PROFILE == "deep" else 240
            item.add_marker(pytest.mark.timeout(seconds, method="signal"))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(side_by_side_group(item)))
        if item.path.stem in QUICK:
            item.add_marker(pytest.mark.quick)
        if item.path.stem in RARE:
            item.add_marker(pytest.mark.rare)
    # Long tests first: at the end no process waits for another's long one.
    items.sort(
        key=lambda item: item.path.stem not in WAITING and item.get_closest_marker("slow") is None
    )


def side_by_side_group(item: pytest.Item) -> str:
    """Tests of one group run in one process (``pytest -n 2 --dist loadgroup``).

    The tests of a file if its tests share a fixture, else the cases of one test function.
    """
    if item.path.stem in WAITING:
        return "waiting"
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    file = item.path.stem
    if any(definition.scope == "module" for found in definitions for definition in found):
        return file
    return f"{file}::{getattr(item, 'originalname', item.name)}"


# pytest looks only at functions whose names start with pytest_.
@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Heeds ``--alone`` and ``--rare``, after ``-k`` and ``-m``."""
    wanted = list(items)
    for name in ("rare", "alone"):
        choice = config.getoption(f"--{name}")
        if choice is not None:
            skip = choice == "skip"
            wanted = [i for i in wanted if (i.get_closest_marker(name) is None) == skip]
        if choice == "short":
            wanted = list({item.path: item for item in reversed(wanted)}.values())
    kept = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = wanted


@pytest.fixture(scope="session")
def worlds() -> Iterator[world_module.Pool]:
    """``worlds("AABB")`` is a running world of that layout, reused by later tests."""
    pool = world_module.Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(world_module.shared_memory_left())
    yield
    left = set(world_module.shared_memory_left()) - before
    assert not left, f"left in /dev/shm: {sorted(left)}"


@pytest.fixture
def testbed() -> Iterator[Callable[..., Testbed]]:
    """``testbed(hosts=2, rate="1gbit", nics=1, mtu=1500)`` is a testbed that ends with the test."""
    reason = Testbed.missing()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kw: stack.enter_context(Testbed(*args, **kw))
