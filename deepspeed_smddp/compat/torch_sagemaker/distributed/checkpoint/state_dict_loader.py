"""Loading by torch.distributed.checkpoint; served by deepspeed-smddp."""

from torch.distributed.checkpoint.state_dict_loader import load

__all__ = ["load"]
