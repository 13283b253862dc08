#!/usr/bin/env python3
"""Put one fault after the other into the core, and see which C++ test notices it.

    tools/mutants.py [NAME ...] [--jobs N] [--resume]

``tests/mutants/faults.toml`` lists the faults. All of them are compiled once, into a copy of the
sources, behind a switch that is read at run time. A fault is noticed if a test program fails, or
takes more than 20 s and five times its time without a fault, and the test that failed passes
without the fault at once, and fails with it again. The outcomes go to
``build/mutants/results.json``. The exit status is 1 if a fault is unnoticed that the list does not
explain.

NAMEs pick some faults, ``--resume`` leaves out those with an outcome for the same sources. Called
by ``make mutants``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants" / "faults.toml"
BUILD = ROOT / "build" / "mutants"
RESULTS = BUILD / "results.json"
# What the core and its tests are built from.
SOURCES = (
    *("CMakeLists.txt", "csrc", "tests/cpp", "tests/fuzz", "tools/simulator"),
    *(f"benchmarks/{name}" for name in ("file_store.h", "coding_data.h", "coding_warp.h")),
    *("benchmarks/coding_kernels.cu", "docs/dev/one-allgather.md"),
    "deepspeed_smddp/version.py",
)
SWITCH, REACHED = "SMDDP_MUTANT", "SMDDP_MUTANTS_REACHED"
NUMBERS = 1 << 20
# A fault asks before it shows whether it is switched on; where it asks is noted in the file that
# REACHED names, a byte for each number.
HEADER = """\
#pragma once
namespace smddp {
extern const unsigned long kMutant;
extern unsigned char* const kReached;
inline bool mutant(unsigned long number) {
  if (kReached != nullptr) kReached[number] = 1;
  return kMutant == number;
}
}  // namespace smddp
"""
SOURCE = f"""\
#include "mutant.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdlib>
namespace smddp {{
const unsigned long kMutant = [] {{
  const char* number = std::getenv("{SWITCH}");
  return number != nullptr ? std::strtoul(number, nullptr, 10) : 0;
}}();
unsigned char* const kReached = []() -> unsigned char* {{
  const char* path = std::getenv("{REACHED}");
  int fd = path != nullptr ? ::open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return nullptr;
  void* at = ::mmap(nullptr, {NUMBERS}, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return at != MAP_FAILED ? static_cast<unsigned char*>(at) : nullptr;
}}();
}}  // namespace smddp
"""
GENERATED = {Path("csrc/mutant.h"): HEADER, Path("csrc/common/mutant.cc"): SOURCE}
# A program with a fault may take so many times as long as without, and so many seconds more.
TIMES, MORE_SECONDS = 5, 20
_RUNNING = re.compile(rb"^\[ RUN      \] (\S+)", re.MULTILINE)
_FAILED = re.compile(rb"^\[  FAILED  \] ([^\s,]+)", re.MULTILINE)

console = Console(highlight=False)


@dataclass(frozen=True)
class Fault:
    """One entry of the list. `fault` takes the place of `text`, which stands once in `file`.

