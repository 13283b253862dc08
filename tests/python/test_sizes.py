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
    return [*sizes.too_large(sizes.measure(tmp_path / "csrc")), *sizes.repeated(tmp_path)]


def members(count: int) -> str:
    return "".join(f"  int member_{i}_ = {i};\n" for i in range(count))


def statements(count: int, word: str = "x") -> str:
    return "".join(f"  {word} += {i};\n" for i in range(count))


def test_this_tree_holds(sizes: ModuleType) -> None:
    assert sizes.main([str(ROOT)]) == 0


def test_counts_data_members_only(sizes: ModuleType, tmp_path: Path) -> None:
    text = (
        "class Wide {\n public:\n  int f() const;\n  static constexpr int kLimit = 3;\n"
        "  struct Part {\n" + members(20) + "  };\n  Wide& operator=(const Wide&) = delete;\n"
        "  using Name = int;\n private:\n" + members(24) + "  void (*callback_)(int);\n};\n"
    )
    assert problems(sizes, tmp_path, {"csrc/common/wide.h": text}) == []
    wider = text.replace("  void (*callback_)(int);", "  void (*callback_)(int);\n  int a_, b_;")
    found = problems(sizes, tmp_path, {"csrc/common/wide.h": wider})
    assert found == ["csrc/common/wide.h:1: Wide has 27 data members; at most 25."]


def test_a_class_takes_its_implementation_along(sizes: ModuleType, tmp_path: Path) -> None:
    header = "namespace smddp {\nclass Long {\n  void f();\n  int x_ = 0;\n};\n}\n"
    functions = "".join(
        f"void Long::f{k}() {{\n" + statements(48, f"x{k}") + "}\n" for k in range(8)
    )
    sources = {"csrc/common/long.h": header, "csrc/common/long_more.cc": functions}
    assert problems(sizes, tmp_path, sources) == [
        "csrc/common/long.h:2: Long takes 404 lines with its implementation; at most 400."
    ]
    sources["csrc/common/long_more.cc"] = functions.replace("Long::f7", "other7")
    assert problems(sizes, tmp_path, sources) == []


def test_a_long_function(sizes: ModuleType, tmp_path: Path) -> None:
    body = "int f(int x) {\n" + statements(58) + "}\n"
    assert problems(sizes, tmp_path, {"csrc/common/f.cc": body}) == []
    body = "int f(int x) {\n" + statements(59) + "}\n"
    assert problems(sizes, tmp_path, {"csrc/common/f.cc": body}) == [
        "csrc/common/f.cc:1: f() has 61 lines; at most 60."
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
