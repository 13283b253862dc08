"""One ZeRO-3 model on each supported version of DeepSpeed, torch and Python, in own venvs."""
