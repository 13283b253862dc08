"""tools/check_scratch.py finds committed scratch files, and accepts the files of this tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_scratch.py"

CLEAN = {
    "LICENSE": "Apache\n",
    ".gitignore": "/build/\n",
    "csrc/common/status.h": "#pragma once\n",
    "tools/install_system_packages": "#!/usr/bin/env bash\n",
    "docs/log.md": "a page about logs\n",
    "benchmarks/results/2026-11-22-host.csv": "1,2\n" * 100_000,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def check(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for command in (["init", "--quiet"], ["add", "--force", "--all"]):
        subprocess.run(["git", "-C", str(root), *command], check=True, timeout=30)
    return run(str(root))


def test_this_tree_has_no_scratch_files() -> None:
    inside = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--is-inside-work-tree"], capture_output=True
    )
    if inside.returncode:
        pytest.skip(f"{ROOT} is not a git checkout")
    result = run()
    assert result.returncode == 0, result.stderr


def test_clean_tree(tmp_path: Path) -> None:
    result = check(tmp_path, CLEAN)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("s1", "15441 15441 2910\n", "s1: not in the list of root files"),
        ("notes.md", "to do\n", "notes.md: not in the list of root files"),
        ("csrc/common/s2", "15441\n", "csrc/common/s2: a file without a suffix"),
        ("csrc/common/status.h.orig", "x\n", "status.h.orig: the name of a scratch file"),
        ("csrc/common/status.h.rej", "x\n", "status.h.rej: the name of a scratch file"),
        ("tests/python/test_x.py~", "x\n", "test_x.py~: the name of a scratch file"),
        ("tests/core.4711", "x\n", "tests/core.4711: the name of a scratch file"),
        ("benchmarks/results/run.log", "x\n", "run.log: the name of a scratch file"),
        ("docs/large.csv", "1,2\n" * 100_000, "docs/large.csv: 400,000 bytes, more than"),
        ("benchmarks/results/a.csv", "1,2,3,4\n" * 600_000, "a.csv: 4,800,000 bytes, more than"),
    ],
    ids=lambda value: value[:20].strip(),  # the environment holds the name of the running test
)
def test_scratch_file_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    result = check(tmp_path, {**CLEAN, name: text})
    assert result.returncode == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_staged_files_count_and_deleted_files_do_not(tmp_path: Path) -> None:
    assert check(tmp_path, {**CLEAN, "s1": "x\n"}).returncode == 1
    (tmp_path / "s1").unlink()
    result = run(str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_a_directory_without_git_is_refused(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.returncode == 1
    assert "needs git and a git checkout" in result.stderr
