"""What `make docs` builds the site from: links of the site, the reference from the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from deepspeed_smddp.config import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site_pages.py")
assert _spec is not None and _spec.loader is not None
site_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site_pages)

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
    page = "\n".join(site_pages.settings_page())
    for variable in VARIABLES:
        assert variable.environment_name in page
        if variable.key is not None:
            assert f"### `{variable.key}`" in page


def test_every_public_name_is_in_the_reference() -> None:
    import deepspeed_smddp

    page = "\n".join(site_pages.python_page())
    for name in deepspeed_smddp.__all__:
        assert name.startswith("_") or f"::: deepspeed_smddp.{name}" in page
