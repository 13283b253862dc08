"""``python -m tests.versions``: trains on each cell of the matrix, one after the other."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import outcomes, short, tables
from .cells import DEEPSPEED, TREE, Cell, matrix
from .environments import ROOT, Environment, InstallError
from .phases import run_fsdp2, run_phases
from .ranks import Interpreter


def main() -> int:
    """0 if this package does no harm in any cell, and trains as Gloo does in each supported one."""
    arguments = _arguments()
    if arguments.short:
        return short.main(arguments.folder)
    if arguments.table:
        tables.write_pages()
        return 0
    wanted = [cell for cell in matrix(arguments.tree is not None) if _wanted(cell, arguments.only)]
    done = {} if arguments.fresh else outcomes.read()
    left = [cell for cell in wanted if arguments.again or cell.name not in done]
    print(f"{len(wanted)} cells, {len(wanted) - len(left)} of them done before", flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    environment: Environment | None = None
    try:
        for number, cell in enumerate(left, 1):
            started = time.monotonic()
            result, environment = _run(cell, environment, arguments)
            result["seconds"] = round(time.monotonic() - started)
            done = {**outcomes.read(), cell.name: result}
            outcomes.write(done)
            print(
                f"[{number}/{len(left)}, {(time.monotonic() - begun) / 60:.0f} min] {cell.name}: "
                f"{outcomes.summary(result)}; {result['seconds']} s",
                flush=True,
            )
    finally:
        if environment is not None and not arguments.keep:
            environment.remove()
    tables.write_pages()
    bad = [cell.name for cell in wanted if outcomes.is_bad(done[cell.name])]
    print("\n".join(f"not as promised: {name}" for name in bad) or "all cells as promised")
    return int(bool(bad))


def _run(
    cell: Cell, environment: Environment | None, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Environment | None]:
    """The result of one cell, and the venv, which the next cell may use."""
    result: dict[str, Any] = outcomes.head(cell)
    if environment is not None and environment.cell.venv != cell.venv:
        environment.remove()
        environment = None
    try:
        if environment is None:
            environment = Environment(arguments.folder, cell)
            environment.make()
        environment.put(cell, arguments.tree)
    except InstallError as error:
        if environment is not None and not environment.python.exists():
            environment = None
        return {**result, "install": str(error)}, environment
    result["install"] = "installed"
    if cell.deepspeed == TREE:
        version = environment.version("deepspeed").partition("+")[0]
        result["deepspeed"] = f"{version} at {arguments.commit}" if arguments.commit else version
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        result.update(run_phases(Interpreter(environment.python), work))
        if cell.deepspeed == DEEPSPEED:  # FSDP2 rests on torch alone
            result.update(run_fsdp2(Interpreter(environment.python), work))
    finally:
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
    return result, environment


def _wanted(cell: Cell, only: list[str]) -> bool:
    return not only or any(part in cell.name for part in only)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    parser.add_argument("only", nargs="*", help="parts of cells' names: 'deepspeed 0.16.9'")
    parser.add_argument("--tree", type=Path, help="a checkout of DeepSpeed, as one more version")
    parser.add_argument("--commit", help="of --tree, for the table")
    parser.add_argument("--fresh", action="store_true", help="forget all results first")
    parser.add_argument("--again", action="store_true", help="run cells that have a result, too")
    parser.add_argument("--keep", action="store_true", help="keep the last venv and the outputs")
    parser.add_argument("--table", action="store_true", help="only write the tables again")
    parser.add_argument("--short", action="store_true", help="one other DeepSpeed, in .venv")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
