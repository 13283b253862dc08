"""Tests that are one function of the ranks each: rows of one test of their file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Body = Callable[..., None]


class OnLayouts:
    """A decorator of functions that check what they do themselves, with the layouts to run on."""

    def __init__(self) -> None:
        self.rows: list[Any] = []  # of (function, layout), for pytest.mark.parametrize

    def __call__(self, *layouts: str) -> Callable[[Body], Body]:
        def add(body: Body) -> Body:
            for layout in layouts:
                name = f"{body.__name__}-{layout}"
                self.rows.append(pytest.param(body, layout, id=name))
            return body

        return add
