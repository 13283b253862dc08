"""Served by deepspeed-smddp; see ``deepspeed_smddp.compat``."""

__version__ = "1.15.0+deepspeed.smddp"
