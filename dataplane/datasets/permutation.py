"""A shuffled order whose numbers are computed one by one and never stored.

The method is a Feistel network over a grid of about sqrt(n) by sqrt(n) numbers, keyed by seed and epoch (Black and
Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Each round adds a hash of one coordinate to the other one. This
can be undone, so the whole is a bijection. A result that is n or more is encrypted again until it is below n.
"""

import hashlib
import math
from functools import lru_cache

NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


def permuted(place: int, num: int, seed: int, epoch: int, name: str = "") -> int:
    """Return the number at `place` of a shuffled order of 0 to num - 1. This takes a few microseconds and no memory.

    The key is made of seed, epoch and name: a change in any of them gives another order.
    """
    if not 0 <= place < num:
        raise IndexError(f"place {place} of a permutation of {num}; wanted 0 to {num - 1}")
    rows = math.isqrt(num - 1) + 1
    columns = -(-num // rows)
    keys = _round_keys(seed, epoch, name)
    while True:
        row, column = divmod(place, columns)
        for key_of_row, key_of_column in keys:
            row = (row + _hash(column, key_of_row)) % rows
            column = (column + _hash(row, key_of_column)) % columns
        place = row * columns + column
        if place < num:
            return place


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int, name: str) -> tuple[tuple[int, int], ...]:
    text = f"order of epoch {epoch} with seed {seed} of {name}"
    data = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8 * NUM_ROUNDS).digest()
    keys = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return tuple(zip(keys[::2], keys[1::2], strict=True))


def _hash(value: int, key: int) -> int:
    """Return 64 well-mixed bits (the finaliser of splitmix64)."""
    mixed = (value + key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
