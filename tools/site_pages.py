"""Writes the pages of the documentation site into a folder: `make docs` builds the site from it.

The README is the first page; the pages of docs/ are at the root of the site; other Markdown pages
of the repository keep their place. The references of the Python interface and of the commands are
written from the code. Links are turned from paths of the repository into paths of the site, and one
that leads to no page of the site becomes plain text. A link to a file that does not exist stays, so
that the build of the site fails.
"""

from __future__ import annotations

import html
import inspect
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
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/**/*.png",
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
    menu = (ROOT / "mkdocs.yml").read_text()
    lost = [name for name in shown if name.startswith("docs/") and name.endswith(".md")]
    lost = [name for name in lost if f" {site_path(name)}\n" not in menu]
    if lost:
        raise SystemExit(f"mkdocs.yml has no place in its menu for {', '.join(lost)}")
    (folder / "python.md").write_text("\n".join(python_page()))
    (folder / "commands.md").write_text("\n".join(commands_page()))


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


# The public Python interface: heading, what is said under it, names in deepspeed_smddp.
PYTHON: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Settings",
        "For programs without a DeepSpeed config; [Settings](settings.md) has the keys.",
        ("configure", "SmddpConfig", "SmddpConfigError"),
    ),
    (
        "Counters",
        "What a process has sent and received, and for whom it waited; "
        "[Counters](ledger.md) has the same as files.",
        (
            "statistics",
            "_C.StatisticsRow",
            "fallback_ledger",
            "reset_statistics",
            "peer_statistics",
        ),
    ),
    (
        "Collectives",
        "What torch has for groups over Gloo alone.",
        ("monitored_barrier",),
    ),
    (
        "Models larger than memory",
        "[Fitting a larger model](larger-models.md): delayed initialisation, activation offload, "
        "tensor parallelism.",
        (
            "models.delayed_init.delayed_init",
            "models.delayed_init.materialize",
            "models.delayed_init.is_delayed",
            "models.offload.offload_activations",
            "models.offload.Offload",
            "models.offload.Statistics",
            "tensor_parallel.tensor_parallel",
            "tensor_parallel.clip_grad_norm_",
        ),
    ),
    ("FSDP2", "[FSDP2, FSDP1 and DDP](fsdp.md).", ("fsdp.enable", "fsdp.mesh")),
    (
        "Shared memory",
        "[Shared memory of a host](memory.md).",
        (
            "distributed.memory.shared_empty",
            "distributed.memory.share_",
            "distributed.memory.is_shared",
            "distributed.memory.statistics",
            "_C.MemoryStatistics",
            "distributed.memory.trim",
            "distributed.memory.install",
        ),
    ),
    (
        "Launchers",
        "[Launchers and clusters](launchers.md).",
        (
            "distributed.launchers.apply",
            "distributed.launchers.variables",
            "distributed.launchers.LauncherError",
        ),
    ),
)


def python_page() -> Iterator[str]:
    """The reference of the public Python interface, for mkdocstrings."""
    yield "# Python"
    yield ""
    yield "The public interface of the package. The backend alone needs no import: torch finds an"
    yield "installed package by itself."
    for heading, text, names in PYTHON:
        yield from ("", f"## {heading}", "", text)
        for name in names:
            yield from ("", f"::: deepspeed_smddp.{name}")
    yield ""


def commands_page() -> Iterator[str]:
    """The reference of the command ``smddp``, from its own help."""
    import typer

    from deepspeed_smddp.commands.main import app

    group: Any = typer.main.get_command(app)
    yield "# Commands"
    yield ""
    yield "What `smddp --help` and the help of each command say."
    for name, command in sorted(group.commands.items()):
        yield from ("", f"## `smddp {name}`", "")
        yield from html.escape(inspect.cleandoc(command.help), quote=False).splitlines()
        yield from ("", "| argument or option | meaning | default |", "|---|---|---|")
        for parameter in command.params:
            yield "| " + " | ".join(_parameter(parameter)) + " |"
    yield ""


def _parameter(parameter: Any) -> tuple[str, str, str]:
    """A parameter's names, its help and its default, for a table."""
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    else:
        names = ", ".join(f"`{n}`" for n in (*parameter.opts, *parameter.secondary_opts))
    meaning = html.escape(parameter.help or "", quote=False).replace("|", "\\|")
    default = parameter.default
    if parameter.required:
        shown = "required"
    elif isinstance(default, bool):
        shown = "on" if default else "off"
    elif default in (None, "", ()):
        shown = ""
    else:
        shown = f"`{default}`"
    return names, meaning, shown


if __name__ == "__main__":
    main()
