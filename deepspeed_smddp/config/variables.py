"""The environment variables of the package, one row each.

``config`` and ``settings`` read them by this table, ``smddp doctor`` prints it, and
docs/settings.md is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "SMDDP_"


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``key`` is the section's key that it sets, if there is one.

    ``meaning``, ``when`` and ``since`` are the text of the reference, docs/settings.md.
    """

    name: str
    default: str
    meaning: str
    when: str  # to change it, and to what
    key: str | None = None
    in_core: bool = False  # also a row of csrc/common/env.h, with the same default
    secret: bool = False  # its value is never shown
    since: str = "0.1"  # the first version that has it

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
        "if memory is short (smaller), or if the measurement at start-up is not wanted",
        key="allgather_bucket_size",
    ),
    Variable(
        "REDUCE_SCATTER_BUCKET_SIZE",
        "auto",
        "bytes of input that one ReduceScatter on the wire carries at most",
        "as `allgather_bucket_size`",
        key="reduce_scatter_bucket_size",
    ),
    Variable(
        "SHARDED_DATA_PARALLEL_DEGREE",
        "0",
        "ranks that share one copy of the model state; 0: all",
        "if the state of one model fits into fewer ranks: gathers then stay among these (MiCS)",
        key="sharded_data_parallel_degree",
    ),
    Variable(
        "TENSOR_PARALLEL_DEGREE",
        "1",
        "ranks that share a batch and divide each layer",
        "if one layer, or the batch of one rank, is too large for a rank",
        key="tensor_parallel_degree",
    ),
    Variable(
        "TENSOR_PARALLEL_SEED",
        "0",
        "seed; the ranks of a tensor-parallel group draw different values in divided layers",
        "to repeat a run with other random values",
        key="tensor_parallel_seed",
    ),
    Variable(
        "HIERARCHICAL_ALLGATHER",
        "true",
        "gather between hosts along the rails, then inside each host",
        "never: it is accepted for configs of the closed library, and changes nothing",
        key="hierarchical_allgather",
    ),
    Variable(
        "MAX_SMS",
        "9",
        "streaming multiprocessors that a reduction may occupy",
        "if matrix products slow down while sums run (smaller), or sums are slow (larger)",
        key="max_sms",
    ),
    Variable(
        "CHECK_FIRST_USE",
        "true",
        "compare a group's first collectives of GPU tensors with their known results",
        "`false` if a job makes very many groups, once their results have been seen to be right",
        key="check_first_use",
        since="0.2",
    ),
    Variable(
        "REDUCE_ON",
        "gpu",
        "where GPU tensors are summed: gpu or cpu",
        "`cpu` if no multiprocessor may be taken from the model",
        key="reduce_on",
    ),
    Variable(
        "REDUCE_PRECISION",
        "wire",
        "type of partial sums on the wire: the tensor's own (wire) or fp32",
        "`fp32` if sums over very many ranks lose too much in bf16; twice the bytes travel",
        key="reduce_precision",
    ),
    Variable(
        "FALLBACK",
        "warn",
        "at an operation that smddp does not own: warn, silent or error",
        "`error` in tests, to find which operation leaves smddp; `silent` if that is known",
        key="fallback",
    ),
    Variable(
        "ROUTES_ALL_GATHER",
        "smddp",
        "who carries AllGather: smddp, nccl, gloo, fallback, auto, or steps by size in JSON",
        "if NCCL or Gloo is faster for some sizes; `auto` measures it",
        key="routes.all_gather",
        since="0.2",
    ),
    Variable(
        "ROUTES_REDUCE_SCATTER",
        "smddp",
        "the same for ReduceScatter",
        "as `routes.all_gather`",
        key="routes.reduce_scatter",
        since="0.2",
    ),
    Variable(
        "ROUTES_ALL_REDUCE",
        "smddp",
        "the same for AllReduce",
        "as `routes.all_gather`",
        key="routes.all_reduce",
        since="0.2",
    ),
    Variable(
        "TIMEOUT_SECONDS",
        "600",
        "deadline of one operation, unless torch was asked for another one",
        "above the longest time that one rank may rightly be late (a checkpoint, an evaluation)",
        key="timeout_seconds",
        in_core=True,
    ),
    Variable(
        "SILENCE_SECONDS",
        "30",
        "how long a rank of another host that is waited for may be silent; 0: until the deadline",
        "larger if virtual machines are frozen for snapshots; smaller to be told sooner",
        key="silence_seconds",
        since="0.2",
    ),
    Variable(
        "SLOW_SECONDS",
        "60",
        "how often ranks are compared, to name one or a link that holds up the others; 0: never",
        "smaller while a slow rank is looked for",
        key="slow_seconds",
        since="0.2",
    ),
    Variable(
        "ACTIVATION_OFFLOAD_ENABLED",
        "false",
        "move activations to host memory until the backward pass",
        "if activations do not fit, even with recomputation",
        key="activation_offload.enabled",
    ),
    Variable(
        "ACTIVATION_OFFLOAD_HORIZON",
        "2",
        "layers ahead of the backward pass whose activations come back",
        "larger if the backward pass waits for activations; each layer costs memory",
        key="activation_offload.horizon",
    ),
    Variable(
        "ACTIVATION_OFFLOAD_DIRECTORY",
        "",
        "map host memory for activations from files in this directory",
        "if host memory is short and the host has fast disks",
        key="activation_offload.directory",
    ),
    Variable(
        "LEDGER_TABLE",
        "false",
        "print the counters of rank 0 when the process ends",
        "to see at the end what each collective cost, and on which path it was",
        key="ledger.table",
        since="0.2",
    ),
    Variable(
        "LEDGER_JSON_FILE",
        "",
        "file for the counters when the process ends",
        "for a program that reads the counters",
        key="ledger.json_file",
        since="0.2",
    ),
    Variable(
        "LEDGER_JSON_LINES",
        "",
        "file that gets a line of JSON with the counters in each interval",
        "for counters over time",
        key="ledger.json_lines",
        since="0.2",
    ),
    Variable(
        "LEDGER_PROMETHEUS_FILE",
        "",
        "file with the counters for the textfile collector of Prometheus's node exporter",
        "on clusters that are watched by Prometheus",
        key="ledger.prometheus_file",
        since="0.2",
    ),
    Variable(
        "LEDGER_INTERVAL_SECONDS",
        "0",
        "seconds between two writes of the counters; 0: only when the process ends",
        "with one of the files above, for values while the job runs",
        key="ledger.interval_seconds",
        since="0.2",
    ),
    Variable(
        "LEDGER_MONITOR",
        "true",
        "pass the counters to DeepSpeed's monitor if a DeepSpeed config enables one",
        "`false` if TensorBoard, CSV or wandb shall not have the counters",
        key="ledger.monitor",
        since="0.2",
    ),
    Variable(
        "HOST_ID",
        "",
        "identity of this host; ranks with equal identity share memory",
        "if containers of one host differ in hostname, or hosts do not; to emulate hosts",
        in_core=True,
    ),
    Variable(
        "LIBFABRIC",
        "",
        "path of the libfabric shared object to open",
        "if the library that `smddp doctor` shows is not the one that the cluster's network needs",
        in_core=True,
    ),
    Variable(
        "LIBCUDA",
        "libcuda.so.1",
        "path of CUDA's driver library to open",
        "if the driver library has another place",
        in_core=True,
    ),
    Variable(
        "LIBGDRAPI",
        "libgdrapi.so.2",
        "path of GDRCopy's library to open",
        "if GDRCopy has another place",
        in_core=True,
    ),
    Variable(
        "DEVICE",
        "auto",
        "auto: GPUs by CUDA, host: threads simulate one, off: GPUs use the fallback",
        "`off` to let NCCL carry GPU tensors; `host` in tests alone",
        in_core=True,
    ),
    Variable(
        "FABRIC_PROVIDER",
        "",
        "libfabric provider to use, for instance tcp;ofi_rxm",
        "if another provider than the chosen one is wanted",
        in_core=True,
    ),
    Variable(
        "FABRIC_INTERFACE",
        "",
        "libfabric domains or IP addresses to use, separated by commas",
        "if a host has several networks and the wrong one is taken; for several NICs over TCP",
        in_core=True,
    ),
    Variable(
        "FABRIC_TRANSFER",
        "",
        "how large data is sent: writes, tagged or messages",
        "to compare the three on a new provider",
        in_core=True,
    ),
    Variable(
        "FABRIC_HMEM",
        "0",
        "1: NICs read and write GPU memory if the provider has FI_HMEM",
        "`1` to try NICs that read GPU memory, with a provider that has FI_HMEM",
        in_core=True,
    ),
    Variable(
        "FABRIC_CURVE",
        "auto",
        "latency us, us per message, GB/s of a host; auto, measure or default",
        "to override what `auto` measures, as with `20,4,1.25`; `default` takes these numbers; "
        "`measure` measures them whatever an earlier job has measured on these hosts",
        in_core=True,
    ),
    Variable(
        "ALGORITHM",
        "auto",
        "pattern between hosts: auto, direct, log or joint",
        "to compare patterns",
        in_core=True,
    ),
    Variable(
        "SINGLE_COPY",
        "auto",
        "1: read peers' memory, 0: copy through the segment, auto: the cheaper",
        "`0` where reads of other processes' memory are forbidden or slow",
        in_core=True,
    ),
    Variable(
        "SHARED_ALLOCATOR",
        "0",
        "1: CPU tensors of 64 KiB and more are in memory that local ranks map",
        "`1` for FSDP or own programs on CPU tensors that gather within a host",
        in_core=True,
    ),
    Variable(
        "JOB_SECRET_FILE",
        "",
        "file with the job's secret; empty: SMDDP_JOB_SECRET",
        "where others than the job's owner can read the store",
        in_core=True,
        since="0.2",
    ),
    Variable(
        "JOB_SECRET",
        "",
        "the job's secret; empty: random, handed out through the store",
        "where others can read the store and no file can be placed",
        in_core=True,
        secret=True,
        since="0.2",
    ),
    Variable(
        "FORK_COPY_MIB",
        "1024",
        "MiB of shared memory, at most, that are copied for a forked child",
        "larger if a forked data loader reads more shared tensors than that",
        in_core=True,
    ),
    Variable(
        "SPIN_MICROSECONDS",
        "200",
        "how long a waiting thread polls and yields before it sleeps",
        "`0` if cores are needed elsewhere; larger for many small operations on idle cores",
        in_core=True,
    ),
    Variable(
        "LEAVE_SHARED_CORES",
        "1",
        "0: a waiting thread stays on a core that another rank uses as well",
        "`0` if threads must not move between the cores on which they may run",
        in_core=True,
        since="0.2",
    ),
    Variable(
        "FLIGHT_RECORDER",
        "2000",
        "the latest operations that are kept for reports; 0: none",
        "larger if a report must reach further back",
        in_core=True,
        since="0.2",
    ),
    Variable(
        "LOG_LEVEL",
        "warning",
        "error, warning, info or debug",
        "`info` shows the chosen provider and pattern; `debug` every decision",
        in_core=True,
    ),
    Variable(
        "AUTOLOAD",
        "1",
        "0: do not register the backend at the end of import torch",
        "`0` if `import torch` may load nothing else",
    ),
    Variable(
        "DEEPSPEED_HOOK",
        "1",
        '0: do not read "comm_backend" from a DeepSpeed config',
        "`0` if another program handles this key",
    ),
    Variable(
        "REPORT",
        "1",
        "0: no report when an operation fails or at SIGUSR2",
        "`0` if SIGUSR2 has another meaning in the program",
        since="0.2",
    ),
    Variable(
        "REPORT_DIR",
        "",
        "folder for reports; empty: in the one for temporary files",
        "to a folder that outlives the container or that all hosts share",
        since="0.2",
    ),
    Variable(
        "ZERO_PATHS",
        "1",
        "0: ZeRO-3 gathers and reduces with DeepSpeed's own copies",
        "`0` to exclude our part of ZeRO-3 while an error is looked for",
    ),
)
