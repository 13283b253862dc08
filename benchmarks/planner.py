"""The planner against published training speeds.

    python benchmarks/planner.py          # docs/dev/planner-validation.md and its figure
    python benchmarks/planner.py --fit    # fits the constants again first; needs scipy

The fit takes every third row and writes deepspeed_smddp/planning/constants.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from planning import fitting, validation_chart, validation_page

from deepspeed_smddp.planning import constants

DOCS = Path(__file__).resolve().parent.parent / "docs" / "dev"


def main() -> int:
    """Writes the page; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of page and figure")
    options = parser.parse_args()
    if options.fit:
        try:
            fitted = fitting.fit()
        except ModuleNotFoundError as error:
            print(f"--fit needs {error.name}: pip install {error.name}", file=sys.stderr)
            return 2
        fitting.save(fitted)
        constants.constants.cache_clear()
        constants.values.cache_clear()
    covered, left = fitting.covered()
    options.out.mkdir(parents=True, exist_ok=True)
    page = validation_page.page(covered, left)
    (options.out / "planner-validation.md").write_text(page, encoding="utf-8")
    validation_chart.draw(covered, options.out / "planner-validation.svg")
    print("\n".join(page.split("\n")[14:20]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
