"""Moving averages only: output and gradient of eval mode, with statistics that follow."""

import pytest
from helpers.running_norms import Literal, built, follow, moments


class Moving(Literal):
    """Normalize by the averages of the earlier batches, then average."""

    def __call__(self, x, gamma, beta):
        y = self.output(x, gamma, beta, self.mean, self.var)
        mean, var, count = moments(x)
        self.average(mean, var * count / (count - 1))
        return y


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_a_trajectory_equals_the_equations(momentum):
    follow(built("moving_bn", momentum=momentum), Moving(momentum))