    If `text` ends in ``;`` both are statements, if `fault` has ``$MUTANT`` that is the condition,
    and otherwise both are expressions. `first` names the tests that run first; `equivalent` says
    why no test can notice the fault.
    """

    name: str
    file: str
    text: str
    fault: str
    breaks: str
    first: Sequence[str] = ()
    equivalent: str = ""

    @property
    def number(self) -> int:
        """What the switch says for this fault. It does not change with the rest of the list."""
        return zlib.crc32(self.name.encode()) % NUMBERS

    def switched(self) -> str:
        """Both versions, and the switch between them."""
        on = f"::smddp::mutant({self.number}ul)"
        if "$MUTANT" in self.fault:
            return self.fault.replace("$MUTANT", on)
        if self.text.endswith(";"):
            return f"{{ if ({on}) {{ {self.fault} }} else {{ {self.text} }} }}"
        return f"({on} ? ({self.fault}) : ({self.text}))"


@dataclass
class Program:
    """A test of ctest; how long it takes, and the numbers of the faults whose lines it reaches."""

    name: str
    command: list[str]
    environment: dict[str, str]
    seconds: float = 0.0
    reached: frozenset[int] = frozenset()


@dataclass
class Outcome:
    """What became of one fault. `program` is empty if no test noticed it."""

    digest: str
    program: str = ""
    test: str = ""
    how: str = ""  # "fails", "crashes" or "hangs"
    seconds: float = 0.0  # from the start of that program
    # Tests that failed without the fault, too, or did not fail with it again.
    chance: list[str] = field(default_factory=list)


def read_faults(path: Path = LIST) -> list[Fault]:
    """The list, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    equivalent = tables.pop("equivalent", {})
    faults = []
    for file, entries in tables.items():
        for name, (text, fault, breaks, *first) in entries.items():
            why = equivalent.get(name, "")
            faults.append(Fault(name, file, text, fault, breaks, " ".join(first).split(), why))
    return faults


def problems(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """One sentence for each entry that can't be used."""
    found = []
    names = [fault.name for fault in faults]
    found += [f"{name}: twice in the list" for name in sorted(set(names)) if names.count(name) > 1]
    for fault in faults:
        path = root / fault.file
        count = path.read_text(encoding="utf-8").count(fault.text) if path.is_file() else 0
        if count != 1:
            found.append(f"{fault.name}: its text stands {count} times in {fault.file}, not once")
        if "$MUTANT" not in fault.fault and not fault.text.endswith(";"):
            found += [
                f"{fault.name}: {part!r} is no expression"
                for part in (fault.text, fault.fault)
                if part.count("(") != part.count(")") or re.match(r"(if|for|return)\b", part)
            ]
    return found


# --- the build ------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    """Leaves a file alone that has these bytes already, so that ninja does as well."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def source_files() -> list[Path]:
    """The files that the build needs, relative to the root."""
    found = []
    for name in SOURCES:
        top = ROOT / name
        found += [top] if top.is_file() else [p for p in sorted(top.rglob("*")) if p.is_file()]
    return [path.relative_to(ROOT) for path in found]


def make_tree(faults: list[Fault], tree: Path) -> None:
    """A copy of the sources with all faults in it, none of them switched on."""
    files = source_files()
    for old in [p for p in tree.rglob("*") if p.is_file()]:
        if old.relative_to(tree) not in [*files, *GENERATED]:
            old.unlink()
    for name in files:
        data = (ROOT / name).read_bytes()
        here = [fault for fault in faults if fault.file == name.as_posix()]
        if here:
            text = data.decode()
            for fault in here:
                assert text.count(fault.text) == 1, f"{fault.name} meets another fault"
                text = text.replace(fault.text, fault.switched())
            data = f'#include "mutant.h"\n{text}'.encode()
        _write(tree / name, data)
    for name, text in GENERATED.items():
        _write(tree / name, text.encode())


def build(faults: list[Fault], jobs: int) -> list[Program]:
    """Builds what has changed. The test programs."""
    tools = Path(sys.executable).parent
    ninja = str(tools / "ninja") if (tools / "ninja").exists() else "ninja"
    cmake = str(tools / "cmake") if (tools / "cmake").exists() else "cmake"
    tree, out = BUILD / "tree", BUILD / "out"
    make_tree(faults, tree)
    configure = [cmake, "-S", str(tree), "-B", str(out), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DSMDDP_TORCH=OFF", "-DSMDDP_TESTS=ON", "-DSMDDP_CUDA=OFF"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(out), "--parallel", str(jobs)], check=True)
    ctest = shutil.which(str(tools / "ctest")) or "ctest"
    listed = subprocess.run(
        [ctest, "--test-dir", str(out), "--show-only=json-v1"], check=True, capture_output=True
    )
    return [_program(test) for test in json.loads(listed.stdout)["tests"]]


def _program(test: dict[str, Any]) -> Program:
    settings = {each["name"]: each["value"] for each in test["properties"]}
    pairs = (setting.split("=", 1) for setting in settings.get("ENVIRONMENT", []))
    return Program(test["name"], test["command"], dict(pairs))


# --- the runs -------------------------------------------------------------------------------------


RUNNING: set[subprocess.Popen[bytes]] = set()  # each is the leader of a session


def run(
    program: Program, fault: Fault | None, limit: float, only: str = "", reached: str = ""
) -> tuple[str, bytes, float]:
    """ "" or how it went wrong, its output, its seconds. `only`: one test of the program."""
    environment = {**os.environ, **program.environment, "GTEST_FAIL_FAST": "1"}
    environment[SWITCH] = str(fault.number if fault is not None else 0)
    environment[REACHED] = reached
    command = program.command + ([f"--gtest_filter={only}"] if only else [])
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=BUILD,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    RUNNING.add(process)
    output, how = _wait(process, limit)
    _kill(process)  # what it started, if that still runs
    RUNNING.discard(process)
    return how, output, time.monotonic() - begin


def _wait(process: subprocess.Popen[bytes], limit: float) -> tuple[bytes, str]:
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return output, "hangs"
    if process.returncode < 0:
        return output, "crashes"
    return output, "fails" if process.returncode else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def failed_test(output: bytes, how: str) -> str:
    """The test of GoogleTest that failed or did not end; "" if the program has none."""
    found = (_FAILED if how == "fails" else _RUNNING).findall(output)
    found = found or _RUNNING.findall(output)
    if not found:
        return ""
    test: bytes = found[0] if how == "fails" else found[-1]
    return test.decode()


def limit_of(program: Program) -> float:
    """Seconds after which a program with a fault counts as hung."""
    return TIMES * program.seconds + MORE_SECONDS


def try_fault(fault: Fault, programs: list[Program], digest: str) -> Outcome:
    """Runs the programs that reach the fault's line until one notices it."""
    outcome = Outcome(digest)
    programs = [program for program in programs if fault.number in program.reached]
    first = [p for name in fault.first for p in programs if p.name == name]
    rest = sorted((p for p in programs if p not in first), key=lambda p: p.seconds)
    for program in first + rest:
        how, output, seconds = run(program, fault, limit_of(program))
        if not how:
            continue
        _write(BUILD / "logs" / f"{fault.name}.txt", output)
        test = failed_test(output, how)
        by_chance, _, _ = run(program, None, limit_of(program), test)
        if not by_chance and how != "hangs":
            again, _, _ = run(program, fault, limit_of(program), test)
            by_chance = "passes" if not again else ""
        if by_chance:
            outcome.chance.append(f"{program.name} {test}".strip())
            continue
        outcome.program, outcome.test, outcome.how = program.name, test, how
        outcome.seconds = round(seconds, 1)
        break
    return outcome


def measure(programs: list[Program], jobs: int) -> None:
    """Runs all programs without a fault; one that fails gets a second chance."""

    def one(program: Program) -> None:
        reached = BUILD / "reached" / program.name
        _write(reached, bytes(NUMBERS))
        for _ in range(2):
            how, output, program.seconds = run(program, None, 600, reached=str(reached))
            if not how:
                break
            console.print(f"{program.name} {how} without a fault", soft_wrap=True)
        program.reached = frozenset(n for n, was in enumerate(reached.read_bytes()) if was)
        if how:
            _write(BUILD / "logs" / f"{program.name}.txt", output)
            log = BUILD / "logs" / f"{program.name}.txt"
            raise SystemExit(f"{program.name} {how} without a fault: see {log}")

    begin = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, program) for program in programs]):
            done.result()
    alone = sum(program.seconds for program in programs)
    console.print(
        f"{len(programs)} programs pass without a fault, in {time.monotonic() - begin:.0f} s "
        f"({alone:.0f} s one after the other)"
    )


