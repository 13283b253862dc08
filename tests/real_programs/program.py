"""A program of other authors: a copy of it, a dataset, its runs, and the configs that it takes."""

from __future__ import annotations

import abc
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import jobs

from .runs import CHECKPOINT, HOSTS, RANKS, Case, Run

HERE = Path(__file__).resolve().parent
CONFIGS = jobs.ROOT / "ds_configs"


class Program(abc.ABC):
    """A copy of the program with a dataset; its own files are not changed.

    Args:
        source: a checkout; it is copied, as the program compiles into its folder.
        folder: for the copy, the dataset and the runs' files.
    """

    name: str  # as of its stand-ins
    title: str
    cases: Sequence[Case]
    entry: str  # its training script
    loss: str  # a pattern of its log: step, loss
    preprocess: Sequence[str]  # the command that makes a dataset, without its files

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder, self.code, self.data = folder, folder / "program", folder / "data"
        shutil.rmtree(self.code, ignore_errors=True)
        shutil.copytree(source, self.code, ignore=shutil.ignore_patterns(".git"))
        self.data.mkdir(exist_ok=True)

    @staticmethod
    @abc.abstractmethod
    def text_of(file: Path) -> str:
        """A file as a text of the dataset."""

    @abc.abstractmethod
    def command(
        self, case: Case, run: Run, config: Path, checkpoints: Path, port: int
    ) -> tuple[list[str], str]:
        """Writes the run's config; the arguments of Python that start it, and how a user would."""

    @abc.abstractmethod
    def shipped(self) -> Iterator[tuple[Path, int, Mapping[str, Any]]]:
        """The files of ``ds_configs/`` that the program reads, each as plain as it needs.

        With each, the number of replicas, and the settings that it has, by DeepSpeed's names.
        """

    def prepare(self, python: Path) -> None:
        """Makes a dataset of the standard library with the program's own tool."""
        with (self.data / "text.jsonl").open("w") as file:
            for source in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
                file.write(json.dumps({"text": self.text_of(source)}) + "\n")
        command = [str(python), *self.preprocess, "--dataset-impl", "mmap", "--append-eod"]
        command += [f"--input={self.data / 'text.jsonl'}", f"--output-prefix={self.data / 'bytes'}"]
        env = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, cwd=self.code, env=env, check=True, capture_output=True)

    def run(self, run: Run, case: Case, python: Path, limit: float) -> None:
        """Trains, and fills ``run``.

        Raises:
            JobError: the program failed or took more than ``limit`` seconds.
        """
        name = f"{run.deepspeed}-{case.name}-{run.backend}"
        checkpoints = self.folder / "checkpoints" / name
        stem = self.folder / (name + "-resumed" * run.resumed)
        if run.resumed:  # these files name the checkpoint to load
            (checkpoints / "latest").write_text(f"global_step{CHECKPOINT}")
            (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(CHECKPOINT))
        else:
            shutil.rmtree(checkpoints, ignore_errors=True)
        port = jobs.free_port()
        words, run.command = self.command(case, run, Path(f"{stem}.json"), checkpoints, port)
        paths = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
        env = {
            **os.environ,
            "PATH": os.pathsep.join(paths),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "LOCAL_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "SMDDP_FABRIC_INTERFACE": "lo",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions" / run.deepspeed),
            "REAL_PROGRAM": str(self.code / self.entry),
            "REAL_STAND_INS": self.name,
            "REAL_HOSTS": str(HOSTS),
            "REAL_LEDGER": f"{stem}.ledger.{{rank}}.json",
        }
        ledger = Path(f"{stem}.ledger.0.json")
        ledger.unlink(missing_ok=True)
        output = jobs.run([str(python), *words], self.code, Path(f"{stem}.log"), limit, env)
        run.losses = {int(step): float(loss) for step, loss in re.findall(self.loss, output)}
        if ledger.exists():  # by a group of smddp
            run.ledger = json.loads(ledger.read_text())["rows"]

    def refused_configs(self, python: Path) -> list[str]:
        """What the program, or DeepSpeed after it, makes otherwise of its files."""
        files = list(self.shipped())
        command = [str(python), str(HERE / "accepted.py"), self.name]
        command += [word for file, replicas, _ in files for word in (str(file), str(replicas))]
        return refused(command, self.code, {file.name: wanted for file, _, wanted in files})


def refused(
    command: Sequence[str], code: Path, wanted: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What is wrong with the files of ``wanted``, by what the command prints (``accepted.py``)."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=code, env=env, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = []
    for name, settings in wanted.items():
        if not answers:
            return [*wrong, f"{name} is not loaded: {done.stderr[-1000:]}"]
        answer = answers.pop(0)
        wrong += [
            f"{name}: {key} reaches DeepSpeed as {answer['passed'].get(key)}, not {value}"
            for key, value in settings.items()
            if answer["passed"].get(key) != value
        ]
        wrong += [f"{name}: {sentence}" for sentence in changed(settings, answer["accepted"])]
    return wrong


def changed(given: Mapping[str, Any], found: Mapping[str, Any], inside: str = "") -> list[str]:
    """The settings of ``given`` that ``found`` has, but with another value."""
    wrong = []
    for key, value in found.items():
        if isinstance(value, dict):
            wrong += changed(given.get(key, {}), value, f"{key}.")
        elif given.get(key, value) != value:
            wrong.append(f"DeepSpeed takes {inside}{key} for {value}, not {given[key]}")
    return wrong
