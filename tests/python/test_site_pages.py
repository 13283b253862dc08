"""What `make docs` builds the site from: links of the site, the references from the code."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from deepspeed_smddp.config.variables import VARIABLES

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import settings_page
import site_pages

pytestmark = pytest.mark.quick
SHOWN = {"README.md", "docs/gpu.md", "benchmarks/RESULTS.md", "benchmarks/results/a/README.md"}


@pytest.mark.parametrize(
    ("page", "text", "turned"),
    [
        ("README.md", "[a](docs/gpu.md#b)", "[a](gpu.md#b)"),
        ("docs/gpu.md", "[a](../README.md#b) [c](#d)", "[a](index.md#b) [c](#d)"),
        ("docs/gpu.md", "[`a`](../benchmarks/RESULTS.md)", "[`a`](benchmarks/RESULTS.md)"),
        ("benchmarks/RESULTS.md", "[a](../docs/gpu.md)", "[a](../gpu.md)"),
        ("docs/gpu.md", "see [the file](../Makefile)", "see the file"),
        ("docs/gpu.md", "[a](no-such-page.md)", "[a](no-such-page.md)"),
        (
            "docs/gpu.md",
            "[a](https://example.org/docs/gpu.md)",
            "[a](https://example.org/docs/gpu.md)",
        ),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, text: str, turned: str) -> None:
    assert site_pages.turn_links(text, page, SHOWN) == turned


def test_every_setting_is_in_the_reference() -> None:
    page = settings_page.page()
    for variable in VARIABLES:
        assert f"`{variable.environment_name}`" in page
        if variable.key is not None:
            assert f"### `{variable.key}`" in page


def test_the_reference_of_settings_is_that_of_the_code() -> None:
    text = settings_page.PAGE.read_text(encoding="utf-8")
    assert text == settings_page.page(), "run make docs/settings.md"


def test_every_public_name_is_in_the_reference() -> None:
    import deepspeed_smddp

    shown = {name for _, _, names in site_pages.PYTHON for name in names}
    for name in deepspeed_smddp.__all__:
        if name.startswith("_"):
            continue
        public = getattr(deepspeed_smddp, name)
        if isinstance(public, types.ModuleType):
            assert {f"{name}.{member}" for member in public.__all__} <= shown
        else:
            assert {name, f"{public.__module__.split('.')[1]}.{name}"} & shown


def public_functions() -> list[Any]:
    """What the reference shows, but for names of the stub of the compiled module."""
    found = []
    for _, _, names in site_pages.PYTHON:
        for name in names:
            module, _, member = f"deepspeed_smddp.{name}".rpartition(".")
            if not module.endswith("._C"):
                found.append(getattr(importlib.import_module(module), member))
    return found


def test_every_public_function_says_what_it_takes_and_returns() -> None:
    for public in public_functions():
        text = inspect.getdoc(public) or ""
        assert text.partition("\n")[0].endswith((".", ":", ";")) or len(text) > 80, public
        if not inspect.isfunction(public):
            continue
        signature = inspect.signature(public)
        undescribed = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
            and f"{name}:" not in text
            and f"``{name}``" not in text
            and len(signature.parameters) > 1
        ]
        assert not undescribed, (public.__qualname__, undescribed)
        raised = set(re.findall(r"raise (\w+Error)\(", inspect.getsource(public)))
        assert all(f"{error}:" in text for error in raised), (public.__qualname__, raised)


def test_every_command_is_in_the_reference() -> None:
    page = "\n".join(site_pages.commands_page())
    for text in ("## `smddp doctor`", "`--measure`, `--no-measure`", "`--png`", "| `DUMPS` |"):
        assert text in page, text
    assert "| required |" in page and "None" not in page
