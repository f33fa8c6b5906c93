"""Random numbers that are a pure function of what they are for.

A generator that hands out numbers in the order of the calls makes a run depend on the number of workers and on where it was
interrupted. Here a number depends on (seed, epoch, sample, purpose) and on nothing else.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

WINDOW = 8
"""Blocks whose samples are mixed with each other: archives of 256 MB are read 2 GB at a time."""

_STEP = np.uint64(0x9E3779B97F4A7C15)


def key(*parts: int | str) -> int:
    """A 63-bit seed for a purpose: `key(seed, epoch, "order")`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(samples: NDArray[np.int64], count: int, *purpose: int | str) -> NDArray[np.float64]:
    """Numbers in [0, 1), [samples, count]: row i belongs to sample i whatever else is in the batch.

    >>> import numpy as np
    >>> both, one = uniforms(np.array([3, 7]), 2, 0, "angle"), uniforms(np.array([7]), 2, 0, "angle")
    >>> bool((both[1] == one[0]).all())
    True
    """
    rows = _mix(np.asarray(samples, dtype=np.uint64) * _STEP + np.uint64(key(*purpose)))
    columns = np.arange(1, count + 1, dtype=np.uint64) * _STEP
    return (_mix(rows[:, None] + columns) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(length: int, *purpose: int | str) -> NDArray[np.int64]:
    """A random order of `length` things."""
    return np.random.Generator(np.random.PCG64(key(*purpose))).permutation(length)


def block_permutation(blocks: NDArray[np.int64], *purpose: int | str) -> NDArray[np.int64]:
    """A random order of samples that lie in blocks, block k from `blocks[k]` to before `blocks[k + 1]`, which stays among few.

    The blocks are shuffled, and then the samples of each `WINDOW` blocks in a row: a block lies within one window.
    """
    generator = np.random.Generator(np.random.PCG64(key(*purpose)))
    shuffled = generator.permutation(len(blocks) - 1)
    windows = (shuffled[first : first + WINDOW] for first in range(0, len(shuffled), WINDOW))
    samples = ([np.arange(blocks[k], blocks[k + 1]) for k in window] for window in windows)
    return np.concatenate([generator.permutation(np.concatenate(window)) for window in samples])


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): every bit of the input reaches every bit of the output."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
