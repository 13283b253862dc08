"""tools/check_sizes.py finds classes and functions over their limits, and repeated lines."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from harness import modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    return modules.load("tools/check_sizes.py")


def problems(sizes: ModuleType, tmp_path: Path, sources: dict[str, str]) -> list[str]:
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "deepspeed_smddp").mkdir(exist_ok=True)
    return [*sizes.too_large(tmp_path / "csrc"), *sizes.repeated(tmp_path)]


def statements(count: int, word: str = "x") -> str:
    return "".join(f"  {word} += {i};\n" for i in range(count))


def test_large_classes_and_functions(sizes: ModuleType, tmp_path: Path) -> None:
    members = "".join(f"  int member_{i}_ = {i};\n" for i in range(25))
    header = f"namespace smddp {{\nclass Long {{\n  void f();\n{members}}};\n}}\n"
    functions = "".join(
        f"void Long::f{k}() {{\n" + statements(58, f"x{k}") + "}\n\n" for k in range(7)
    )
    sources = {"csrc/common/long.h": header, "csrc/common/long_more.cc": functions}
    assert problems(sizes, tmp_path, sources) == []
    sources["csrc/common/long.h"] = header.replace("  void f();", "  void f();\n  int one_more_;")
    sources["csrc/common/long_more.cc"] = functions + functions.replace("  x6", "  y;\n  x6", 1)
    assert problems(sizes, tmp_path, sources) == [
        "csrc/common/long.h:2: Long has 26 data members; at most 25.",
        "csrc/common/long_more.cc:794: a function of 61 lines; at most 60.",
        "csrc/common/long.h:2: Long takes 870 lines with its implementation; at most 500.",
    ]


def test_six_lines_in_two_files(sizes: ModuleType, tmp_path: Path) -> None:
    five = statements(5)
    sources = {
        "csrc/common/a.cc": "int a(int x) {\n" + statements(6) + "  return 1;\n}\n",
        "csrc/fabric/b.cc": "int b(int x) {\n  x = 7;\n" + five + "  return 2;\n}\n",
    }
    assert problems(sizes, tmp_path, sources) == []
    sources["csrc/fabric/b.cc"] = (
        "int b(int x) {\n" + five + "\n  // A comment between.\n  x +=  5;\n  return 2;\n}\n"
    )
    assert problems(sizes, tmp_path, sources) == [
        "csrc/common/a.cc:2: 6 lines or more stand again at csrc/fabric/b.cc:2."
    ]
