"""What zero3_step.py is made of."""
