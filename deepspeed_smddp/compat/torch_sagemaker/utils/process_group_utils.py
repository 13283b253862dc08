"""``torch.sagemaker.utils.process_group_utils``; served by deepspeed-smddp."""

from torch.distributed import get_process_group_ranks as get_global_ranks

__all__ = ["get_global_ranks"]
