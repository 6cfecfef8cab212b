"""Frame distances of videos for the engine, adjusted so that vLLM and the trainer compute the same token positions.

Both multiply the frame number by the distance in seconds and by a constant of the model, and round down. transformers
and the trainer compute in float32, vLLM in float64. If a product is almost an integer, the two would differ by one.
"""

import numpy as np

NEXT = 1e-15
"""The relative step away from a bound: large enough that the rounding of two float64 products does not undo it."""


def engine_seconds(seconds: float, num_steps: int, tokens_per_second: float) -> float:
    """Return `seconds`, or a value close to it with which float64 gives the same token positions as float32.

    `seconds`: distance of two frames. `num_steps`: number of frames.

    No value gives all token positions if float32 rounds neighbouring frames in opposite directions (about 1 video in
    400 of random lengths and rates). Then the value with the fewest different frames is returned; these differ by one
    token position. Among equally good values, the value closest to `seconds` is returned.
    """
    steps = np.arange(1, num_steps)
    wanted = (steps.astype(np.float32) * np.float32(tokens_per_second * seconds)).astype(np.int64)

    def num_wrong(value: float) -> int:
        """Return how many frames get another token position in float64 than in float32, with `value` in place of
        `seconds`."""
        return int(((steps * (value * tokens_per_second)).astype(np.int64) != wanted).sum())

    if not num_wrong(seconds):
        return seconds
    bounds = [(wanted / steps).max(), ((wanted + 1) / steps).min(), float(np.float32(tokens_per_second * seconds))]
    near = [float(bound / tokens_per_second * (1 + side)) for bound in bounds for side in (-NEXT, 0, NEXT)]
    return min([seconds, *near], key=lambda value: (num_wrong(value), abs(value - seconds)))
