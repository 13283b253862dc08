"""What the documentation names exists: commands with their options and files, public names."""

from __future__ import annotations

import importlib.util
import re
import shlex
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

import site_pages
from deepspeed_smddp.commands.main import app
from deepspeed_smddp.config.schema import VARIABLES

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "ds_configs/README.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]
SETTINGS = {*VARIABLES, "SMDDP_DEBUG"}
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
OURS = ("benchmarks/", "docker/", "docs/", "ds_configs/", "examples/", "requirements/", "tools/")
# The folder that a page's commands run in, if it is another than the repository.
FOLDERS = {"ds_configs/README.md": "ds_configs"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command in the blocks of a page, without comments."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            start = 0
            for end in (*(i for i, word in enumerate(words) if word in ("&&", "|")), len(words)):
                if words[start:end]:
                    yield words[start:end]
                start = end + 1


@cache
def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def wrong_with_make(words: list[str]) -> Iterator[str]:
    targets = set(re.findall(r"^([\w/.-]+)(?: [\w/.-]+)*:(?!=)", makefile(), re.MULTILINE))
    for word in words:
        name, is_variable, _ = word.partition("=")
        if name in SETTINGS:
            continue  # make passes it on in the environment
        if is_variable and not re.search(rf"\$\(?{name}\b|^{name} *[?:]?=", makefile(), re.M):
            yield f"the Makefile reads no {name}"
        elif not is_variable and not word.startswith("-") and word not in targets:
            yield f"no target {word}"


def wrong_with_smddp(words: list[str]) -> Iterator[str]:
    group = typer.main.get_command(app)
    known = getattr(group, "commands", {})
    if words[0] not in known:
        yield f"no subcommand {words[0]}"
        return
    options = {name for p in known[words[0]].params for name in (*p.opts, *p.secondary_opts)}
    for word in words[1:]:
        if words[0] == "exec" and not word.startswith("-"):
            return  # the program's own
        if word.startswith("-") and word.split("=")[0] not in options | {"--help"}:
            yield f"smddp {words[0]} has no option {word}"


def wrong_with_script(script: str, words: list[str]) -> Iterator[str]:
    sources = "".join(path.read_text() for path in (ROOT / script).parent.rglob("*.py"))
    for word in words:
        if word.startswith("--") and word != "--help":
            name = word.split("=")[0][2:]
            if f'"--{name}"' not in sources and not re.search(
                rf"\b{name.replace('-', '_')}\b", sources
            ):
                yield f"{script} has no option --{name}"


def wrong_with(words: list[str], folder: str) -> Iterator[str]:
    """What in a command does not exist, as sentences."""
    while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
        words = words[1:]  # a variable of this command
    if words[:1] == ["make"] and "-C" not in words:
        yield from wrong_with_make(words[1:])
    if "smddp" in words:
        yield from wrong_with_smddp(words[words.index("smddp") + 1 :])
    for word, following in zip(words, [*words[1:], ""], strict=True):
        is_path = word.startswith(OURS) and "$" not in word
        if is_path and not list(ROOT.glob(word.rstrip("/"))):
            yield f"no file {word}"
        is_module = word == "-m" and following.split(".")[0] in ("tests", "deepspeed_smddp")
        if is_module and importlib.util.find_spec(following) is None:
            yield f"no module {following}"
        if is_path and word.endswith(".py") and word.startswith("benchmarks/"):
            yield from wrong_with_script(word, words[words.index(word) + 1 :])
        is_config = folder and re.fullmatch(r"[\w.-]+\.(hjson|yml)", word)
        if is_config and not (ROOT / folder / word).exists():
            yield f"no file {folder}/{word}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    wrong = [
        f"{' '.join(words)}: {sentence}"
        for words in commands((ROOT / page).read_text())
        for sentence in wrong_with(words, FOLDERS.get(page, ""))
    ]
    assert not wrong, "\n".join(wrong)


def test_messages_of_the_troubleshooting_page_are_in_the_sources() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", page[page.index("## By error message") :], re.MULTILINE)
    assert len(rows) > 10
    sources = "".join(
        path.read_text()
        for folder in ("csrc", "deepspeed_smddp")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cc", ".h", ".py")
    )
    literals = re.sub(r'"\s*f?"', "", sources)  # adjacent parts are one text
    assert [row for row in rows if row not in literals] == []


def test_every_public_name_is_in_the_reference() -> None:
    import deepspeed_smddp

    shown = {name for _, _, names in site_pages.PYTHON for name in names}
    for name in deepspeed_smddp.__all__:
        if name.startswith("_"):
            continue
        public = getattr(deepspeed_smddp, name)
        if isinstance(public, types.ModuleType):
            module = public.__name__.removeprefix("deepspeed_smddp.")
            assert {f"{module}.{member}" for member in public.__all__} <= shown
        else:
            assert any(f".{known}".endswith(f".{name}") for known in shown), name
