#!/usr/bin/env python3
"""Find scratch files among the files that git tracks or that are staged: debug output, left-overs
of a merge, core dumps, build products, large files.

    tools/check_scratch.py [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# All files that the root may hold. Add a new one here, or better: put it into a directory.
ROOT_FILES = {
    ".clang-format",
    ".clang-tidy",
    ".editorconfig",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CMakeLists.txt",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "mkdocs.yml",
    "pyproject.toml",
    "smddp_autoload.py",
    "smdistributed.py",
}
SCRATCH = re.compile(
    r".*\.(orig|rej|bak|sw[a-p]|tmp|log|pid|core|pyc|pyo|o|a|so|whl|btr|prof|gc(da|no))|.*~"
    r"|core(\.\d+)?|vgcore\..*|nohup\.out|a\.out|strace\..*|perf\.data(\.old)?|\.DS_Store",
)
RESULTS = "benchmarks/results/"  # raw data and figures of measurements
LARGEST = 256 * 1024  # bytes
LARGEST_RESULT = 4 * 1024 * 1024


def problems(root: Path, names: list[str]) -> Iterator[str]:
    """One sentence for each scratch file among ``names``, paths relative to ``root``."""
    for name in names:
        path = root / name
        if path.is_symlink() or not path.is_file():
            continue  # deleted in the work tree, or a submodule
        base = PurePosixPath(name)
        if len(base.parts) == 1 and name not in ROOT_FILES:
            yield f"{name}: not in the list of root files (ROOT_FILES in tools/check_scratch.py)."
        elif SCRATCH.fullmatch(base.name):
            yield f"{name}: the name of a scratch file or a build product."
        elif "." not in base.name and len(base.parts) > 1 and not _is_script(path):
            yield f"{name}: a file without a suffix that is no script (no #! line)."
        size = path.stat().st_size
        limit = LARGEST_RESULT if name.startswith(RESULTS) else LARGEST
        if size > limit:
            yield f"{name}: {size:,} bytes, more than the {limit:,} that are allowed here."


def tracked(root: Path) -> list[str]:
    """The files that git tracks below ``root``, staged ones included."""
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        sys.exit(f"check_scratch.py needs git and a git checkout: {listing.stderr.strip()}")
    return sorted({name for name in listing.stdout.split("\0") if name})


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def main() -> int:
    """Print every scratch file; the exit status is 1 if there is one."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = list(problems(root, tracked(root)))
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
