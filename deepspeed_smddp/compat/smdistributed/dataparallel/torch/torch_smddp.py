"""The import that registers the backend ``smddp``; served by deepspeed-smddp.

A process that SageMaker's ``mpirun`` started also gets the variables by which torch joins ranks.
"""

import deepspeed_smddp  # noqa: F401
from deepspeed_smddp.distributed import launchers

launchers.apply()
