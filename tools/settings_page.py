"""Writes docs/settings.md, the reference of all settings, from the tables in the code.

The page is committed, so that it can be read without building the site; a test compares it with the
code.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_smddp.config.keys import Section
from deepspeed_smddp.config.sections import SmddpConfig
from deepspeed_smddp.config.variables import VARIABLES, Variable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

_START = """# Settings

<!-- written by `make docs/settings.md` -->

Of each setting the environment has precedence over the section, the section over the default.
`smddp doctor` shows what applies, and why. A wrong key or value is refused in one sentence.

## The section `"smddp"` of a DeepSpeed config

Every key is optional: `"smddp": {"timeout_seconds": 60}`. A dotted key is one of a section within
it. DeepSpeed's own `zero_optimization.allgather_bucket_size` (in elements), which ZeRO-3 otherwise
ignores, also bounds AllGather; the smaller of the two bounds applies ([zero3.md](zero3.md)).
"""
_VARIABLES = """
## Environment variables without a key

DeepSpeed's launchers for several hosts forward only some variables: put `SMDDP_*` and `FI_*` into
`.deepspeed_env`. [launchers.md](launchers.md) has what the others forward.
"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page, in Markdown."""
    variables = {variable.key: variable for variable in VARIABLES if variable.key}
    text = _START
    for key, default, holds in keys_of(SmddpConfig):
        variable = variables[key]
        text += _entry(
            key,
            variable,
            _default(default),
            [
                f"May hold: {html.escape(holds, quote=False)}",
                f"Environment: `{variable.environment_name}`",
            ],
        )
    text += _VARIABLES
    for variable in VARIABLES:
        if variable.key is None:
            text += _entry(variable.environment_name, variable, variable.default, [])
    return text


def keys_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Key, default and what it may hold, of a section and of the sections in it."""
    for name, key in section.keys.items():
        if isinstance(key.default, Section):
            yield from keys_of(key.default, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", key.default, key.description


def _entry(name: str, variable: Variable, default: str, further: list[str]) -> str:
    facts = [f"Default: `{default}`" if default else "Default: empty", *further]
    facts += [f"When to change it: {variable.when}", f"Since {variable.since}"]
    sentence = variable.meaning[0].upper() + variable.meaning[1:]
    return f"\n### `{name}`\n\n{sentence}.\n\n" + "".join(f"- {fact}\n" for fact in facts)


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):  # the steps of a route: bound and path
        return ", ".join(path for _, path in value)
    return str(value).removesuffix(".0")


if __name__ == "__main__":
    main()
