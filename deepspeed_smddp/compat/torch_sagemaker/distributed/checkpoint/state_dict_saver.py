"""Saving by torch.distributed.checkpoint; served by deepspeed-smddp."""

from torch.distributed.checkpoint.state_dict_saver import async_save, save

__all__ = ["async_save", "save"]
