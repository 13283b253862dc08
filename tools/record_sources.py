#!/usr/bin/env python3
"""Write upstream/known_sources.json: digests of the functions that features rest on.

tools/record_sources.py TREE...     TREE: a folder deepspeed-X.Y.Z or torch-X.Y.Z that holds the
                                    package of that release (an unpacked sdist or wheel)

A digest says that a function was read: read the new ones (``--new`` shows them) before you extend
``read`` in upstream/versions.py. Releases that are recorded and not given are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deepspeed_smddp.upstream import source, versions  # noqa: E402

LIBRARIES = {"deepspeed": "DeepSpeed", "torch": "torch"}
FILE = ROOT / "deepspeed_smddp/upstream/known_sources.json"


def places(library: str) -> dict[str, str]:
    """The functions that features rest on, of one library, and the oldest release to read."""
    found: dict[str, str] = {}
    for support in versions.SUPPORT.values():
        if support.library == library and support.read:
            oldest = support.read[0]
            for place in support.places:
                found[place] = min(oldest, found.get(place, oldest), key=versions.order)
    return found


def digest_in(tree: Path, place: str) -> str:
    """The digest of a function in an unpacked package."""
    module, _, name = place.partition(":")
    file = source.file_in(tree, module)
    try:
        return source.digest_in(file, name) if file else source.MISSING
    except LookupError:
        return source.MISSING


def by_release(recorded: dict[str, Any], place: str, library: str) -> dict[str, str]:
    """Release -> digest, from the recorded ranges."""
    found = {}
    for digest, first, last in recorded["digests"].get(place, ()):
        for release in recorded["releases"][library]:
            if versions.order(first) <= versions.order(release) <= versions.order(last):
                found[release] = digest
    return found


def ranges(digests: dict[str, str]) -> list[list[str]]:
    """[digest, first release, last release] for each run of equal digests."""
    rows: list[list[str]] = []
    for release in sorted(digests, key=versions.order):
        if rows and rows[-1][0] == digests[release]:
            rows[-1][2] = release
        else:
            rows.append([digests[release], release, release])
    return rows


def record(recorded: dict[str, Any], trees: list[Path]) -> list[str]:
    """Adds the releases of ``trees``; returns a line for each digest that was not recorded."""
    news = []
    for name, library in LIBRARIES.items():
        given = {t.name.partition("-")[2]: t for t in trees if t.name.partition("-")[0] == name}
        before = recorded["releases"].get(library, [])
        for place, oldest in places(library).items():
            since = versions.order(oldest)
            recorded_before = by_release(recorded, place, library)
            digests = {r: d for r, d in recorded_before.items() if versions.order(r) >= since}
            for release in sorted(given, key=versions.order):
                if versions.order(release) < since:
                    continue
                digest = digest_in(given[release], place)
                if digest not in digests.values():
                    news.append(f"{release}  {digest}  {place}")
                digests[release] = digest
            recorded["digests"][place] = ranges(digests)
        recorded["releases"][library] = sorted({*before, *given}, key=versions.order)
    return news


def as_text(recorded: dict[str, Any]) -> str:
    """JSON with one line per range."""
    lines = ["{", ' "releases": {']
    lines.append(
        ",\n".join(f'  "{name}": {json.dumps(of)}' for name, of in recorded["releases"].items())
    )
    lines += [" },", ' "digests": {']
    lines.append(
        ",\n".join(
            f'  "{place}": [\n' + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
            for place, rows in sorted(recorded["digests"].items())
        )
    )
    return "\n".join([*lines, " }", "}", ""])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", nargs="+", type=Path, metavar="TREE")
    parser.add_argument("--new", action="store_true", help="only show digests that are new")
    given = parser.parse_args()
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    news = record(recorded, [tree.resolve() for tree in given.trees])
    print("\n".join(news) or "no new digests")
    if not given.new:
        FILE.write_text(as_text(recorded), encoding="utf-8")


if __name__ == "__main__":
    main()
