"""GPT-NeoX and Megatron-DeepSpeed, their own code, over smddp and over Gloo on CPUs, compared."""
