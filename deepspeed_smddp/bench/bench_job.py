"""``smddp bench`` on the ranks that a launcher started, or on local ones of its own."""

from __future__ import annotations

import datetime
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deepspeed_smddp.bench import bench_page
from deepspeed_smddp.bench.bench_case import TITLES, BenchError, Case, cases
from deepspeed_smddp.bench.bench_report import BenchReport
from deepspeed_smddp.bench.sweep import Interruption, Rules, Sweep
from deepspeed_smddp.bench.timed_values import WEIGHTS, TimedValues
from deepspeed_smddp.config import settings
from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.doctor import machine
from deepspeed_smddp.distributed import extension, launchers
from deepspeed_smddp.version import __version__

_SHOWN = "smddp-bench/shown"
_SHOWING_TIME = datetime.timedelta(seconds=60)
_JOINING_TIME = datetime.timedelta(seconds=300)  # of the ranks that this process starts
_OTHERS_SECONDS = 30.0  # that the other ranks have to end by themselves after one has failed


@dataclass(frozen=True)
class Question:
    """What the command line asks for; ``network``: Gbit/s of a host, 0: what its NICs state."""

    ops: list[str]
    dtypes: list[str]
    sizes: list[int]
    rules: Rules = field(default_factory=Rules)
    ranks: int = 0
    beside: str = "auto"
    device: str = "auto"
    network: float = 0.0
    values: TimedValues = WEIGHTS
    csv: Path | None = None
    json: Path | None = None
    figure: Path | None = None

    @property
    def files(self) -> tuple[Path | None, ...]:
        """What is to be written, None for what is not."""
        return self.csv, self.json, self.figure


def run(question: Question) -> int:
    """Measures, prints on rank 0, and returns the exit status, the same on all ranks.

    Raises:
        BenchError: what is wrong with the question or the start, in one sentence.
    """
    launchers.apply()
    launched = launchers.has_all_variables()
    gpus = torch.cuda.device_count()
    own = question.ranks or (gpus if gpus > 1 else min(8, max(2, os.cpu_count() or 2)))
    size = int(os.environ["WORLD_SIZE"]) if launched else own
    if question.ranks and question.ranks != size:
        raise BenchError(f"--ranks is {question.ranks}, but the launcher has started {size} ranks")
    if size < 2:
        raise BenchError("one rank has no other to exchange data with: start at least two")
    if not launched or os.environ["RANK"] == "0":
        output_files.check_writable(question.files)
        output_files.check_picture("the figure", question.figure)
    return _as_rank(question) if launched else _run_local(size)


def _run_local(ranks: int) -> int:
    """Runs this command line again as ``ranks`` ranks; returns the status of one that failed.

    SIGINT and SIGTERM reach the ranks, a second one kills them.
    """
    # Port 0: the kernel chooses one that is free.
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_JOINING_TIME
    )
    processes: list[subprocess.Popen[bytes]] = []
    signals = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        for process in processes:
            process.send_signal(number if signals == 1 else signal.SIGKILL)

    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        for rank in range(ranks):
            # In a session of its own: the terminal sends Ctrl-C to this process alone.
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "deepspeed_smddp.commands.main", *sys.argv[1:]],
                    env=_environment(rank, ranks, store.port),
                    start_new_session=True,
                )
            )
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torch's name for a store that is served already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    end = math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.returncode for process in processes):
            end = min(end, time.monotonic() + _OTHERS_SECONDS)
        time.sleep(0.02)
    status = next((process.returncode for process in processes if process.returncode), 0)
    return 128 - status if status < 0 else status


def _as_rank(question: Question) -> int:
    device = _device(question.device)
    try:
        groups = _groups(question.beside, device)
    except BenchError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise BenchError(f"the group could not be made: {_first_line(error)}") from None
    planned = cases(question.ops, question.dtypes, question.sizes, dist.get_world_size())
    report = _report(question, device, list(groups), len(planned))
    with Interruption() as interruption:
        sweep = Sweep(groups, device, question.rules, interruption, question.values)
        turns = question.rules.turns * len(groups)
        try:
            with _progress(len(planned) * turns) as advance:
                for results in sweep.run(planned, advance):
                    report.results += results
        except RuntimeError as error:
            report.failure = _first_line(error)
        report.stopped = signal.Signals(sweep.signal).name if sweep.signal else ""
    _show(report, question)
    with suppress(RuntimeError):
        dist.destroy_process_group()
    return report.status


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device is cuda, but torch sees no GPU")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _groups(beside: str, device: torch.device) -> dict[str, dist.ProcessGroup]:
    if beside == "auto":
        beside = "nccl" if device.type == "cuda" else "gloo"
    if beside == "nccl" and device.type != "cuda":
        raise BenchError("--beside is nccl, which has no collectives of CPU tensors; take gloo")
    dist.init_process_group("smddp")
    groups: dict[str, Any] = {"smddp": dist.group.WORLD}
    return groups if beside == "none" else groups | {beside: dist.new_group(backend=beside)}


def _report(
    question: Question, device: torch.device, backends: list[str], planned: int
) -> BenchReport:
    own = (launchers.host_name(), of_host())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    hosts: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(everyone):
        hosts.setdefault(host, []).append(rank)
    slowest = min(rate for _, rate in everyone)
    return BenchReport(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={
            "deepspeed-smddp": __version__,
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
        },
        device="GPU" if device.type == "cuda" else "CPU",
        backends=backends,
        hosts=hosts,
        rate=question.network * 1e9 / 8 or slowest,
        rate_origin="--network" if question.network else "stated by the NICs",
        planned=planned,
        data=question.values.name,
        coding=settings.current().section.coding,
    )


def of_host() -> float:
    """Bytes per second of the NICs that libfabric's provider uses here, one direction.

    0 if one of them states no rate, or there is no libfabric.
    """
    try:
        return machine.rate_of(machine.nics_of(extension.core.fabric_description()))
    except RuntimeError:
        return 0.0


def _show(report: BenchReport, question: Question) -> None:
    """Rank 0 prints and writes while the other ranks wait.

    torchrun ends all ranks as soon as one has exited with a status other than 0.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            console = Console()
            page = question.json != output_files.STANDARD_OUTPUT
            if page:
                bench_page.show(report, console)
            output_files.write(question.csv, report.to_csv())
            output_files.write_json(question.json, report.to_json())
            if question.figure is not None and report.results:
                bench_page.draw(report, question.figure)
            for path in filter(None, question.files):
                if page and path.exists():
                    console.print(f"Written to {path}.", soft_wrap=True, highlight=False)
        finally:
            store.set(_SHOWN, "")
        return
    with suppress(RuntimeError, dist.DistError):  # rank 0 has ended, and its store with it
        store.wait([_SHOWN], _SHOWING_TIME)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Yields what to call before each turn; a bar on rank 0's terminal, if there is one."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=dist.get_rank() != 0 or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=total)

        def advance(case: Case) -> None:
            text = f"{TITLES[case.op]}, {case.dtype}, {case.size} bytes"
            bar.update(task, advance=1, description=text)

        yield advance


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
