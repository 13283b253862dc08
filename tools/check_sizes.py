#!/usr/bin/env python3
"""Prove that classes and functions of the core stay readable, and that nothing is written twice.

In ``csrc/`` no class has more than 25 data members or 400 lines with its implementation, and no
function more than 60 lines, from its signature to its closing brace. Between two files of ``csrc/``
and ``deepspeed_smddp/`` no six lines of code are the same.

    tools/check_sizes.py [ROOT] [--list]

``--list`` prints the largest ones as well.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

MOST_MEMBERS = 25
MOST_CLASS_LINES = 400
MOST_FUNCTION_LINES = 60
REPEATED_LINES = 6

_CPP = Language(tree_sitter_cpp.language())
_CLASSES = ("class_specifier", "struct_specifier", "union_specifier")
# Lines that say too little to be a repetition: punctuation alone, includes, imports, access labels.
_THIN = re.compile(
    r"[\W_]*$|#\s*include\b|import\s|from\s+\S+\s+import\b|using\s|namespace\b|(public|private|protected):$"
)


@dataclass
class Class:
    """One class: where its body is, and what it takes with the functions that implement it."""

    place: str
    members: int = 0
    lines: int = 0


@dataclass
class Sizes:
    """What the sources hold: classes and functions by name."""

    classes: dict[str, Class] = field(default_factory=dict)
    functions: list[tuple[str, str, int]] = field(default_factory=list)  # place, name, lines


def measure(csrc: Path) -> Sizes:
    """The classes and functions of every C++ source below `csrc`."""
    sizes = Sizes()
    parser = Parser(_CPP)
    bodies: list[tuple[str, str, int]] = []  # file, scope of a member function, lines
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in (".h", ".cc", ".cu")):
        name = path.relative_to(csrc.parent).as_posix()
        root = parser.parse(path.read_bytes()).root_node
        _visit(root, name, "", sizes, bodies)
    for name, scope, lines in bodies:
        owner = _owner(sizes, name, scope)
        if owner is not None:
            owner.lines += lines
    return sizes


def _visit(
    node: Node, file: str, scope: str, sizes: Sizes, bodies: list[tuple[str, str, int]]
) -> None:
    for child in node.children:
        if child.type in _CLASSES and child.child_by_field_name("body") is not None:
            _class(child, file, scope, sizes, bodies)
        elif child.type == "function_definition":
            name = _function_name(child)
            lines = _lines(child)
            shown = f"{scope}::{name}" if scope else name
            sizes.functions.append((_place(file, child), shown, lines))
            if not scope and "::" in name:
                bodies.append((file, name.rpartition("::")[0], lines))
            # Classes within functions count for themselves.
            _visit(child, file, scope, sizes, bodies)
        else:
            _visit(child, file, scope, sizes, bodies)


def _class(
    node: Node, file: str, scope: str, sizes: Sizes, bodies: list[tuple[str, str, int]]
) -> None:
    named = node.child_by_field_name("name")
    name = _text(named) if named is not None else f"(unnamed, line {node.start_point[0] + 1})"
    full = f"{scope}::{name}" if scope else name
    body = node.child_by_field_name("body")
    assert body is not None
    members = sum(_declared(child) for child in body.children if child.type == "field_declaration")
    nested = sum(_lines(n) for n in _nested(body))
    sizes.classes[f"{file}:{full}"] = Class(_place(file, node), members, _lines(node) - nested)
    _visit(body, file, full, sizes, bodies)


def _nested(body: Node) -> Iterator[Node]:
    for child in body.children:
        if child.type in _CLASSES and child.child_by_field_name("body") is not None:
            yield child
        elif child.type in ("field_declaration", "template_declaration", "declaration"):
            yield from _nested(child)


def _declared(declaration: Node) -> int:
    # The data members that a declaration makes: none for functions, types and constants.
    words = {_text(c) for c in declaration.children if c.type in ("storage_class_specifier",)}
    if "static" in words:
        return 0
    return sum(
        not _is_function(declarator)
        for declarator in declaration.children_by_field_name("declarator")
    )


def _is_function(declarator: Node) -> bool:
    node: Node | None = declarator
    while node is not None:
        if node.type == "function_declarator":
            # A pointer to a function is a member: void (*done)(int).
            inner = node.child_by_field_name("declarator")
            return inner is None or inner.type != "parenthesized_declarator"
        node = node.child_by_field_name("declarator")
    return False


def _function_name(definition: Node) -> str:
    node = definition.child_by_field_name("declarator")
    while node is not None and node.type != "function_declarator":
        following = node.child_by_field_name("declarator")
        if following is None:
            following = next((c for c in node.children if c.type == "function_declarator"), None)
        node = following
    named = node.child_by_field_name("declarator") if node is not None else None
    return re.sub(r"\s+", "", _text(named)) if named is not None else "(unnamed)"


def _owner(sizes: Sizes, file: str, scope: str) -> Class | None:
    # A member function stands in a source of its class's room.
    room = file.rpartition("/")[0]
    scope = re.sub(r"<.*>", "", scope)
    for wanted in (file, room):
        for key, found in sizes.classes.items():
            where, _, name = key.partition(":")
            if (name == scope or name.endswith(f"::{scope}")) and where.startswith(wanted):
                return found
    return None


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _lines(node: Node) -> int:
    return node.end_point[0] - node.start_point[0] + 1


def _place(file: str, node: Node) -> str:
    return f"{file}:{node.start_point[0] + 1}"


def too_large(sizes: Sizes) -> Iterator[str]:
    """One sentence for each class and function over its limit."""
    for key, found in sizes.classes.items():
        name = key.partition(":")[2]
        if found.members > MOST_MEMBERS:
            yield f"{found.place}: {name} has {found.members} data members; at most {MOST_MEMBERS}."
        if found.lines > MOST_CLASS_LINES:
            yield (
                f"{found.place}: {name} takes {found.lines} lines with its implementation; "
                f"at most {MOST_CLASS_LINES}."
            )
    for place, name, lines in sizes.functions:
        if lines > MOST_FUNCTION_LINES:
            yield f"{place}: {name}() has {lines} lines; at most {MOST_FUNCTION_LINES}."


def repeated(root: Path) -> Iterator[str]:
    """One sentence for each run of code lines that stands in two files."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for path in _sources(root):
        name = path.relative_to(root).as_posix()
        lines = list(_code(path))
        for i in range(len(lines) - REPEATED_LINES + 1):
            block = lines[i : i + REPEATED_LINES]
            places[tuple(text for _, text in block)].append((name, block[0][0], block[-1][0]))
    told: dict[tuple[str, str], tuple[int, int]] = {}  # pair -> where the last told run ended
    for found in places.values():
        first = found[0]
        for other in found[1:]:
            if other[0] == first[0]:
                continue
            pair = (first[0], other[0])
            last = told.get(pair, (0, 0))
            told[pair] = (first[2], other[2])
            if first[1] <= last[0] and other[1] <= last[1]:
                continue  # the run goes on
            yield (
                f"{first[0]}:{first[1]}: {REPEATED_LINES} lines or more stand again at "
                f"{other[0]}:{other[1]}."
            )


