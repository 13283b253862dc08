"""The walls of the C++ sources: which room may name torch, CUDA and libfabric, and that
dependencies point one way, without cycles.

torch -> gpu -> group -> collectives -> {progress, flows}
      -> {intranode, joining, liveness} -> {transport, device, kernels, topology, recorder} -> common

``tools/check_walls.py`` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graph import cycles

SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc"}

# Room -> the rooms whose headers its files may include, besides its own.
ROOMS: dict[str, tuple[str, ...]] = {
    "common": (),
    "recorder": ("common",),  # written by all who carry out operations
    "topology": ("common",),
    "joining": ("common",),
    "kernels": ("common",),
    "device": ("common", "kernels"),
    "transport": ("common",),
    "transport/ofi/sockets": ("common",),  # messages over TCP, without libfabric
    "transport/ofi": ("common", "transport", "transport/ofi/sockets"),
    "transport/simulated": ("common", "transport/ofi"),  # a libfabric in virtual time
    "liveness": ("common",),  # beside libfabric: plain TCP
    "intranode": ("common", "kernels", "device"),
    "progress": ("common", "joining", "transport", "transport/ofi", "intranode", "liveness"),
    "flows": ("common", "topology", "transport", "transport/ofi", "intranode"),
    "collectives": (  # of CPU tensors: no device
        "common",
        "topology",
        "kernels",
        "transport",
        "transport/ofi",
        "intranode",
        "progress",
        "flows",
        "recorder",
    ),
    "group": (
        "common",
        "recorder",
        "topology",
        "joining",
        "transport",
        "transport/ofi",
        "intranode",
        "liveness",
        "progress",
        "flows",
        "collectives",
    ),
    "gpu": (  # between hosts by way of the groups: no transport
        "common",
        "topology",
        "kernels",
        "device",
        "intranode",
        "collectives",
        "group",
    ),
    "simulator": (  # many ranks in one process: the rooms above the transport, unchanged
        "common",
        "joining",
        "topology",
        "transport",
        "transport/ofi",
        "transport/simulated",
        "progress",
        "collectives",
        "group",
    ),
    "torch": (  # passes operations to the groups: no transport, no kernels
        "common",
        "joining",
        "device",
        "intranode",
        "progress",
        "collectives",
        "group",
        "gpu",
        "recorder",
        "topology",
    ),
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
        re.compile(r"transport/ofi/|transport/simulated/"),
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
        room = _room(name)
        if room not in ROOMS:
            yield f"csrc/{name}: '{room}' is not a room that tools/cpp_walls.py knows."
            continue
        for line, header in _includes(text):
            target = _resolve(header, name, files)
            if target is None:
                continue
            includes[name].append(target)
            if _room(target) not in (room, *ROOMS[room]):
                yield (
                    f"csrc/{name}:{line}: {room}/ must not include {target}, but only "
                    f"{', '.join(ROOMS[room]) or 'its own files'}."
                )
    for cycle in cycles(includes):
        yield "csrc: include cycle " + " -> ".join(cycle) + "."
    # Tests and benchmarks of the core are built without torch too.
    for directory in ("tests/cpp", "benchmarks"):
        for path in sources(root / directory):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from _breaches(name, "", text, only={"torch"})


def _room(name: str) -> str:
    """The innermost room that the file lies in; its folder if that is none."""
    folder = name.rpartition("/")[0]
    return next(
        (r for r in sorted(ROOMS, reverse=True) if f"{folder}/".startswith(f"{r}/")), folder
    )


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
    for wall in WALLS:
        if wall.inside.match(name) or (only is not None and wall.name not in only):
            continue
        for line, header in _includes(text):
            if wall.headers.match(header):
                yield f"{shown}:{line}: includes {header}; {wall.name} stays behind its wall."
        for match in wall.identifiers.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield f"{shown}:{line}: names {match[0]}; {wall.name} stays behind its wall."
