"""Made-up durations for simulations, and how busy simulated workers were."""

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import NormalDist

from braidrl.algorithms.random import uniform
from braidrl.data.rows import Uid
from braidrl.plan.simulation import Simulation


def busy_shares(result: Simulation) -> dict[str, float]:
    """Return the share of the whole time that each worker worked."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in result.spans:
        seconds[span.worker] += span.end - span.start
    return {worker: total / result.ends[-1] for worker, total in seconds.items()}


def long_tailed(seed: int, median: float, longest: float, among: int) -> Callable[[Uid], float]:
    """Log-normal durations by row, with the given median, whose largest among so many rows is typically `longest`.

    The scale follows from the normal distribution's upper quantile 1 - 1/among; larger draws are cut off there.
    """
    sigma = math.log(longest / median) / NormalDist().inv_cdf(1 - 1 / among)
    known: dict[Uid, float] = {}

    def seconds(uid: Uid) -> float:
        if uid not in known:
            number = float(uniform(seed, "length", uid[0], uid[1], uid[2]))
            known[uid] = min(longest, median * math.exp(sigma * NormalDist().inv_cdf(max(number, 1e-12))))
        return known[uid]

    return seconds
