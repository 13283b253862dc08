"""The "smddp" section of a DeepSpeed config, and the table of environment variables."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.sections import Section
from deepspeed_smddp.sections import SmddpConfig as SmddpConfig

SECTION = "smddp"
PREFIX = "SMDDP_"


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``key`` is the section's key that it sets, if there is one."""

    name: str
    default: str
    meaning: str
    key: str | None = None
    in_core: bool = False  # also a row of csrc/common/env.h, with the same default
    secret: bool = False  # its value is shown to nobody

    @property
    def environment_name(self) -> str:
        """The name with its prefix."""
        return PREFIX + self.name


# The environment has precedence over the file, the file over the default, for every key.
VARIABLES: tuple[Variable, ...] = (
    Variable(
        "ALLGATHER_BUCKET_SIZE",
        "auto",
        "bytes of output that one AllGather on the wire carries at most",
        key="allgather_bucket_size",
    ),
    Variable(
        "REDUCE_SCATTER_BUCKET_SIZE",
        "auto",
        "bytes of input that one ReduceScatter on the wire carries at most",
        key="reduce_scatter_bucket_size",
    ),
    Variable(
        "SHARDED_DATA_PARALLEL_DEGREE",
        "0",
        "ranks that share one copy of the model state; 0: all",
        key="sharded_data_parallel_degree",
    ),
    Variable(
        "TENSOR_PARALLEL_DEGREE",
        "1",
        "ranks that share a batch and divide each layer",
        key="tensor_parallel_degree",
    ),
    Variable(
        "TENSOR_PARALLEL_SEED",
        "0",
        "seed; the ranks of a tensor-parallel group draw different values in divided layers",
        key="tensor_parallel_seed",
    ),
    Variable(
        "HIERARCHICAL_ALLGATHER",
        "true",
        "gather between hosts along the rails, then inside each host",
        key="hierarchical_allgather",
    ),
    Variable(
        "MAX_SMS", "9", "streaming multiprocessors that a reduction may occupy", key="max_sms"
    ),
    Variable("REDUCE_ON", "gpu", "where GPU tensors are summed: gpu or cpu", key="reduce_on"),
    Variable(
        "REDUCE_PRECISION",
        "wire",
        "type of partial sums on the wire: the tensor's own (wire) or fp32",
        key="reduce_precision",
    ),
    Variable(
        "FALLBACK",
        "warn",
        "at an operation that smddp does not own: warn, silent or error",
        key="fallback",
    ),
    Variable(
        "ROUTES_ALL_GATHER",
        "smddp",
        "who carries AllGather: smddp, nccl, gloo, fallback, auto, or steps by size in JSON",
        key="routes.all_gather",
    ),
    Variable(
        "ROUTES_REDUCE_SCATTER",
        "smddp",
        "the same for ReduceScatter",
        key="routes.reduce_scatter",
    ),
    Variable(
        "ROUTES_ALL_REDUCE",
        "smddp",
        "the same for AllReduce",
        key="routes.all_reduce",
    ),
    Variable(
        "TIMEOUT_SECONDS",
        "600",
        "deadline of one operation, if nobody asks torch for another one",
        key="timeout_seconds",
        in_core=True,
    ),
    Variable(
        "SILENCE_SECONDS",
        "30",
        "how long a rank of another host that is waited for may be silent; 0: until the deadline",
        key="silence_seconds",
    ),
    Variable(
        "SLOW_SECONDS",
        "60",
        "how often ranks are compared, to name one or a link that holds up the others; 0: never",
        key="slow_seconds",
    ),
    Variable(
        "ACTIVATION_OFFLOAD_ENABLED",
        "false",
        "move activations to host memory until the backward pass",
        key="activation_offload.enabled",
    ),
    Variable(
        "ACTIVATION_OFFLOAD_HORIZON",
        "2",
        "layers ahead of the backward pass whose activations come back",
        key="activation_offload.horizon",
    ),
    Variable(
        "ACTIVATION_OFFLOAD_DIRECTORY",
        "",
        "map host memory for activations from files in this directory",
        key="activation_offload.directory",
    ),
    Variable(
        "LEDGER_TABLE",
        "false",
        "print the counters of rank 0 when the process ends",
        key="ledger.table",
    ),
    Variable(
        "LEDGER_JSON_FILE",
        "",
        "file for the counters when the process ends",
        key="ledger.json_file",
    ),
    Variable(
        "LEDGER_JSON_LINES",
        "",
        "file that gets a line of JSON with the counters in each interval",
        key="ledger.json_lines",
    ),
    Variable(
        "LEDGER_PROMETHEUS_FILE",
        "",
        "file with the counters for the textfile collector of Prometheus's node exporter",
        key="ledger.prometheus_file",
    ),
    Variable(
        "LEDGER_INTERVAL_SECONDS",
        "0",
        "seconds between two writes of the counters; 0: only when the process ends",
        key="ledger.interval_seconds",
    ),
    Variable(
        "LEDGER_MONITOR",
        "true",
        "pass the counters to DeepSpeed's monitor if a DeepSpeed config enables one",
        key="ledger.monitor",
    ),
    Variable(
        "HOST_ID",
        "",
        "identity of this host; ranks with equal identity share memory",
        in_core=True,
    ),
    Variable("LIBFABRIC", "", "path of the libfabric shared object to open", in_core=True),
    Variable("LIBCUDA", "libcuda.so.1", "path of CUDA's driver library to open", in_core=True),
    Variable("LIBGDRAPI", "libgdrapi.so.2", "path of GDRCopy's library to open", in_core=True),
    Variable(
        "DEVICE",
        "auto",
        "auto: GPUs by CUDA, host: threads simulate one, off: GPUs use the fallback",
        in_core=True,
    ),
    Variable(
        "FABRIC_PROVIDER",
        "",
        "libfabric provider to use, for instance tcp;ofi_rxm",
        in_core=True,
    ),
    Variable(
        "FABRIC_INTERFACE",
        "",
        "libfabric domains or IP addresses to use, separated by commas",
        in_core=True,
    ),
    Variable(
        "FABRIC_TRANSFER",
        "",
        "how large data is sent: writes, tagged or messages",
        in_core=True,
    ),
    Variable(
        "FABRIC_HMEM",
        "0",
        "1: NICs read and write GPU memory if the provider has FI_HMEM",
        in_core=True,
    ),
    Variable(
        "FABRIC_CURVE",
        "20,4,1.25",
        "network: latency in us, us per message, GB/s of a host",
        in_core=True,
    ),
    Variable(
        "ALGORITHM",
        "auto",
        "pattern between hosts: auto, direct, log or joint",
        in_core=True,
    ),
    Variable(
        "SINGLE_COPY",
        "auto",
        "1: read peers' memory, 0: copy through the segment, auto: the cheaper",
        in_core=True,
    ),
    Variable(
        "SHARED_ALLOCATOR",
        "0",
        "1: CPU tensors of 64 KiB and more are in memory that local ranks map",
        in_core=True,
    ),
    Variable(
        "JOB_SECRET_FILE",
        "",
        "file with the job's secret; empty: SMDDP_JOB_SECRET",
        in_core=True,
    ),
    Variable(
        "JOB_SECRET",
        "",
        "the job's secret; empty: random, handed out through the store",
        in_core=True,
        secret=True,
    ),
    Variable(
        "FORK_COPY_MIB",
        "1024",
        "MiB of shared memory, at most, that are copied for a forked child",
        in_core=True,
    ),
    Variable(
        "SPIN_MICROSECONDS",
        "200",
        "how long a waiting thread polls and yields before it sleeps",
        in_core=True,
    ),
    Variable(
        "FLIGHT_RECORDER",
        "2000",
        "the latest operations that are kept for reports; 0: none",
        in_core=True,
    ),
    Variable("LOG_LEVEL", "warning", "error, warning, info or debug", in_core=True),
    Variable("AUTOLOAD", "1", "0: do not register the backend at the end of import torch"),
    Variable("DEEPSPEED_HOOK", "1", '0: do not read "comm_backend" from a DeepSpeed config'),
    Variable("REPORT", "1", "0: no report when an operation fails or at SIGUSR2"),
    Variable("REPORT_DIR", "", "folder for reports; empty: in the one for temporary files"),
    Variable("ZERO_PATHS", "1", "0: ZeRO-3 gathers and reduces with DeepSpeed's own copies"),
)


