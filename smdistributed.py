"""Import names of a closed library, for scripts written for it; a part of deepspeed-smddp.

This is not that library: ``smdistributed.dataparallel`` and ``smdistributed.modelparallel`` lead to
the adapters in ``deepspeed_smddp/compat``. Installed packages of these names have precedence: a
directory ``smdistributed`` with an ``__init__.py`` is found before this file, and a directory
without it is searched before the adapters.
"""

import importlib.util
import os
import sys

_adapters = os.path.join(
    importlib.util.find_spec("deepspeed_smddp").submodule_search_locations[0],  # type: ignore[union-attr,index]
    "compat",
    "smdistributed",
)
# Submodules are searched for in these directories, in this order.
__path__ = [
    place
    for place in (os.path.join(entry or os.curdir, "smdistributed") for entry in sys.path)
    if os.path.isdir(place)
]
__path__.append(_adapters)
if __spec__ is not None:
    __spec__.submodule_search_locations = __path__
