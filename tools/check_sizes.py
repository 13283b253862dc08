#!/usr/bin/env python3
"""Prove that classes and functions of the core stay readable, and that nothing is written twice.

In ``csrc/`` no class has more than 25 data members or 500 lines with its member functions, and no
function outside a class more than 60 lines. Between two files of ``csrc/`` and
``deepspeed_smddp/`` no six lines of code are the same. It reads the form that clang-format gives
the sources, in which namespaces do not indent. ruff's rules limit the functions of the package.

    tools/check_sizes.py [ROOT]
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_MEMBERS = 25
MOST_CLASS_LINES = 500
MOST_FUNCTION_LINES = 60
REPEATED_LINES = 6

_NAMESPACE = re.compile(r"(inline )?(namespace|extern \"C\")\b")
_CLASS = re.compile(r"^(?:class|struct)\s+(?:\[\[\w+\]\]\s+)?([\w:]+)[^;(]*\{$", re.MULTILINE)
_MEMBER_FUNCTION = re.compile(r"(?<!\w)([A-Z]\w*)(?:<[^>()]*>)?::~?\w+\(")
_MEMBER = re.compile(r"  (?! |static |using |friend |return )[^()]*\b\w+_(\[\w*\])?( = .*|\{.*)?;")
# Lines that say too little to be a repetition: punctuation alone, includes, imports, access labels.
_THIN = re.compile(
    r"[\W_]*$|#\s*include\b|import\s|from\s+\S+\s+import\b|using\s|namespace\b|(public|private|protected):$"
)


@dataclass
class Block:
    """What stands between braces at the left edge of a file, with the lines before them."""

    place: str  # file:line
    head: str
    lines: list[str]


def blocks(path: Path, shown: str) -> Iterator[Block]:
    """The functions and classes of one file that are in no other."""
    head: list[str] = []
    body: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if body:
            body.append(line)
            if line.startswith("}"):
                begun = number - len(body) - len(head) + 2
                yield Block(f"{shown}:{begun}", "\n".join(head), [*head[:-1], *body])
                head, body = [], []
        elif not line or line.startswith(("#", "//", "}")) or line.endswith(";"):
            head = []
        elif not _NAMESPACE.match(line):
            head.append(line)
            if line.endswith("{"):
                body = [line]


def too_large(csrc: Path) -> Iterator[str]:
    """One sentence for each class and function over its limit."""
    classes: dict[tuple[Path, str], Block] = {}
    lines: dict[tuple[Path, str], int] = defaultdict(int)
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in (".h", ".cc", ".cu")):
        for block in blocks(path, path.relative_to(csrc.parent).as_posix()):
            size = len(block.lines)
            if found := _CLASS.search(block.head):
                key = (path.parent, found[1])
                classes[key] = block
                lines[key] += size
                members = sum(bool(_MEMBER.fullmatch(line)) for line in block.lines)
                if members > MOST_MEMBERS:
                    name = f"{block.place}: {found[1]}"
                    yield f"{name} has {members} data members; at most {MOST_MEMBERS}."
                continue
            if function := _MEMBER_FUNCTION.search(block.head):
                lines[path.parent, function[1]] += size
            if size > MOST_FUNCTION_LINES:
                yield f"{block.place}: a function of {size} lines; at most {MOST_FUNCTION_LINES}."
    for key, block in classes.items():
        if lines[key] > MOST_CLASS_LINES:
            yield (
                f"{block.place}: {key[1]} takes {lines[key]} lines with its implementation; "
                f"at most {MOST_CLASS_LINES}."
            )


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
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = [*too_large(root / "csrc"), *repeated(root)]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
