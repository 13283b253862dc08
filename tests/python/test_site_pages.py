"""The reference of the public Python names is complete, and says what each takes and returns."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import site_pages

pytestmark = pytest.mark.quick


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
