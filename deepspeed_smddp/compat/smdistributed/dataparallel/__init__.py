"""Served by deepspeed-smddp; see ``deepspeed_smddp.compat``."""

__version__ = "2.5.0+deepspeed.smddp"