def parse_section(section: Any) -> SmddpConfig:
    """Validates the section of the file.

    Raises:
        SmddpConfigError: an unknown key or a wrong value, in one sentence.
    """
    if isinstance(section, SmddpConfig):
        return section
    if not isinstance(section, Mapping):
        raise SmddpConfigError(
            f'"{SECTION}" in the DeepSpeed config is {show(section)}, '
            "but may hold an object with the keys " + ", ".join(SmddpConfig.model_fields)
        )
    try:
        return SmddpConfig.model_validate(dict(section))
    except ValidationError as error:
        raise SmddpConfigError(_sentence(error)) from None


def set_keys(section: SmddpConfig) -> dict[str, Any]:
    """The values of the keys that were given, by dotted path; defaults are left out."""
    found: dict[str, Any] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, Section):
            found.update({f"{name}.{key}": getattr(value, key) for key in value.model_fields_set})
        else:
            found[name] = value
    return found


def parse_variable(variable: Variable, text: str) -> Any:
    """The value of a key of the section, from the text of its environment variable.

    Raises:
        SmddpConfigError: the key may not hold the value.
    """
    assert variable.key is not None
    field = field_of(variable.key)
    try:
        section = parse_section(nested({variable.key: _from_text(text, field)}))
    except SmddpConfigError:
        raise SmddpConfigError(
            f"{variable.environment_name} is {show(text)}, but may hold {field.description}"
        ) from None
    return set_keys(section)[variable.key]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested object of the section, from values by dotted path."""
    section: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = section
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return section


def field_of(path: str) -> FieldInfo:
    """The model's field at a dotted path."""
    *parents, last = path.split(".")
    return _model(parents).model_fields[last]


