"""`python -m tests.real_programs neox`: a program's own code over Gloo and over smddp."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.jobs import ROOT, JobError

from . import page, runs
from .megatron_deepspeed import Megatron
from .neox import Neox
from .program import Program
from .runs import REFERENCE, Case, Run

PROGRAMS: dict[str, type[Program]] = {"neox": Neox, "megatron": Megatron}
_VERSIONS = (  # this package is installed in place: its metadata may be older than its code
    "import importlib.metadata as m, deepspeed_smddp; print(*(f'{n}: {m.version(n)}' "
    "for n in ('torch', 'transformers', 'numpy', 'deepspeed')), "
    "f'deepspeed-smddp: {deepspeed_smddp.__version__}', sep=', ')"
)


def main() -> int:
    """0 if each run over smddp has Gloo's losses and used smddp's collectives, else 1."""
    arguments = _arguments()
    kind = PROGRAMS[arguments.program]
    # Paths of venvs stay as they are: resolved, they would be the interpreter below.
    pythons = {name: Path(path).absolute() for name, path in arguments.python}
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    program = kind(arguments.source.resolve(), folder)
    program.prepare(next(iter(pythons.values())))
    cases = [case for case in kind.cases if not arguments.cases or case.name in arguments.cases]
    facts = _facts(arguments, kind.title, pythons)
    results = folder / "results.json"
    done: list[Run] = []
    if arguments.go_on and results.exists():
        done = [Run(**run) for run in json.loads(results.read_text())["runs"]]
    begin, failures = time.monotonic(), 0
    for python in pythons.values():
        for sentence in program.refused_configs(python):
            print(sentence, flush=True)
            failures += 1
    for deepspeed, python in pythons.items():
        for case in cases:
            if (case.name, deepspeed) in {(run.case, run.deepspeed) for run in done}:
                continue  # by an earlier command
            if time.monotonic() - begin > 60 * arguments.minutes:
                continue  # the page names it
            made = _case(program, case, deepspeed, python, arguments.limit)
            failures += not made
            done += made
            whole = {"facts": facts, "runs": [asdict(run) for run in done]}
            results.write_text(json.dumps(whole, indent=1))
    if failures:
        print(f"{failures} failures; the page is not written")
        return 1
    text = page.write(kind.title, f"make {arguments.program}-check", cases, done, facts)
    target = ROOT / "docs" / "dev" / f"{kind.title.lower()}-results.md"
    if arguments.cases:
        target = folder / "results.md"
    target.write_text(text)
    print(f"the runs over smddp have Gloo's losses; see {target}")
    return 0


def _case(program: Program, case: Case, deepspeed: str, python: Path, limit: float) -> list[Run]:
    """Runs one case over Gloo, over smddp, and resumed; none if one of them failed."""
    made: list[Run] = []
    right = True
    kinds = [(REFERENCE, False), ("smddp", False), ("smddp", True)]
    for backend, resumed in kinds[: 2 + case.resume]:
        run = Run(case.name, deepspeed, backend, resumed)
        label = f"DeepSpeed {deepspeed}, {case.name}, {run.kind}"
        begin = time.monotonic()
        try:
            program.run(run, case, python, limit)
        except JobError as error:
            print(f"{error}\n{label}: FAILED", flush=True)
            return []
        wrong = runs.check(run, made[0], case) if made else []
        made.append(run)
        right &= not wrong
        last = run.losses.get(runs.STEPS, float("nan"))
        verdict = f"last loss {last:.6f}, {'; '.join(wrong) or 'ok'}"
        print(f"{label}: {time.monotonic() - begin:.0f} s, {verdict}", flush=True)
    return made if right else []


def _facts(arguments: argparse.Namespace, title: str, pythons: dict[str, Path]) -> dict[str, str]:
    facts = {"date": datetime.date.today().isoformat(), f"{title} commit": "unknown"}
    if (arguments.source / ".git").exists():
        command = ["git", "-C", str(arguments.source), "rev-parse", "HEAD"]
        facts[f"{title} commit"] = subprocess.check_output(command, text=True).strip()
    facts |= {"Python": platform.python_version(), "cores": str(os.cpu_count())}
    for name, python in pythons.items():
        found = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True)
        facts[f'"{name}"'] = found.stdout.strip()
    return facts | dict(arguments.fact)


def _pair(text: str) -> list[str]:
    key, value = text.split("=", 1)
    return [key, value]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.real_programs", description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the program")
    parser.add_argument(
        "--python",
        action="append",
        required=True,
        type=_pair,
        metavar="DEEPSPEED=PATH",
        help="a Python and the name of its DeepSpeed; several may be given",
    )
    parser.add_argument("--folder", type=Path, required=True, help="for data, logs, checkpoints")
    parser.add_argument("--go-on", action="store_true", help="keep what an earlier command ran")
    parser.add_argument("--limit", type=float, default=900, help="seconds per run (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no case later; the page names those"
    )
    parser.add_argument(
        "--fact", action="append", default=[], type=_pair, help="KEY=VALUE, for the page"
    )
    parser.add_argument("--cases", nargs="+", help="some cases; the page in docs/ stays as it is")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
