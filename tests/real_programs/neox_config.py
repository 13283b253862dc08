"""Prints the DeepSpeed config that GPT-NeoX makes of a YAML, and what DeepSpeed makes of that.

`neox_config.py FILE RANKS`; runs in a copy of GPT-NeoX, as a script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accepted  # type: ignore[import-not-found]  # beside this file; GPT-NeoX has "tests", too

sys.path[0] = str(Path.cwd())

from megatron.neox_arguments import NeoXArgs  # type: ignore[import-not-found]  # noqa: E402

file, ranks = sys.argv[1], int(sys.argv[2])
passed = NeoXArgs.from_ymls([file], {"global_num_gpus": ranks}).deepspeed_config
print(json.dumps({"passed": passed, "accepted": accepted.by_deepspeed(passed, ranks)}))
