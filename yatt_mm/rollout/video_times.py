"""Times of videos as the engine must be told them, so that it gives tokens the positions that the trainer gives.

Both multiply the number of a frame by its distance in seconds and a constant of the model, and round down: transformers
and the trainer in float32, vLLM in float64. Where a product is nearly whole they would differ by one.
"""

import numpy as np

NEXT = 1e-15
"""Relative step beyond a bound that two float64 products do not round back over it."""


def engine_seconds(seconds: float, num_steps: int, tokens_per_second: float) -> float:
    """`seconds`, or a value next to it for which float64 products round down to the positions that float32 ones do.

    There is none where float32 rounds neighbouring frames in opposite directions (about 1 video in 400 of random
    lengths and rates): then one for which the fewest frames differ, by one position. Of equals the nearest.
    """
    steps = np.arange(1, num_steps)
    wanted = (steps.astype(np.float32) * np.float32(tokens_per_second * seconds)).astype(np.int64)

    def num_wrong(value: float) -> int:
        return int(((steps * (value * tokens_per_second)).astype(np.int64) != wanted).sum())

    if not num_wrong(seconds):
        return seconds
    bounds = [(wanted / steps).max(), ((wanted + 1) / steps).min(), float(np.float32(tokens_per_second * seconds))]
    near = [float(bound / tokens_per_second * (1 + side)) for bound in bounds for side in (-NEXT, 0, NEXT)]
    return min([seconds, *near], key=lambda value: (num_wrong(value), abs(value - seconds)))
