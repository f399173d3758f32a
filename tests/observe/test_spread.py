"""The spread of loads over microbatches agrees with numpy, also merged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_entrain.observe.spread import Spread

loads = st.lists(st.integers(0, 100_000), max_size=40)


@given(st.lists(loads, min_size=1, max_size=5))
def test_merged_parts_equal_numpy_on_the_whole(parts):
    merged = Spread()
    for part in parts:
        merged = merged.merge(Spread.of(part))
    whole = np.array([value for part in parts for value in part], dtype=np.float64)
    assert merged.count == len(whole)
    if not len(whole):
        assert (merged.std, merged.cv, merged.max_over_mean) == (0.0, 0.0, 0.0)
        return
    assert merged.mean == pytest.approx(whole.mean(), rel=1e-12)
    assert merged.std == pytest.approx(whole.std(), rel=1e-9, abs=1e-9 * max(whole.max(), 1))
    assert (merged.smallest, merged.largest) == (whole.min(), whole.max())
    if whole.mean():
        assert merged.cv == pytest.approx(whole.std() / whole.mean(), rel=1e-9, abs=1e-9)
        assert merged.max_over_mean == pytest.approx(whole.max() / whole.mean(), rel=1e-12)


def test_hand_computed_case():
    spread = Spread.of([2, 4, 4, 4, 5, 5, 7, 9])
    assert (spread.mean, spread.std, spread.cv, spread.max_over_mean) == (5.0, 2.0, 0.4, 1.8)


def test_all_empty_microbatches_have_no_variation():
    spread = Spread.of([0, 0, 0])
    assert (spread.cv, spread.max_over_mean) == (0.0, 0.0)
