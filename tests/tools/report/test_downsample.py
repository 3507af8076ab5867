"""Ranges of a long series against the whole series: extremes, sums and counts are those of numpy on all values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.tools.report.downsample import COUNT, Ranges

VALUES = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")), st.just(float("inf"))), min_size=1, max_size=300
)


@given(VALUES, st.integers(1, 40), st.integers(1, 60))
def test_nothing_is_lost(values, most, chunk):
    """In any pieces: no value, no extreme, and no value that is not finite."""
    array, steps, ranges = np.array(values), np.arange(1.0, len(values) + 1), Ranges(most)
    for start in range(0, len(values), chunk):
        ranges.add(steps[start : start + chunk], array[start : start + chunk])
        assert len(ranges.table) <= 2 * most
    ranges.close()
    finite = array[np.isfinite(array)]
    low, high = ranges.bounds
    assert len(ranges.table) <= most or ranges.width == 1
    assert ranges.table[:, COUNT].sum() == len(values)
    assert ranges.bad.sum() == len(values) - len(finite)
    if len(finite):
        assert (np.nanmin(low), np.nanmax(high)) == (finite.min(), finite.max())
        counts = ranges.table[:, COUNT] - ranges.bad
        assert np.nansum(ranges.mean * counts) == pytest.approx(finite.sum(), rel=1e-9, abs=1e-3)
    assert (np.diff(ranges.steps) > 0).all()


def test_a_short_series_is_exact():
    ranges, steps = Ranges(100), np.arange(50.0, 2550, 50)
    ranges.add(steps, np.sin(steps))
    ranges.close()
    assert ranges.exact
    np.testing.assert_array_equal(ranges.steps, steps)
    np.testing.assert_array_equal(ranges.mean, np.sin(steps))


def test_each_range_has_the_values_of_its_steps():
    """By hand: 8 values in 2 ranges."""
    ranges = Ranges(2)
    ranges.add(np.arange(8.0), np.array([1.0, 2, 3, 4, 9, np.nan, 5, 1]))
    ranges.close()
    assert ranges.steps.tolist() == [1.5, 5.5]
    assert ranges.mean.tolist() == [2.5, 5.0]
    assert [bound.tolist() for bound in ranges.bounds] == [[1.0, 1.0], [4.0, 9.0]]
    assert ranges.bad.tolist() == [0, 1]


def test_steps_that_go_back_are_sorted_in():
    ranges = Ranges(10)
    ranges.add(np.array([5.0, 6, 7, 6, 7]), np.array([1.0, 2, 3, 4, 5]))
    assert ranges.steps.tolist() == [5, 6, 7] and ranges.mean.tolist() == [1, 3, 4]
    assert not ranges.exact
