"""Mixes several sources by weight: which source gives the next sample. There is no randomness, and the shares are exact
at every moment.

The j-th sample of a source with share w is due in the window from floor(j / w) to ceil((j + 1) / w). Of the sources
whose window is open, the one whose window ends first is next (fair scheduling as in Baruah et al., Proportionate
Progress, 1996). After t samples a source has given more than w t - 1 and fewer than w t + 1.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers in the same proportion. 0.1 means one tenth, not the nearest binary number."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def next_source(counts: Sequence[int], weights: Sequence[int]) -> int:
    """Return the number of the data set that gives the next sample, if data set i gave `counts[i]` samples so far.
    `weights` are whole and positive."""
    total, drawn = sum(weights), sum(counts)
    best, best_end = -1, 0
    for source, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        if count * total >= (drawn + 1) * weight:  # its window is not open yet: floor(count / share) > drawn
            continue
        end = -(-(count + 1) * total // weight)
        if best < 0 or end < best_end:
            best, best_end = source, end
    return best
