# One process that has the whole batch: what all the others must give.
from task import make_model, train_alone

losses = train_alone(make_model())
