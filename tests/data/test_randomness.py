"""Random numbers that depend on what they are for and on nothing else."""

import numpy as np
from scipy import stats

from revit.data.randomness import key, permutation, uniforms


def test_a_sample_has_its_own_numbers():
    whole = uniforms(np.arange(1000), 3, 0, 5, "angle")
    some = uniforms(np.array([999, 3, 500]), 3, 0, 5, "angle")
    assert np.array_equal(some, whole[[999, 3, 500]])


def test_seed_epoch_and_purpose_matter():
    samples = np.arange(100)
    draws = [uniforms(samples, 1, *purpose) for purpose in ((0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"))]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert not np.any(one == other)


def test_numbers_are_uniform_and_independent():
    draws = uniforms(np.arange(50_000), 4, 7, 3, "x")
    assert draws.min() >= 0 and draws.max() < 1
    for column in draws.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    correlations = np.corrcoef(np.concatenate([draws[:-1], draws[1:]], axis=1).T) - np.eye(8)
    assert np.abs(correlations).max() < 0.02  # between columns, and between neighbouring samples


def test_permutation_is_one_and_depends_on_the_epoch():
    first, again, other = permutation(500, 0, 1, "order"), permutation(500, 0, 1, "order"), permutation(500, 0, 2, "order")
    assert sorted(first) == list(range(500))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_keys_do_not_run_into_each_other():
    assert len({key(a, b) for a in range(30) for b in range(30)}) == 900
    assert key(1, 23) != key(12, 3)
