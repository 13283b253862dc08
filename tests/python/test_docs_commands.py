"""The commands of the documentation exist: targets, subcommands, options, variables and files.

Each is run by a test or by CI, or its page says what it needs, in a comment "# needs GPUs" behind
the command or on the line above it; above the first command of a block it holds for all of them.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

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
NEEDS = re.compile(r"#.*\bneeds [a-z0-9]", re.IGNORECASE)
# What runs a command: a test of tests/python, with sizes and numbers of ranks of its own, or CI.
RUN_BY = {
    r"\.ci/run|make (demo|format lint)( .*)?": "CI",
    r".*deepspeed --num_gpus 2 examples/train.py .*": (
        "test_demo.py::test_run_writes_losses_curve_and_summary"
    ),
    r"make demo-two-hosts|SMDDP_FABRIC_INTERFACE=lo torchrun .*": (
        "test_demo.py::test_two_hosts_have_the_same_losses"
    ),
    r"torchrun --nproc-per-node 2 examples/ddp.py": "test_examples.py::test_ddp",
    r"torchrun --nnodes 1:2 .* --elastic": (
        "test_restarts.py::test_ranks_restart_over_one_store_in_other_numbers"
    ),
    r"(torchrun|deepspeed|mpirun) .*smddp doctor": "test_doctor_launched.py::test_by_a_launcher",
    r"srun .*smddp doctor": "test_doctor_launched.py::test_by_srun",
    r"((torchrun|deepspeed|mpirun|srun) .*)?smddp bench.*": (
        "test_bench.py::test_local_ranks_measure_all_operations"
    ),
    r"torchrun .*smddp tune .*": "test_tune_gain.py::test_check_runs_real_steps_before_and_after",
    r"python -m hjson.tool .*": (
        "test_ds_configs.py::test_hjson_becomes_json_by_the_command_in_the_readme"
    ),
    r"(build/smddp_simulate|\$SIMULATE) .*": (
        "test_simulator.py::test_two_hosts_take_what_the_model_says"
    ),
}
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


def unmarked(text: str) -> Iterator[str]:
    """The commands of a page whose needs it does not say."""
    for block in BLOCK.findall(text):
        whole, above, first = False, "", True
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("#"):
                above = line
                whole = whole or (first and bool(NEEDS.search(line)))
            elif line.strip():
                first = False
                if not whole and not NEEDS.search(above + line):
                    yield line.split(" #")[0].strip()
                above = ""


def test_commands_are_run_or_their_needs_said() -> None:
    found = {line for page in PAGES for line in unmarked((ROOT / page).read_text())}
    steps = re.findall(r"^step .* make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    # make test builds, and runs the three others.
    by_ci = {*steps, *(["build", "test-cpp", "test-python", "test-quick"] * ("test" in steps))}
    targets = "|".join(sorted(by_ci))
    forms = [re.compile(form) for form in (rf"make ({targets})( .*)?", *RUN_BY)]
    assert [line for line in found if not any(form.fullmatch(line) for form in forms)] == []
    assert [form.pattern for form in forms if not any(map(form.fullmatch, found))] == []
    for test in set(RUN_BY.values()) - {"CI"}:
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / "python" / file).read_text(), test
    page = "```sh\n# needs root\nsmddp a\n```\n```sh\nsmddp b\nsmddp c  # needs EFA\n```\n"
    assert list(unmarked(page)) == ["smddp b"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("make no-such-target", "no target"),
        ("make test NO_SUCH_VARIABLE=1", "reads no"),
        ("srun smddp doctro", "no subcommand"),
        ("smddp tune --ds-confg a.json", "no option"),
        ("python examples/no_such.py", "no file"),
        ("python -m tests.no_such", "no module"),
        ("python benchmarks/collectives.py --no-such 1", "no option"),
    ],
)
def test_a_wrong_command_is_noticed(command: str, said: str) -> None:
    ((words),) = commands(f"```sh\n{command}  # comment\n```")
    assert any(said in sentence for sentence in wrong_with(words, ""))


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
