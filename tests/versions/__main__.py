"""``python -m tests.versions``: trains on each cell of the matrix, one after the other."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.jobs import ROOT

from . import cells, tables
from .cells import DEEPSPEED, EQUAL, TREE, Cell, Result
from .environments import Environment, InstallError
from .phases import Interpreter, run_fsdp2, run_zero3, train

SHORT = "0.16.9"  # the oldest minor version that is supported


def main() -> int:
    """0 if this package does no harm in any cell, and trains as Gloo does in each supported one."""
    arguments = _arguments()
    if arguments.short:
        return _short(arguments.folder)
    if arguments.table:
        tables.write_pages()
        return 0
    wanted = [
        cell
        for cell in cells.matrix(arguments.tree is not None)
        if not arguments.only or any(part in cell.name for part in arguments.only)
    ]
    done = {} if arguments.fresh else cells.read()
    left = [cell for cell in wanted if arguments.again or cell.name not in done]
    print(f"{len(wanted)} cells, {len(wanted) - len(left)} of them done before", flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    used: list[Environment] = []  # at most one
    try:
        for number, cell in enumerate(left, 1):
            started = time.monotonic()
            result = _run(cell, used, arguments)
            result["seconds"] = round(time.monotonic() - started)
            done = {**cells.read(), cell.name: result}
            cells.write(done)
            print(
                f"[{number}/{len(left)}, {(time.monotonic() - begun) / 60:.0f} min] {cell.name}: "
                f"{cells.summary(result)}; {result['seconds']} s",
                flush=True,
            )
    finally:
        for environment in used if not arguments.keep else []:
            environment.remove()
    tables.write_pages()
    bad = [cell.name for cell in wanted if cells.is_bad(done[cell.name])]
    print("\n".join(f"not as promised: {name}" for name in bad) or "all cells as promised")
    return int(bool(bad))


def _run(cell: Cell, used: list[Environment], arguments: argparse.Namespace) -> Result:
    """The result of one cell. Its venv takes the place of the one in ``used``, if not the same."""
    result = cell.head()
    if used and used[0].cell.venv != cell.venv:
        used.pop().remove()
    try:
        if not used:
            used.append(Environment(arguments.folder, cell))
        used[0].put(cell, arguments.tree)
    except InstallError as error:
        return {**result, "install": str(error)}
    result["install"] = "installed"
    if cell.deepspeed == TREE:
        version = used[0].version("deepspeed").partition("+")[0]
        result["deepspeed"] = f"{version} at {arguments.commit}" if arguments.commit else version
    with contextlib.ExitStack() as stack:
        work = Path(tempfile.mkdtemp(dir=arguments.folder))
        if not arguments.keep:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
        interpreter = Interpreter(used[0].python)
        result |= run_zero3(interpreter, work)
        if cell.deepspeed == DEEPSPEED:  # FSDP2 rests on torch alone
            result |= run_fsdp2(interpreter, work)
    return result


def _short(folder: Path) -> int:
    """The form for each change: one older DeepSpeed beside the one of .venv, with its torch.

    0 if the losses over Gloo and over smddp are equal, and parameters come without copies.
    """
    begun = time.monotonic()
    place = folder / f"deepspeed-{SHORT}"
    if not (place / "deepspeed").exists():
        shutil.rmtree(place, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--no-deps", "--no-build-isolation", f"--target={place}"]
        subprocess.run([*command, f"deepspeed=={SHORT}"], check=True)
    work = folder / "short"
    work.mkdir(parents=True, exist_ok=True)
    interpreter = Interpreter(Path(sys.executable), (place, ROOT))
    trainings = [{"backend": backend, "steps": 2} for backend in ("gloo", "smddp")]
    answers, wrong = train(interpreter, work, trainings)
    if not wrong:
        beside, ours = answers
        if ours["losses"] != beside["losses"]:
            wrong = f"losses {ours['losses']} in place of {beside['losses']}"
        elif not ours["features"]["gather"]:
            wrong = "its own gathers ran in place of smddp's"
    seconds = time.monotonic() - begun
    said = f"{wrong}; see {work}" if wrong else f"losses {EQUAL} to Gloo's; {seconds:.0f} s"
    print(f"DeepSpeed {SHORT}: {said}")
    return int(bool(wrong))


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