def _sources(root: Path) -> Iterator[Path]:
    for directory, suffixes in (("csrc", (".h", ".cc", ".cu")), ("deepspeed_smddp", (".py",))):
        yield from sorted(p for p in (root / directory).rglob("*") if p.suffix in suffixes)


def _code(path: Path) -> Iterator[tuple[int, str]]:
    comment = "#" if path.suffix == ".py" else "//"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = re.sub(r"\s+", " ", line).strip()
        if text.startswith(comment) and not text.startswith("#define"):
            continue
        if text and not _THIN.match(text):
            yield number, text


def main(arguments: list[str]) -> int:
    """Print every breach; the exit status is 1 if there is one."""
    paths = [a for a in arguments if not a.startswith("-")]
    root = Path(paths[0]) if paths else Path(__file__).resolve().parent.parent
    sizes = measure(root / "csrc")
    if not sizes.classes:
        print(f"{root} has no classes in csrc/.", file=sys.stderr)
        return 2
    if "--list" in arguments:
        for key, found in sorted(sizes.classes.items(), key=lambda i: -i[1].lines)[:20]:
            print(f"{found.lines:5} lines {found.members:3} members  {key}")
        for place, name, lines in sorted(sizes.functions, key=lambda f: -f[2])[:20]:
            print(f"{lines:5} lines  {name}()  {place}")
    found_problems = [*too_large(sizes), *repeated(root)]
    for problem in found_problems:
        print(problem, file=sys.stderr)
    if not found_problems:
        most = max(c.lines for c in sizes.classes.values())
        members = max(c.members for c in sizes.classes.values())
        longest = max(lines for _, _, lines in sizes.functions)
        print(
            f"sizes hold: {len(sizes.classes)} classes of at most {members} members and {most} "
            f"lines, {len(sizes.functions)} functions of at most {longest} lines, no repetition"
        )
    return 1 if found_problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
