"""Every setting: what it may hold, its default, and the text of its reference.

:class:`SmddpConfig` is the section "smddp" of a DeepSpeed config; its keys are also environment
variables, but for those of the sections in it. :class:`ProcessSettings` are environment variables
only, as they count before a config is read. :class:`DebugSettings` are the keys of ``SMDDP_DEBUG``,
for developers and tests.

``smddp doctor`` prints the settings, ``tools/settings_page.py`` writes docs/settings.md from them,
and csrc/common/env.h lists those that the core reads; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from deepspeed_smddp.config.fields import Field, Model, Setting, settings_of

if TYPE_CHECKING:  # by pydantic, which a process without a setting to check does not import
    from deepspeed_smddp.config import kinds

DEBUG = "SMDDP_DEBUG"


setting: Callable[..., Any] = Field  # for an attribute that has the type of its values
setting_0_2 = partial(setting, since="0.2")
engine_setting = partial(setting, of_engine=True)
debug_setting = partial(setting, variable=False)

_DEFAULT = ((0, "default"),)


class ActivationOffload(Model):
    """``smddp.activation_offload``: activations are in host memory until the backward pass."""

    enabled: kinds.Flag = engine_setting(
        False,
        "move activations to host memory until the backward pass",
        "if activations do not fit, even with recomputation",
    )
    horizon: kinds.Positive = engine_setting(
        2,
        "layers ahead of the backward pass whose activations come back",
        "larger if the backward pass waits for activations; each layer costs memory",
        "a number of layers of at least 1",
    )
    directory: kinds.Text = engine_setting(
        "",
        "map host memory for activations from files in this directory",
        "if host memory is short and the host has fast disks",
        "a directory to map host memory from, or an empty text for none",
    )


class Ledger(Model):
    """``smddp.ledger``: where the counters of :func:`deepspeed_smddp.statistics` are written."""

    table: kinds.Flag = setting_0_2(
        False,
        "print the counters of rank 0 when the process ends",
        "to see at the end what each collective cost, and on which path it was",
    )
    json_file: kinds.File = setting_0_2(
        "", "file for the counters when the process ends", "for a program that reads the counters"
    )
    json_lines: kinds.File = setting_0_2(
        "",
        "file that gets a line of JSON with the counters in each interval",
        "for counters over time",
    )
    prometheus_file: kinds.File = setting_0_2(
        "",
        "file with the counters for the textfile collector of Prometheus's node exporter",
        "on clusters that are watched by Prometheus",
    )
    interval_seconds: kinds.Seconds = setting_0_2(
        0.0,
        "seconds between two writes of the counters; 0: only when the process ends",
        "with one of the files above, for values while the job runs",
        "a number of seconds, or 0 to write only when the process ends",
    )
    monitor: kinds.Flag = setting_0_2(
        True,
        "pass the counters to DeepSpeed's monitor if a DeepSpeed config enables one",
        "`false` if TensorBoard, CSV or wandb shall not have the counters",
    )


class Routes(Model):
    """``smddp.routes``: who carries which sizes of a collective, in bytes of all ranks' data."""

    all_gather: kinds.Route = setting_0_2(
        _DEFAULT,
        "who carries AllGather: default (of CUDA tensors what is faster, measured; of CPU tensors "
        "smddp), smddp, nccl, gloo, fallback, auto, or steps by size",
        "`smddp` for results that are the same to the bit in each job; `auto` to measure Gloo, too",
    )
    reduce_scatter: kinds.Route = setting_0_2(
        _DEFAULT, "the same for ReduceScatter", "as `routes.all_gather`"
    )
    all_reduce: kinds.Route = setting_0_2(
        _DEFAULT, "the same for AllReduce", "as `routes.all_gather`"
    )


