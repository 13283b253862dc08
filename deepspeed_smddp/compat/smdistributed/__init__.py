"""Import names of a closed library, served by deepspeed-smddp; see deepspeed_smddp.compat."""
