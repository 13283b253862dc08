"""What this package does around ``deepspeed.initialize`` and ``zero.Init``, in order.

Each entry is a context manager around the call, in a module that does not know the others. The
parts before the call run from top to bottom, and each sees the arguments as the parts before it
left them. The parts after the call run from bottom to top.

======================  ====================================  =====================================
initialize              before                                after
======================  ====================================  =====================================
``default_group``       makes the default group, applies the  -
                        "smddp" section
``bypasses``            says what goes past smddp             -
``features``            installs gathers and reductions       -
``auto``                chooses what ``"auto"`` stands for    -
``autotp``              makes tensor-parallel groups, passes  lets divided layers draw random
                        them as ``mpu``                       numbers apart
``activation_offload``  -                                     puts offloading on the module
``sharding_degree``     checks versions and config, replaces  verifies the engine, attaches
                        stage 3 for the call                  checkpoints
``monitoring``          -                                     follows the engine's steps, adds
                                                              counters to its monitor
======================  ====================================  =====================================

======================  ===========================================================================
``zero.Init``           before
======================  ===========================================================================
``default_group``       makes the default group, applies the "smddp" section
``features``            installs gathers and reductions
``auto``                chooses what ``"auto"`` stands for
``sharding_degree``     passes the shard group as the group to partition over
======================  ===========================================================================

In a process that has not chosen smddp, ``default_group`` reads the config, and no part does more.
"""

from __future__ import annotations

from deepspeed_smddp.deepspeed import auto, autotp, bypasses, default_group, features, monitoring
from deepspeed_smddp.deepspeed.sharding import sharding_degree
from deepspeed_smddp.models.offload import activation_offload
from deepspeed_smddp.upstream.wrapping import Around

AROUND_INITIALIZE: tuple[Around, ...] = (
    default_group.around_initialize,
    bypasses.around_initialize,
    features.around_initialize,
    auto.around_initialize,
    autotp.around_initialize,
    activation_offload.around_initialize,
    sharding_degree.around_initialize,
    monitoring.around_initialize,
)

AROUND_ZERO_INIT: tuple[Around, ...] = (
    default_group.around_zero_init,
    features.around_zero_init,
    auto.around_zero_init,
    sharding_degree.around_zero_init,
)

AROUND_INIT_DISTRIBUTED: tuple[Around, ...] = (
    default_group.around_init_distributed,
    features.around_init_distributed,
)
