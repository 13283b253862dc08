"""Served by deepspeed-smddp; see ``deepspeed_smddp.compat``."""