class SmddpConfig(Model):
    """The "smddp" section of a DeepSpeed config (JSON or hjson). Every key is optional."""

    allgather_bucket_size: kinds.Bucket = setting(
        "auto",
        "bytes of output that one AllGather on the wire carries at most",
        "if memory is short (smaller), or if the measurement at start-up is not wanted",
    )
    reduce_scatter_bucket_size: kinds.Bucket = setting(
        "auto",
        "bytes of input that one ReduceScatter on the wire carries at most",
        "as `allgather_bucket_size`",
    )
    sharded_data_parallel_degree: kinds.Count = engine_setting(
        0,
        "ranks that share one copy of the model state; 0: all",
        "if the state of one model fits into fewer ranks: gathers then stay among these (MiCS)",
        "0 (all ranks) or the number of ranks that share one copy of the state",
    )
    tensor_parallel_degree: kinds.Positive = engine_setting(
        1,
        "ranks that share a batch and divide each layer",
        "if one layer, or the batch of one rank, is too large for a rank",
        "the number of ranks that divide each layer, at least 1",
    )
    tensor_parallel_seed: kinds.Count = engine_setting(
        0,
        "seed; the ranks of a tensor-parallel group draw different values in divided layers",
        "to repeat a run with other random values",
        "a number of at least 0, a seed for the random values of divided layers",
        variable=False,
    )
    max_sms: kinds.Count = setting(
        9,
        "streaming multiprocessors that a reduction may occupy",
        "if matrix products slow down while sums run (smaller), or sums are slow (larger)",
        "a number of streaming multiprocessors",
    )
    reduce_on: Literal["gpu", "cpu"] = setting(
        "gpu",
        "where GPU tensors are summed: gpu or cpu",
        "`cpu` if no multiprocessor may be taken from the model",
    )
    reduce_precision: Literal["wire", "fp32"] = setting(
        "wire",
        "type of partial sums on the wire: the tensor's own (wire) or fp32",
        "`fp32` if sums over very many ranks lose too much in bf16; twice the bytes travel",
    )
    coding: Literal["auto", "on", "off"] = setting_0_2(
        "auto",
        "lossless coding of floating-point data between hosts: where it pays (auto), on or off",
        "`off` to compare; `on` if `auto` does not code and the network is the bound",
    )
    fallback: Literal["warn", "silent", "error"] = setting(
        "warn",
        "at an operation that smddp does not own: warn, silent or error",
        "`error` in tests, to find which operation leaves smddp; `silent` if that is known",
    )
    routes: Routes = setting(
        Routes(),
        "who carries which sizes of a collective",
        holds='{"all_gather": "smddp", "reduce_scatter": "auto"}',
    )
    timeout_seconds: kinds.Deadline = setting(
        600.0,
        "deadline of one operation, unless torch was asked for another one",
        "above the longest time that one rank may rightly be late (a checkpoint, an evaluation)",
        "a number of seconds above 0",
    )
    silence_seconds: kinds.Seconds = setting_0_2(
        30.0,
        "how long a rank of another host that is waited for may be silent; 0: until the deadline",
        "larger if virtual machines are frozen for snapshots; smaller to be told sooner",
        "a number of seconds, or 0 to wait until the deadline",
    )
    slow_seconds: kinds.Seconds = setting_0_2(
        60.0,
        "how often ranks are compared, to name one or a link that holds up the others; 0: never",
        "smaller while a slow rank is looked for",
        "a number of seconds, or 0 to name no slow rank or link",
    )
    activation_offload: ActivationOffload = setting(
        ActivationOffload(), "activations in host memory", holds='{"enabled": false, "horizon": 2}'
    )
    ledger: Ledger = setting(
        Ledger(),
        "where the counters are written",
        holds='{"table": true, "json_file": "counters.json"}',
    )


