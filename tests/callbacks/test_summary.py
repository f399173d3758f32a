"""RunSummary counts what a fit trained."""

import pytest

from lightning_entrain.callbacks.summary import RunSummary


def test_counts_losses_and_rates(fit, batches):
    summary = RunSummary()
    fit(batches, [summary], False)
    assert (summary.first_loss, summary.last_loss) == (1.0, 4.0)
    assert summary.num_steps == 4
    assert summary.num_samples == 8
    assert summary.num_tokens == 10 + 8 + 8 + 8
    # The first step is left out of the rates.
    assert summary.samples_per_second == pytest.approx(6 / summary.train_seconds)
    assert summary.tokens_per_second == pytest.approx(24 / summary.train_seconds)


def test_a_single_step_has_no_rate(fit, batches):
    summary = RunSummary()
    fit(batches[:1], [summary], False)
    assert summary.first_loss == summary.last_loss == 1.0
    assert summary.samples_per_second is None
    assert summary.tokens_per_second is None
