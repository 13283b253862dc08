"""The walls of the Python sources: rooms, import cycles, file names, private modules of others.

Reads the sources with ``ast`` and imports nothing. ``tools/check_walls.py`` calls it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from graph import cycles

PACKAGE = "deepspeed_smddp"
BESIDE = ("smddp_autoload.py", "smdistributed.py")  # modules that are installed with the package

# Room -> the rooms that its modules may import besides "base". A room is a package directly in
# deepspeed_smddp; the modules beside these packages are the room "base".
ROOMS: dict[str, tuple[str, ...]] = {
    "base": (),
    "upstream": (),
    "tune": (),
    "plan": (),
    "diagnose": ("upstream",),
    "bench": ("diagnose",),
    "ledger": (),
    "subgroups": ("upstream",),
    "offload": ("upstream",),
    "fsdp": ("upstream",),
    "delayed_init": ("upstream",),
    "zero": ("upstream", "tune", "offload"),
    "compat": ("upstream", "offload", "fsdp"),
}
# The public API and the command line may import any room.
ENTRIES = (PACKAGE, f"{PACKAGE}.cli")

# These trees mirror import names of other libraries, which dictate the names of the files.
FOREIGN_NAMES = ("compat/smdistributed/", "compat/torch_sagemaker/")

# Private modules of other libraries -> the only room that may name them.
PRIVATE = {
    "deepspeed.runtime": "zero",
    "torch.distributed.fsdp._fully_shard": "fsdp",
}


@dataclass
class Module:
    """One Python file: the modules of the tree that it imports, and all dotted names in its code.

    An import counts wherever it stands: also in a function, and under ``if TYPE_CHECKING``. Both
    are ways to hide a cycle. An import by a name in a string (``importlib``) does not count;
    ``smddp_autoload`` needs it, as it must not load the package.
    """

    path: Path
    imports: dict[str, int] = field(default_factory=dict)  # module -> line
    names: dict[str, int] = field(default_factory=dict)  # dotted name -> line


def problems(root: Path) -> Iterator[str]:
    """One sentence for each breach below ``root``, the repository."""
    beside = [root / name for name in BESIDE if (root / name).is_file()]
    modules = read(root, [*sources(root / PACKAGE), *beside])
    yield from _cycles(PACKAGE, modules)
    yield from _rooms(root, modules)
    yield from _private(root, modules)
    yield from _file_names(root)
    benchmarks = root / "benchmarks"
    yield from _cycles("benchmarks", read(benchmarks, sources(benchmarks)))


def sources(directory: Path) -> list[Path]:
    """The Python files and stubs below a directory."""
    return sorted(p for p in directory.rglob("*.py*") if p.suffix in (".py", ".pyi"))


def read(root: Path, paths: list[Path]) -> dict[str, Module]:
    """The modules by dotted name; ``root`` is the directory that imports start from."""
    modules = {_dotted(path.relative_to(root)): Module(path) for path in paths}
    for name, module in modules.items():
        tree = ast.parse(module.path.read_text(encoding="utf-8"), str(module.path))
        for node in ast.walk(tree):
            for imported in _imported(node, name, module.path.stem == "__init__"):
                module.names.setdefault(imported, node.lineno)
                for target in _targets(imported, name, modules):
                    module.imports.setdefault(target, node.lineno)
            if isinstance(node, ast.Attribute):
                module.names.setdefault(ast.unparse(node), node.lineno)
    return modules


def _dotted(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def _imported(node: ast.AST, importer: str, is_package: bool) -> Iterator[str]:
    """The names that an import statement imports, dotted from the top."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = importer.split(".") if is_package else importer.split(".")[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        base += node.module.split(".") if node.module else []
        yield from (".".join([*base, alias.name]) for alias in node.names)


def _targets(imported: str, importer: str, modules: dict[str, Module]) -> Iterator[str]:
    """The modules that an import runs: the longest prefix that is one, and its packages.

    Packages that hold the importer have begun to run before it, and do not count.
    """
    name = imported
    while name and name not in modules:
        name = name.rpartition(".")[0]
    if name:
        yield name
    while "." in name:
        name = name.rpartition(".")[0]
        if name in modules and not f"{importer}.".startswith(f"{name}."):
            yield name


def _cycles(tree: str, modules: dict[str, Module]) -> Iterator[str]:
    edges = {name: list(module.imports) for name, module in modules.items()}
    for cycle in cycles(edges):
        yield f"{tree}: import cycle " + " -> ".join(cycle) + "."


def _room(name: str, modules: dict[str, Module]) -> str:
    top, _, rest = name.partition(".")
    first = rest.split(".")[0]
    package = modules.get(f"{PACKAGE}.{first}")
    if top == PACKAGE and package is not None and package.path.stem == "__init__":
        return first
    return "base"


def _rooms(root: Path, modules: dict[str, Module]) -> Iterator[str]:
    for name, module in modules.items():
        room = _room(name, modules)
        shown = module.path.relative_to(root)
        if room not in ROOMS:
            yield f"{shown}: '{room}' is not a room that tools/python_walls.py knows."
            continue
        allowed = ROOMS if name in ENTRIES else (room, "base", *ROOMS[room])
        found: dict[int, str] = {}
        for target, line in module.imports.items():
            if _room(target, modules) not in allowed:
                found.setdefault(line, target)
        for line, target in found.items():
            yield f"{shown}:{line}: {room} must not import {target}."


def _private(root: Path, modules: dict[str, Module]) -> Iterator[str]:
    for name, module in modules.items():
        for private, room in PRIVATE.items():
            if _room(name, modules) == room:
                continue
            for used, line in module.names.items():
                if f"{used}.".startswith(f"{private}."):
                    shown = module.path.relative_to(root)
                    yield f"{shown}:{line}: names {used}; only {room} may name {private}."


def _file_names(root: Path) -> Iterator[str]:
    # A package counts by the name of its directory.
    found: dict[str, list[str]] = defaultdict(list)
    package = root / PACKAGE
    for path in sources(package):
        shown = path.relative_to(package).as_posix()
        if not shown.startswith(FOREIGN_NAMES):
            stem = path.parent.name if path.stem == "__init__" else path.stem
            found[stem].append(path.relative_to(root).as_posix())
    for stem, paths in found.items():
        if len(paths) > 1:
            yield f"{', '.join(paths)}: {len(paths)} modules have the name {stem}."
