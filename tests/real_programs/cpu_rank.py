"""The script that a launcher starts as each rank, in place of the program's own.

It makes the stand-ins of ``REAL_STAND_INS``, counts the first half of the ranks as one host and
the second half as another, has the counters written to ``REAL_LEDGER``, and runs the program
``REAL_PROGRAM`` unchanged.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# Beside this file; GPT-NeoX has "tests", too.
import stand_ins  # type: ignore[import-not-found]


def main() -> None:
    program = Path(os.environ["REAL_PROGRAM"])
    ranks, hosts = int(os.environ["LOCAL_SIZE"]), int(os.environ["REAL_HOSTS"])
    os.environ["SMDDP_HOST_ID"] = f"host{int(os.environ['LOCAL_RANK']) * hosts // ranks}"
    sys.path[0] = str(program.parent)  # as if the program had been started
    stand_ins.OF[os.environ["REAL_STAND_INS"]]()
    import deepspeed_smddp  # after the stand-ins

    deepspeed_smddp.configure(ledger={"json_file": os.environ["REAL_LEDGER"]})
    sys.argv[0] = str(program)
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
