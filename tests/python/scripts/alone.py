# One process that has the whole batch: the reference for the other scripts.
from task import make_model, train_alone

losses = train_alone(make_model())
