"""`python -m tests.real_programs neox`: a program's own code over Gloo and over smddp."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import megatron_deepspeed, neox, page, runs
from .runs import REFERENCE, ROOT, Case, Run, RunError

PROGRAMS = {
    "neox": ("GPT-NeoX", "gpt-neox", neox),
    "megatron": ("Megatron-DeepSpeed", "megatron-deepspeed", megatron_deepspeed),
}
_VERSIONS = (  # this package is installed in place: its metadata may be older than its code
    "import json, importlib.metadata as m, deepspeed_smddp; print(json.dumps({**{n: m.version(n) "
    "for n in ('torch', 'transformers', 'numpy', 'deepspeed')}, "
    "'deepspeed-smddp': deepspeed_smddp.__version__}))"
)


def main() -> int:
    """0 if each run over smddp has Gloo's losses and used smddp's collectives, else 1."""
    arguments = _arguments()
    title, slug, module = PROGRAMS[arguments.program]
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    program = module.Program(arguments.source.resolve(), arguments.folder.resolve())
    program.prepare(Path(next(iter(pythons.values()))).absolute())
    cases = [case for case in module.CASES if not arguments.cases or case.name in arguments.cases]
    facts = _facts(arguments, title)
    results = arguments.folder / "results.json"
    done = runs.load(results) if arguments.go_on else []
    failures, begin = 0, time.monotonic()
    for python in pythons.values():
        for sentence in program.check_shipped_configs(Path(python).absolute()):
            print(sentence, flush=True)
            failures += 1
    for deepspeed, python in pythons.items():
        for case in cases:
            if (case.name, deepspeed) in {(run.case, run.deepspeed) for run in done}:
                continue  # by an earlier command
            if time.monotonic() - begin > 60 * arguments.minutes:
                continue  # the page names it
            failures += _case(program, case, deepspeed, Path(python).absolute(), done, arguments)
            runs.dump(done, facts, results)
    if failures:
        print(f"{failures} failures; the page is not written")
        return 1
    make = f"make {arguments.program}-check"
    text = page.write(title, make, cases, done, facts)
    target = ROOT / "docs" / "dev" / f"{slug}-results.md" if not arguments.cases else None
    target = target or arguments.folder / "results.md"
    target.write_text(text)
    print(f"the runs over smddp have Gloo's losses; see {target}")
    return 0


def _case(
    program: Any,
    case: Case,
    deepspeed: str,
    python: Path,
    done: list[Run],
    arguments: argparse.Namespace,
) -> int:
    """Runs one case over Gloo, over smddp, and resumed; the number that failed.

    ``done`` gets the runs if none failed.
    """
    reference: Run | None = None
    failures, made = 0, []
    kinds = [(REFERENCE, False), ("smddp", False), ("smddp", True)]
    for backend, resumed in kinds[: 2 + case.resume]:
        run = Run(case.name, deepspeed, backend, resumed)
        label = f"DeepSpeed {deepspeed}, {case.name}, {backend}{', resumed' * resumed}"
        try:
            program.run(run, case, python, _free_port(), arguments.limit)
        except RunError as error:
            print(f"{error}\n{label}: FAILED", flush=True)
            return failures + 1
        made.append(run)
        wrong = runs.check(run, reference, case) if reference else []
        reference = reference or run
        failures += bool(wrong)
        verdict = "; ".join(wrong) or "ok"
        last = run.losses.get(runs.STEPS, float("nan"))
        print(f"{label}: {run.seconds:.0f} s, last loss {last:.6f}, {verdict}", flush=True)
    if not failures:
        done += made
    return failures


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _commit(checkout: Path, told: str) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    inside = subprocess.run([*command[:-1], "--show-prefix"], capture_output=True, text=True)
    found = subprocess.run(command, capture_output=True, text=True)
    if told or found.returncode or inside.stdout.strip():
        return told or "unknown"  # not a checkout's top folder
    return found.stdout.strip()


def _facts(arguments: argparse.Namespace, title: str) -> dict[str, str]:
    facts = {
        "date": datetime.date.today().isoformat(),
        f"{title} commit": _commit(arguments.source, arguments.commit),
        "Python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    for pair in arguments.python:
        name, python = pair.split("=", 1)
        found = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True)
        facts[f'"{name}"'] = found.stdout.strip().strip("{}").replace('"', "")
    for pair in arguments.fact:
        key, value = pair.split("=", 1)
        facts[key] = value
    return facts


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.real_programs", description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the program")
    parser.add_argument("--commit", default="", help="its commit, if git does not know it")
    parser.add_argument(
        "--python",
        action="append",
        required=True,
        metavar="DEEPSPEED=PATH",
        help="a Python and the name of its DeepSpeed; several may be given",
    )
    parser.add_argument("--folder", type=Path, required=True, help="for data, logs, checkpoints")
    parser.add_argument("--go-on", action="store_true", help="keep what an earlier command ran")
    parser.add_argument("--limit", type=float, default=900, help="seconds per run (%(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=1e9,
        help="begin no case later; the page names those",
    )
    parser.add_argument("--fact", action="append", default=[], help="KEY=VALUE, for the page")
    parser.add_argument("--cases", nargs="+", help="some cases; the page in docs/ stays as it is")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
