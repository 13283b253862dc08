# One process that has the whole batch: what sagemaker_tp.py must give.
from task import make_llama, train_alone

losses = train_alone(make_llama())
