# One process that has the whole batch: the reference for sagemaker_tp.py.
from task import make_llama, train_alone

losses = train_alone(make_llama())