class ProcessSettings(Model):
    """What the environment alone sets, as it counts before a config is read."""

    host_id: kinds.Text = setting(
        "",
        "identity of this host; ranks with equal identity share memory",
        "if containers of one host differ in hostname, or hosts do not; to emulate hosts",
    )
    libfabric: kinds.Text = setting(
        "",
        "path of the libfabric shared object to open",
        "if the library that `smddp doctor` shows is not the one that the cluster's network needs",
    )
    device: Literal["auto", "host", "off"] = setting(
        "auto",
        "auto: GPUs by CUDA, host: threads simulate one, off: GPUs use the fallback",
        "`off` to let NCCL carry GPU tensors; `host` in tests alone",
    )
    fabric_provider: kinds.Text = setting(
        "",
        "libfabric provider to use, for instance tcp;ofi_rxm",
        "if another provider than the chosen one is wanted",
    )
    fabric_interface: kinds.Text = setting(
        "",
        "interfaces, libfabric domains or IP addresses to use; ^a,b: not these",
        "if a host has several networks and the wrong one is taken; for several NICs over TCP",
    )
    shared_allocator: kinds.Flag = setting(
        False,
        "CPU tensors of 64 KiB and more are in memory that local ranks map",
        "`1` for FSDP or own programs on CPU tensors that gather within a host",
    )
    job_secret_file: kinds.Text = setting_0_2(
        "",
        "file with the job's secret; empty: SMDDP_JOB_SECRET",
        "where others than the job's owner can read the store",
    )
    job_secret: kinds.Text = setting_0_2(
        "",
        "the job's secret; empty: random, handed out through the store",
        "where others can read the store and no file can be placed",
        secret=True,
    )
    log_level: Literal["error", "warning", "info", "debug"] = setting(
        "warning",
        "error, warning, info or debug",
        "`info` shows the chosen provider and pattern; `debug` every decision",
    )
    autoload: kinds.Flag = setting(
        True,
        "0: do not register the backend at the end of import torch",
        "`0` if `import torch` may load nothing else",
    )
    deepspeed_hook: kinds.Flag = setting(
        True,
        '0: do not read "comm_backend" from a DeepSpeed config',
        "`0` if another program handles this key",
    )
    report: kinds.Flag = setting_0_2(
        True,
        "0: no report when an operation fails or at SIGUSR2",
        "`0` if SIGUSR2 has another meaning in the program",
    )
    report_dir: kinds.Text = setting_0_2(
        "",
        "folder for reports; empty: in the one for temporary files",
        "to a folder that outlives the container or that all hosts share",
    )


class DebugSettings(Model):
    """The keys of ``SMDDP_DEBUG="key=value,key=value"``, which is read by the core as well.

    No user needs them: they compare ways that are otherwise measured or chosen, and serve tests.
    """

    algorithm: Literal["auto", "direct", "log", "joint"] = debug_setting(
        "auto", "pattern between hosts"
    )
    transfer: Literal["", "writes", "messages"] = debug_setting(
        "", "how large data is sent; empty: as suits the provider"
    )
    curve: kinds.Text = debug_setting(
        "auto", "network model: latency us:us per message:GB/s of a host, auto, measure or default"
    )
    libcuda: kinds.Text = debug_setting("libcuda.so.1", "CUDA's driver library to open")
    libgdrapi: kinds.Text = debug_setting(
        "", "GDRCopy's library, libgdrapi.so.2; empty: no GDRCopy; never run on hardware"
    )
    zero_paths: kinds.Flag = debug_setting(
        True, "0: ZeRO-3 gathers and reduces with DeepSpeed's own copies"
    )
    check_first_use: kinds.Flag = debug_setting(
        True, "0: a group's first collectives of GPU tensors are not compared with known results"
    )
    flight_recorder: kinds.Count = debug_setting(
        2000, "latest operations that are kept for reports; 0: none"
    )
    hmem: kinds.Flag = debug_setting(
        False,
        "1: NICs read and write GPU memory if the provider has FI_HMEM; never run on hardware",
    )
    release_streams: kinds.Flag = debug_setting(
        False, "1: a failure after wait() lets GPU work go on with what came, and raises later"
    )
    single_copy: Literal["auto", "0", "1"] = debug_setting(
        "auto", "1: read peers' memory, 0: copy through the segment, auto: the cheaper"
    )
    spin_microseconds: kinds.Count = debug_setting(
        200, "how long a waiting thread polls and yields before it sleeps"
    )
    check_locks: kinds.Flag = debug_setting(
        False, "1: a thread that takes the engine's lock under the GIL ends the process"
    )
    fork_copy_mib: kinds.Count = debug_setting(
        1024, "MiB of shared memory, at most, that are copied for a forked child"
    )


# The environment variables, by name.
VARIABLES: dict[str, Setting] = {
    one.variable: one
    for model in (SmddpConfig, ProcessSettings)
    for one in settings_of(model)
    if one.variable is not None
}
