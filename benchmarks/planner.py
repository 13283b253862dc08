"""The planner against published training speeds, with every publisher left out in turn.

    python benchmarks/planner.py          # docs/dev/planner-validation.md, in about half a minute

Says what ``reached`` and ``INTERVAL`` of deepspeed_smddp/planning/constants.py are by these rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from planning import fitting, validation_page

from deepspeed_smddp.planning import constants

PAGE = Path(__file__).resolve().parent.parent / "docs" / "dev" / "planner-validation.md"


def fitted() -> dict[str, float]:
    """``reached`` and the interval, by the rows."""
    errors = fitting.Errors.at(fitting.covered()[0])
    reached = fitting.GRID[errors.fit(list(errors.of))]
    return {"reached": round(reached, 2), "INTERVAL": errors.interval()}


def main() -> int:
    """Writes the page; the exit status."""
    found = fitted()
    known = {"reached": constants.values()["reached"], "INTERVAL": constants.INTERVAL}
    if found != known:
        print(f"constants.py has {known}; the rows give {found}: change it", file=sys.stderr)
        return 1
    PAGE.write_text(validation_page.page(*fitting.covered()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
