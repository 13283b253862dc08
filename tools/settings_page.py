"""Writes docs/settings.md, the reference of all settings, from their model.

The page is committed, so that it can be read without building the site; a test compares it with the
model.
"""

from __future__ import annotations

import html
from pathlib import Path

from deepspeed_smddp.config.fields import Setting, settings_of
from deepspeed_smddp.config.schema import DebugSettings, ProcessSettings, SmddpConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

_START = """# Settings

<!-- written by `make docs/settings.md` -->

Of each setting the environment has precedence over the section, the section over the default.
`smddp doctor` shows what applies, and why. A wrong key or value is refused in one sentence.

## The section `"smddp"` of a DeepSpeed config

Every key is optional: `"smddp": {"timeout_seconds": 60}`. A dotted key is one of a section within
it. Programs without a DeepSpeed config give the same keys to `deepspeed_smddp.configure()`. The
engines of a process share its settings: a key of one section counts for all, and two sections may
not hold different values, but for what says how one engine is built
(`sharded_data_parallel_degree`, `tensor_parallel_*`, `activation_offload.*`), and bucket sizes, of
which the smallest applies. DeepSpeed's own
`zero_optimization.allgather_bucket_size` (in elements), which ZeRO-3 otherwise ignores, also bounds
AllGather; the smaller of the two bounds applies ([zero3.md](zero3.md)).
"""
_VARIABLES = """
## Environment variables without a key

DeepSpeed's launchers for several hosts forward only some variables: put `SMDDP_*` and `FI_*` into
`.deepspeed_env`. [launchers.md](launchers.md) has what the others forward.
"""
_DEBUG = """
## For developers: `SMDDP_DEBUG`

`SMDDP_DEBUG=key=value,key=value` compares ways that are otherwise measured or chosen, and serves
tests. No job needs it.

| key | default | meaning |
|---|---|---|
"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page, in Markdown."""
    text = _START + "".join(map(_entry, settings_of(SmddpConfig)))
    text += _VARIABLES + "".join(map(_entry, settings_of(ProcessSettings))) + _DEBUG
    for one in settings_of(DebugSettings):
        text += f"| `{one.path}` | {_default(one) or 'empty'} | {one.field.meaning} |\n"
    return text


def _entry(one: Setting) -> str:
    about = one.field
    facts = [f"Default: `{_default(one)}`" if _default(one) else "Default: empty"]
    facts.append(f"May hold: {html.escape(about.may_hold(), quote=False)}")
    if one.variable:
        facts.append(f"Environment: `{one.variable}`")
    facts += [f"When to change it: {about.when}", f"Since {about.since}"]
    name = one.path if one.model is SmddpConfig else one.variable
    heading = f"\n### `{name}`\n\n{about.meaning[0].upper()}{about.meaning[1:]}.\n\n"
    return heading + "".join(f"- {fact}\n" for fact in facts)


def _default(one: Setting) -> str:
    value = one.field.default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):  # the steps of a route: bound and path
        return ", ".join(path for _, path in value)
    return str(value).removesuffix(".0")


if __name__ == "__main__":
    main()