def _model(parents: Iterable[str]) -> type[Section]:
    """The model of a sub-section, by the keys that lead to it; without keys, the whole section."""
    model: type[Section] = SmddpConfig
    for key in parents:
        inner = model.model_fields[key].annotation
        assert isinstance(inner, type) and issubclass(inner, Section)
        model = inner
    return model


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt word most likely stands for."""
    words = list(known)
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    if close:
        return close[0]
    starts = [name for name in words if name.startswith(word.lower())]
    return starts[0] if word and len(starts) == 1 else None


def show(value: Any) -> str:
    """A value in the syntax of the file, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _from_text(text: str, field: FieldInfo) -> Any:
    lowered = text.strip().lower()
    if field.annotation is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(lowered, text)
    if field.annotation is str:
        return text
    if lowered.startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    try:
        return float(lowered)
    except ValueError:
        return lowered


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    location = [str(part) for part in first["loc"]]
    held = show(first["input"])
    if first["type"] == "extra_forbidden":
        *parents, key = location
        model = _model(parents)
        where = ".".join([SECTION, *parents])
        guess = nearest(key, model.model_fields)
        hint = (
            f'did you mean "{guess}"?' if guess else "known keys: " + ", ".join(model.model_fields)
        )
        return f'"{key}": {held} is not a key of the section "{where}"; {hint}'
    # pydantic adds a union's branches to the location; only the part that names a field is kept.
    names = [part for part in location[:1] if part in SmddpConfig.model_fields]
    if names and len(location) > 1 and isinstance(getattr(SmddpConfig(), names[0]), Section):
        names.append(location[1])
    key = ".".join(names)
    return f'"{SECTION}.{key}" is {held}, but may hold {field_of(key).description}'
