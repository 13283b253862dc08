"""GPT-NeoX's own code over smddp and over Gloo on CPUs, compared."""
