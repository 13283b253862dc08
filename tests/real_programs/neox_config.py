"""Prints the DeepSpeed config that GPT-NeoX makes of a YAML: `neox_config.py FILE RANKS`.

Runs in a copy of GPT-NeoX, as a script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[0] = str(Path.cwd())

from megatron.neox_arguments import NeoXArgs  # type: ignore[import-not-found]  # noqa: E402

found = NeoXArgs.from_ymls([sys.argv[1]], {"global_num_gpus": int(sys.argv[2])})
print(json.dumps(found.deepspeed_config))