def run_all(
    faults: list[Fault], programs: list[Program], results: dict[str, Outcome], jobs: int
) -> bool:
    """Adds the outcomes to `results`. False if it was interrupted."""
    sources = digest_of_sources()
    begin = time.monotonic()
    pool = ThreadPoolExecutor(jobs)
    try:
        measure(programs, jobs)
        runs = {
            pool.submit(try_fault, fault, programs, digest_of(fault, sources)): fault
            for fault in faults
        }
        for count, done in enumerate(as_completed(runs), 1):
            fault, outcome = runs[done], done.result()
            results[fault.name] = outcome
            save(results)
            console.print(
                f"{count:>3}/{len(runs)} {time.monotonic() - begin:>5.0f} s  {fault.name}: "
                + (
                    f"{outcome.program} {outcome.test} {outcome.how}, {outcome.seconds} s"
                    if outcome.program
                    else "[bold red]unnoticed[/]"
                )
                + (f" (by chance: {', '.join(outcome.chance)})" if outcome.chance else ""),
                soft_wrap=True,
            )
    except KeyboardInterrupt:
        return False
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):
            _kill(process)
    return True


# --- the results ----------------------------------------------------------------------------------


def digest_of_sources() -> str:
    """Of everything that is built."""
    digest = hashlib.sha256()
    for name in source_files():
        digest.update(name.as_posix().encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def digest_of(fault: Fault, sources: str) -> str:
    """Of a fault and the sources that it was tried in."""
    return hashlib.sha256(f"{fault!r} {sources}".encode()).hexdigest()[:16]


def load() -> dict[str, Outcome]:
    """The outcomes of earlier runs, by the names of the faults."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return {name: Outcome(*outcome) for name, outcome in found.items()}


def save(results: dict[str, Outcome]) -> None:
    """Writes all outcomes, a line each, sorted by name."""
    lines = [
        f"{json.dumps(name)}: {json.dumps([*vars(outcome).values()])}"
        for name, outcome in sorted(results.items())
    ]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--jobs", type=int, default=cores, help="faults that run side by side")
    parser.add_argument("--build-jobs", type=int, default=cores, help="compilers side by side")
    parser.add_argument("--resume", action="store_true", help="only what has no outcome yet")
    arguments = parser.parse_args()
    faults = read_faults()
    if wrong := problems(faults):
        raise SystemExit("\n".join(wrong))
    names = {fault.name for fault in faults}
    if unknown := set(arguments.names) - names:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    results = {name: outcome for name, outcome in load().items() if name in names}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    programs = build(faults, arguments.build_jobs)
    sources = digest_of_sources()
    asked = [fault for fault in faults if not arguments.names or fault.name in arguments.names]
    chosen = asked
    if arguments.resume:
        chosen = [
            fault
            for fault in asked
            if fault.name not in results or results[fault.name].digest != digest_of(fault, sources)
        ]
    whole = run_all(chosen, programs, results, arguments.jobs)
    unnoticed = [f for f in asked if f.name not in results or not results[f.name].program]
    noticed = len(asked) - len(unnoticed)
    console.print(f"{noticed} of {len(asked)} faults are noticed: {RESULTS}")
    unexplained = [fault.name for fault in unnoticed if not fault.equivalent]
    if not whole:
        console.print("interrupted")
        return 130
    if unexplained:
        console.print(f"unnoticed and not explained: {', '.join(unexplained)}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
