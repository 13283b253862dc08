#!/usr/bin/env python3
"""Prove the import rules of the C++ sources: what each folder of csrc/ may include, without cycles,
and which of them may name torch, CUDA and libfabric.

torch -> gpu -> group -> collectives -> {progress, flows} -> {intranode, joining, network, liveness}
      -> {transport, device, coding, kernels, topology, recorder} -> common

joining/ finds who the ranks of a group are and that they agree, as far as the store tells it; the
steps that need the engine or flows are in group/. network/ has the model of the network; how a pair
exchanges bytes is group/'s.

It proves as well that no two modules of the Python package share a file name; that package's import
rules are in pyproject.toml, for import-linter.

    tools/check_import_rules.py [ROOT]
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "deepspeed_smddp"
# Of other libraries, whose import names dictate the names of the files.
FOREIGN_NAMES = ("compat/smdistributed/", "compat/torch_sagemaker/")

SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc"}

# Folder -> the folders whose headers its files may include, besides its own.
FOLDERS = {
    "common": "",
    "recorder": "common",  # written by all who carry out operations
    "topology": "common",
    "network": "common topology",
    "joining": "common topology intranode network",
    "kernels": "common",
    "coding": "common kernels",  # chooses the instruction set as kernels/ does
    "device": "common kernels",
    "transport": "common",
    "transport/ofi": "common transport",
    "liveness": "common",  # beside libfabric: plain TCP
    "intranode": "common kernels device",
    "progress": "common topology network joining transport intranode liveness",
    "flows": "common topology transport intranode coding",
    # Of CPU tensors: no device.
    "collectives": "common topology network kernels transport intranode progress flows recorder",
    "group": "common recorder topology joining network transport intranode liveness progress flows "
    "collectives",
    # Between hosts by way of the groups: no transport.
    "gpu": "common topology kernels device intranode collectives group",
    # Passes operations to the groups: no transport, no kernels.
    "torch": "common joining device intranode progress collectives group gpu recorder topology "
    "coding",
}

# The one place that opens libfabric's transport.
OPENS_THE_NETWORK = ("progress/network.cc", "transport/ofi/open.h")


@dataclass(frozen=True)
class Library:
    """A library that only some paths may include or name."""

    name: str
    inside: re.Pattern[str]  # paths below csrc/ that may name it
    headers: re.Pattern[str]
    identifiers: re.Pattern[str]


LIBRARIES = (
    Library(
        "torch",
        re.compile(r"torch/"),
        re.compile(r"(torch|c10|ATen|caffe2|pybind11)/|Python\.h$"),
        re.compile(r"\b(?:c10d?|at|torch|pybind11)::\w+|\bPyObject\b"),
    ),
    Library(
        "CUDA",
        re.compile(r"device/|intranode/copy_engine"),
        re.compile(r"cuda|cub/|thrust/|nccl|gdrapi|nvml"),
        re.compile(
            r"\bcuda(?:[A-Z]|_runtime)\w*|\bcu[A-Z][a-z]\w+\b|\bCU(?:deviceptr|stream|event|context"
            r"|device|result|ipc\w+)\b|\bgdr_\w+|\bnccl[A-Z]\w*|__(?:global|device)__\b"
        ),
    ),
    Library(
        "libfabric",
        re.compile(r"transport/ofi/"),
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
    files = {path.relative_to(csrc).as_posix(): path for path in sources(csrc)}
    includes: dict[str, list[str]] = {}
    for name, path in files.items():
        includes[name] = []
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from _breaches(f"csrc/{name}", name, text)
        folder = _folder(name)
        if folder not in FOLDERS:
            yield f"csrc/{name}: tools/check_import_rules.py does not know the folder '{folder}'."
            continue
        for line, header in _includes(text):
            target = _resolve(header, name, files)
            if target is None:
                continue
            includes[name].append(target)
            allowed = _folder(target) in (folder, *FOLDERS[folder].split())
            if not allowed and (name, target) != OPENS_THE_NETWORK:
                only = FOLDERS[folder] or "its own files"
                yield f"csrc/{name}:{line}: {folder}/ must not include {target}, but only {only}."
    for cycle in _cycles(includes):
        yield "csrc: include cycle " + " -> ".join(cycle) + "."
    # Tests and benchmarks of the core are built without torch too.
    for directory in ("tests/cpp", "benchmarks"):
        for path in sources(root / directory):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from _breaches(name, "", text, only={"torch"})


def _folder(name: str) -> str:
    """The innermost folder with rules that the file lies in; its own folder if there is none."""
    own = name.rpartition("/")[0]
    return next((f for f in sorted(FOLDERS, reverse=True) if f"{own}/".startswith(f"{f}/")), own)


def sources(directory: Path) -> list[Path]:
    """The C and C++ files below a directory."""
    return sorted(p for p in directory.rglob("*") if p.suffix in SUFFIXES and p.is_file())


def _includes(text: str) -> list[tuple[int, str]]:
    return [(text.count("\n", 0, m.start()) + 1, m[1]) for m in INCLUDE.finditer(text)]


def _resolve(header: str, includer: str, files: dict[str, Path]) -> str | None:
    beside = (Path(includer).parent / header).as_posix()
    return header if header in files else beside if beside in files else None


def _breaches(shown: str, name: str, text: str, only: set[str] | None = None) -> Iterator[str]:
    # Blank out comments and literals (an error message may name a package), keep line numbers.
    code = COMMENT_OR_LITERAL.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    for library in LIBRARIES:
        if library.inside.match(name) or (only is not None and library.name not in only):
            continue
        for line, header in _includes(text):
            if library.headers.match(header):
                yield f"{shown}:{line}: includes {header}; {library.name} must not be named here."
        for match in library.identifiers.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield f"{shown}:{line}: names {match[0]}; {library.name} must not be named here."


def _cycles(edges: dict[str, list[str]]) -> Iterator[list[str]]:
    """Each cycle that a depth-first search closes: its files in order, the first once more."""
    visited: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in visited:
            for target in edges[name]:
                yield from visit(target, [*path, name])
            visited.add(name)

    for name in edges:
        yield from visit(name, [])


def shared_names(package: Path) -> Iterator[str]:
    """One sentence for each name of several modules; packages aside."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        shown = path.relative_to(package).as_posix()
        if path.stem != "__init__" and not shown.startswith(FOREIGN_NAMES):
            found[path.stem].append(shown)
    for stem, paths in found.items():
        if len(paths) > 1:
            yield f"{PACKAGE}: {', '.join(paths)}: {len(paths)} modules have the name {stem}."


def main(arguments: list[str]) -> int:
    """Print every breach; the exit status is 1 if there is one."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = [*problems(root), *shared_names(root / PACKAGE)]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
