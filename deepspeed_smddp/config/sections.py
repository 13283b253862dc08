"""The keys of the "smddp" section of a DeepSpeed config, and what each may hold.

``config`` parses the section by these classes.
"""

from __future__ import annotations

from typing import Any

from deepspeed_smddp.config.keys import (
    Section,
    boolean,
    key,
    one_of,
    seconds,
    subsection,
    text,
    whole,
)

MIN_BUCKET_BYTES = 4096

_COUNT, _POSITIVE = whole(0, 1 << 31), whole(1, 1 << 31)
_BUCKET_BYTES = whole(MIN_BUCKET_BYTES, 1 << 62)
_ROUTE_BYTES = whole(0, (1 << 62) - 1)

_FILE = "the name of a file, with {rank} and {host} in it if wanted, or an empty text for none"
_BUCKET_HOLDS = f'"auto" or a number of bytes of at least {MIN_BUCKET_BYTES}'


def _bucket(value: Any) -> Any:
    return value if isinstance(value, str) and value == "auto" else _BUCKET_BYTES(value)


ROUTES = ("smddp", "fallback", "nccl", "gloo", "auto")
_ROUTE_HOLDS = (
    '"smddp", "nccl", "gloo", "fallback" (either), "auto", or a list of '
    '{"up_to": bytes, "path": one of these} in rising order, of which the last may have no "up_to"'
)


def _route(value: Any) -> tuple[tuple[int, str], ...]:
    """Steps: bytes at most (0: no bound), and the path. A single path is one step."""
    if isinstance(value, str):
        value = [{"path": value}]
    steps = [_route_step(step) for step in value] if isinstance(value, list | tuple) else []
    bounds = [bound for bound, _ in steps]
    paths = {path for _, path in steps}
    # "auto" finds bounds itself.
    if not steps or 0 in bounds[:-1] or ("auto" in paths and len(steps) > 1):
        raise ValueError(_ROUTE_HOLDS)
    bounded = [bound for bound in bounds if bound]
    if bounded != sorted(set(bounded)):
        raise ValueError(_ROUTE_HOLDS)
    return tuple(steps)


def _route_step(step: Any) -> tuple[int, str]:
    if isinstance(step, dict) and set(step) <= {"up_to", "path"} and "path" in step:
        bound, path = _ROUTE_BYTES(step.get("up_to", 0)), step["path"]
        allowed = "up_to" not in step or bound > 0
    elif isinstance(step, list | tuple) and len(step) == 2:
        bound, path = _ROUTE_BYTES(step[0]), step[1]
        allowed = True
    else:
        raise ValueError(_ROUTE_HOLDS)
    if not allowed or path not in ROUTES:
        raise ValueError(_ROUTE_HOLDS)
    return bound, path


_SMDDP = ((0, "smddp"),)


class ActivationOffload(Section):
    """``smddp.activation_offload``: activations are in host memory until the backward pass."""

    enabled: bool = key(False, boolean, "true or false")
    horizon: int = key(2, _POSITIVE, "a number of layers of at least 1")
    directory: str = key("", text, "a directory to map host memory from, or an empty text for none")


class Ledger(Section):
    """``smddp.ledger``: where the counters of :func:`deepspeed_smddp.statistics` are written."""

    table: bool = key(False, boolean, "true or false")
    json_file: str = key("", text, _FILE)
    json_lines: str = key("", text, _FILE)
    prometheus_file: str = key("", text, _FILE)
    interval_seconds: float = key(
        0.0,
        seconds(may_be_zero=True),
        "a number of seconds, or 0 to write only when the process ends",
    )
    monitor: bool = key(True, boolean, "true or false")


class Routes(Section):
    """``smddp.routes``: who carries which sizes of a collective, in bytes of all ranks' data."""

    all_gather: tuple[tuple[int, str], ...] = key(_SMDDP, _route, _ROUTE_HOLDS)
    reduce_scatter: tuple[tuple[int, str], ...] = key(_SMDDP, _route, _ROUTE_HOLDS)
    all_reduce: tuple[tuple[int, str], ...] = key(_SMDDP, _route, _ROUTE_HOLDS)


class SmddpConfig(Section):
    """The "smddp" section of a DeepSpeed config (JSON or hjson). Every key is optional."""

    allgather_bucket_size: int | str = key("auto", _bucket, _BUCKET_HOLDS)
    reduce_scatter_bucket_size: int | str = key("auto", _bucket, _BUCKET_HOLDS)
    sharded_data_parallel_degree: int = key(
        0, _COUNT, "0 (all ranks) or the number of ranks that share one copy of the state"
    )
    tensor_parallel_degree: int = key(
        1, _POSITIVE, "the number of ranks that divide each layer, at least 1"
    )
    tensor_parallel_seed: int = key(
        0, _COUNT, "a number of at least 0, a seed for the random values of divided layers"
    )
    hierarchical_allgather: bool = key(True, boolean, "true or false")
    max_sms: int = key(9, _COUNT, "a number of streaming multiprocessors")
    check_first_use: bool = key(True, boolean, "true or false")
    reduce_on: str = key("gpu", one_of("gpu", "cpu"), '"gpu" or "cpu"')
    reduce_precision: str = key("wire", one_of("wire", "fp32"), '"wire" or "fp32"')
    fallback: str = key("warn", one_of("warn", "silent", "error"), '"warn", "silent" or "error"')
    routes: Routes = subsection(Routes, '{"all_gather": "smddp", "reduce_scatter": "auto"}')
    timeout_seconds: float = key(600.0, seconds(may_be_zero=False), "a number of seconds above 0")
    silence_seconds: float = key(
        30.0, seconds(may_be_zero=True), "a number of seconds, or 0 to wait until the deadline"
    )
    slow_seconds: float = key(
        60.0, seconds(may_be_zero=True), "a number of seconds, or 0 to name no slow rank or link"
    )
    activation_offload: ActivationOffload = subsection(
        ActivationOffload, '{"enabled": false, "horizon": 2}'
    )
    ledger: Ledger = subsection(Ledger, '{"table": true, "json_file": "counters.json"}')
