"""The planner against the steps that were measured on emulated hosts."""

from harness import modules


def _command():
    return modules.load("benchmarks/planner_emulated.py")


def test_the_median_error_is_within_eight_percent():
    command = _command()
    found = command.steps()
    assert len({step.kind for step in found}) >= 9
    assert command.median_error(found) <= 0.08


def test_more_bandwidth_never_makes_a_step_longer():
    command = _command()
    rates = [1e8, 2e8, 1e9, 1e11]
    traffic = command.Traffic(1e8, 12, 2, 1)
    times = [command.predicted(0.5, traffic, rate, "ZeRO-3") for rate in rates]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 1.01 * 0.5
