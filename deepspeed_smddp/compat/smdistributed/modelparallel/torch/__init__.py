# ruff: noqa: F401, F403
"""``import smdistributed.modelparallel.torch as smp``; served by deepspeed-smddp.

DeepSpeed trains the model: ZeRO-3 within ``sharded_data_parallel_degree`` ranks. See
``deepspeed_smddp.compat``.
"""

from deepspeed_smddp.compat import refusing
from deepspeed_smddp.compat import training as model
from deepspeed_smddp.compat.checkpoints import load, resume_from_checkpoint, save, save_checkpoint
from deepspeed_smddp.compat.modelparallel import *
from deepspeed_smddp.compat.training import (
    DistributedModel,
    DistributedOptimizer,
    delay_param_initialization,
    model_creation,
    partition,
    set_activation_checkpointing,
    set_partition,
    tensor_parallelism,
)

_LAYERS = "use torch.nn and the model's own layers, sharded by sharded_data_parallel_degree"
__getattr__ = refusing(
    __name__,
    {
        "amp": 'set the parameter "fp16" or "bf16" to true, and leave out GradScaler and autocast',
        "nn": _LAYERS,
        "tp_register": _LAYERS,
        "tp_register_with_module": _LAYERS,
        "set_tensor_parallelism": 'use DeepSpeed\'s "tensor_parallel" (AutoTP)',
        "send": "use torch.distributed.send_object_list",
        "recv_from": "use torch.distributed.recv_object_list",
        "checkpoint": "use torch.utils.checkpoint, or smp.set_activation_checkpointing",
        "checkpoint_sequential": "use torch.utils.checkpoint.checkpoint_sequential",
    },
)
