#!/usr/bin/env python3
"""Prove the walls of the C++ and the Python sources; ``cpp_walls`` and ``python_walls`` state them.

tools/check_walls.py [ROOT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import cpp_walls
import python_walls


def main(arguments: list[str]) -> int:
    """Print every breach; the exit status is 1 if there is one."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / "csrc").is_dir():
        print(f"{root} has no csrc/ directory.", file=sys.stderr)
        return 2
    found = [*cpp_walls.problems(root), *python_walls.problems(root)]
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        cpp = len(cpp_walls.sources(root / "csrc"))
        python = len(python_walls.sources(root / python_walls.PACKAGE))
        print(f"walls hold: {cpp} files in csrc/, {python} in {python_walls.PACKAGE}/")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
