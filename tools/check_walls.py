#!/usr/bin/env python3
"""Prove the walls of the C++ tree: which directory may name torch, CUDA and libfabric, and that
dependencies point one way, without cycles.

torch -> collectives -> schedule -> {fabric, intranode} -> {device, bootstrap, topology} -> common

    tools/check_walls.py [ROOT]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc"}

# A file may include its own directory and any of a lower layer; neighbours on a layer are apart.
LAYER = {
    "common": 0,
    "topology": 1,
    "bootstrap": 1,
    "device": 1,
    "fabric": 2,
    "intranode": 2,
    "schedule": 3,
    "collectives": 4,
    "torch": 5,
}


@dataclass(frozen=True)
class Wall:
    """A library that only the paths `inside` may include or name."""

    name: str
    inside: re.Pattern[str]  # paths below csrc/ that may name it
    headers: re.Pattern[str]
    identifiers: re.Pattern[str]


WALLS = (
    Wall(
        "torch",
        re.compile(r"torch/"),
        re.compile(r"(torch|c10|ATen|caffe2|pybind11)/|Python\.h$"),
        re.compile(r"\b(?:c10d?|at|torch|pybind11)::\w+|\bPyObject\b"),
    ),
    Wall(
        "CUDA",
        re.compile(r"device/|intranode/copy_engine"),
        re.compile(r"cuda|cub/|thrust/|nccl|gdrapi|nvml"),
        re.compile(
            r"\bcuda(?:[A-Z]|_runtime)\w*|\bcu[A-Z][a-z]\w+\b|\bCU(?:deviceptr|stream|event|context"
            r"|device|result|ipc\w+)\b|\bgdr_\w+|\bnccl[A-Z]\w*|__(?:global|device)__\b"
        ),
    ),
    Wall(
        "libfabric",
        re.compile(r"fabric/"),
        re.compile(r"rdma/"),
        re.compile(r"\b(?:fi|fid)_\w+|\bFI_[A-Z0-9_]+\b"),
    ),
)

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_LITERAL = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^(\s]*)\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'',
    re.DOTALL,
)


def problems(root: Path) -> Iterator[str]:
    """One sentence for each breach below `root`, the repository."""
    csrc = root / "csrc"
    sources = {p.relative_to(csrc).as_posix(): p for p in _sources(csrc)}
    includes: dict[str, list[str]] = {}
    for name, path in sources.items():
        includes[name] = []
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from _breaches(f"csrc/{name}", name, text)
        directory = name.split("/")[0] if "/" in name else ""
        if directory not in LAYER:
            yield f"csrc/{name}: '{directory}' is not a layer that tools/check_walls.py knows."
            continue
        for line, header in _includes(text):
            target = _resolve(header, name, sources)
            if target is None:
                continue
            includes[name].append(target)
            other = target.split("/")[0]
            if other != directory and LAYER.get(other, 0) >= LAYER[directory]:
                yield (
                    f"csrc/{name}:{line}: {directory}/ must not include {target}; "
                    "dependencies point down only."
                )
    for cycle in _cycles(includes):
        yield "csrc: include cycle " + " -> ".join(cycle) + "."
    # Tests and benchmarks of the core are built without torch too.
    for directory in ("tests/cpp", "benchmarks"):
        for path in _sources(root / directory):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from _breaches(name, "", text, only={"torch"})


def _sources(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.suffix in SUFFIXES and p.is_file())


def _includes(text: str) -> list[tuple[int, str]]:
    return [(text.count("\n", 0, m.start()) + 1, m[1]) for m in INCLUDE.finditer(text)]


def _resolve(header: str, includer: str, sources: dict[str, Path]) -> str | None:
    beside = (Path(includer).parent / header).as_posix()
    return header if header in sources else beside if beside in sources else None


def _breaches(shown: str, name: str, text: str, only: set[str] | None = None) -> Iterator[str]:
    # Blank out comments and literals (an error message may name a package), keep line numbers.
    code = COMMENT_OR_LITERAL.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    for wall in WALLS:
        if wall.inside.match(name) or (only is not None and wall.name not in only):
            continue
        for line, header in _includes(text):
            if wall.headers.match(header):
                yield f"{shown}:{line}: includes {header}; {wall.name} stays behind its wall."
        for match in wall.identifiers.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield f"{shown}:{line}: names {match[0]}; {wall.name} stays behind its wall."


def _cycles(includes: dict[str, list[str]]) -> Iterator[list[str]]:
    """Each include cycle that a depth-first search closes."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for target in includes[name]:
                yield from visit(target, [*path, name])
            done.add(name)

    for name in includes:
        yield from visit(name, [])


def main(arguments: list[str]) -> int:
    """Print every breach; the exit status is 1 where there is one."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / "csrc").is_dir():
        print(f"{root} has no csrc/ directory.", file=sys.stderr)
        return 2
    found = list(problems(root))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"walls hold: {len(_sources(root / 'csrc'))} files in csrc/")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
