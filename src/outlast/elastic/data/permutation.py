"""A random permutation that needs no memory: each element is computed on demand.

A Feistel network turns a key into a permutation of the numbers of k bits (Luby and Rackoff, "How
to construct pseudorandom permutations from pseudorandom functions", 1988). Outputs of n or more are
passed through it again until they are below n ("cycle walking": Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). As 2^k is below 2n, that takes less than two passes on average.
So the order of 100 million samples is available at once, from any position.
"""

from __future__ import annotations

import torch

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of the numbers below `size`.

    Any integer is a `key`, and selects the permutation.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 0:
            raise ValueError(f"size={size} is negative")
        self.size = size
        bits = max(size - 1, 1).bit_length()
        # The halves are swapped after each round; the number of rounds is even.
        self._left_bits, self._right_bits = bits // 2, bits - bits // 2
        self._keys = [mix64(key * _ROUNDS + i) >> 1 for i in range(_ROUNDS)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """The elements at these positions: int64, below `size`, of any shape."""
        values = self._encrypt(positions.to(torch.int64))
        flat = values.view(-1)
        while len(outside := (flat >= self.size).nonzero().view(-1)):
            flat[outside] = self._encrypt(flat[outside])
        return values

    def _encrypt(self, values: torch.Tensor) -> torch.Tensor:
        bits, others = self._left_bits, self._right_bits
        left, right = values >> others, values & ((1 << others) - 1)
        for key in self._keys:
            left, right = right, left ^ (_hash(right + key) & ((1 << bits) - 1))
            bits, others = others, bits
        return (left << others) | right


def mix64(value: int) -> int:
    """A 64-bit hash of an integer: the finalizer of splitmix64 (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", 2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _hash(values: torch.Tensor) -> torch.Tensor:
    """A hash of each value. Products wrap around; a shift that keeps the sign is as good."""
    values = (values ^ (values >> 33)) * -0x00AE502812AA7333  # murmur3's 64-bit finalizer
    values = (values ^ (values >> 33)) * -0x3B314601E57A13AD
    return values ^ (values >> 33)
