"""Prints the DeepSpeed configs that Megatron-DeepSpeed makes of JSON files, and DeepSpeed's view.

`megatron_config.py FILE REPLICAS [FILE REPLICAS]...`; runs in a copy of Megatron-DeepSpeed, as a
script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accepted  # type: ignore[import-not-found]  # beside this file
import stand_ins  # type: ignore[import-not-found]

files = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
sys.path[0] = str(Path.cwd())
for make in stand_ins.OF["megatron"]:
    make()

from megatron import arguments, global_vars, training  # type: ignore[import-not-found]  # noqa: E402

for file, replicas in files.items():
    sys.argv[1:] = ["--deepspeed", "--deepspeed_config", file]
    global_vars.set_args(arguments.parse_args())  # as megatron.initialize does
    passed = training._create_ds_config_dict()
    print(json.dumps({"passed": passed, "accepted": accepted.by_deepspeed(passed, int(replicas))}))
