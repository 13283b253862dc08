"""Served by deepspeed-smddp; see ``deepspeed_smddp.compat``."""

from deepspeed_smddp.compat import refusing

_BEFORE_1_4 = (
    "that was the interface of versions before 1.4; import "
    "smdistributed.dataparallel.torch.torch_smddp, and use torch.distributed and torch's "
    'DistributedDataParallel after init_process_group("smddp")'
)
__getattr__ = refusing(__name__, {"distributed": _BEFORE_1_4, "parallel": _BEFORE_1_4})
