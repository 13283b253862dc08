"""Writes the pages of the documentation site into a folder: `make docs` builds the site from it.

The README is the first page; the pages of docs/ are at the root of the site; other Markdown pages
of the repository keep their place. The reference is written from the code. Links are turned from
paths of the repository into paths of the site, and one that leads to no page of the site becomes
plain text. A link to a file that does not exist stays, so that the build of the site fails.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What the site shows, as patterns of paths in the repository.
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/*.svg",
    "docs/*.png",
    "benchmarks/*.md",
    "benchmarks/results/**/*.md",
    "benchmarks/results/**/*.png",
)
# The target of a Markdown link or image, and its anchor.
LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\((?!https?:)([^)\s#]*)(#[^)\s]*)?\)")


def main() -> None:
    """Writes the pages into the folder that is the only argument."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    shown = {path.relative_to(ROOT).as_posix() for pattern in SHOWN for path in ROOT.glob(pattern)}
    for name in sorted(shown):
        page = folder / site_path(name)
        page.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            page.write_text(turn_links((ROOT / name).read_text(), name, shown))
        else:
            shutil.copyfile(ROOT / name, page)
    (folder / "settings.md").write_text("\n".join(settings_page()))
    (folder / "python.md").write_text("\n".join(python_page()))


def site_path(name: str) -> str:
    """Where the site has a file of the repository."""
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def turn_links(markdown: str, name: str, shown: set[str]) -> str:
    """The text of the page ``name`` with links as the site needs them."""
    start = posixpath.dirname(site_path(name))

    def turned(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if not target or not (ROOT / wanted).exists():
            return match[0]
        if wanted not in shown:
            return text.removeprefix("!")[1:-1]
        return f"{text}({posixpath.relpath(site_path(wanted), start)}{anchor})"

    return LINK.sub(turned, markdown)


def python_page() -> Iterator[str]:
    """The reference of the public Python interface, for mkdocstrings."""
    import deepspeed_smddp

    modules = ("fsdp", "memory")
    members = [n for n in deepspeed_smddp.__all__ if n not in modules and not n.startswith("_")]
    yield "# Python"
    yield ""
    yield "The public interface of the package. The backend alone needs no import: torch finds an"
    yield "installed package by itself."
    for name in (*members, *modules):
        yield ""
        yield f"::: deepspeed_smddp.{name}"
    yield ""


def settings_page() -> Iterator[str]:
    """The reference of the section's keys and of the environment variables, from the code."""
    from deepspeed_smddp.config import VARIABLES
    from deepspeed_smddp.sections import SmddpConfig

    variables = {variable.key: variable for variable in VARIABLES if variable.key}
    yield "# Settings"
    yield ""
    yield "Of each setting the environment has precedence over the section, the section over the"
    yield "default. `smddp doctor` shows what applies, and why."
    yield ""
    yield '## The section `"smddp"` of a DeepSpeed config'
    for key, default, holds in keys_of(SmddpConfig):
        variable = variables[key]
        yield from setting(key, variable.meaning, default)
        yield f"- May hold: {html.escape(holds, quote=False)}"
        yield f"- Environment: `{variable.environment_name}`"
    yield ""
    yield "## Environment variables without a key"
    for variable in VARIABLES:
        if variable.key is None:
            yield from setting(variable.environment_name, variable.meaning, variable.default)
    yield ""


def setting(name: str, meaning: str, default: Any) -> Iterator[str]:
    """The heading of a setting, what it means and its default."""
    text = str(default).lower() if isinstance(default, bool) else f"{default}".removesuffix(".0")
    yield ""
    yield f"### `{name}`"
    yield ""
    yield meaning[0].upper() + meaning[1:] + "."
    yield ""
    yield f"- Default: `{text}`" if text else "- Default: empty"


def keys_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Key, default and what it may hold, of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        if isinstance(field.default_factory, type):
            yield from keys_of(field.default_factory, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.default, field.description or ""


if __name__ == "__main__":
    main()
