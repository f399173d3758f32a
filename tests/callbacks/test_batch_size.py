"""BatchSizeAdvisor: says once what the strategy has not said."""

from types import SimpleNamespace

import pytest

from lightning_entrain.callbacks import batch_size
from lightning_entrain.callbacks.batch_size import BatchSizeAdvisor


@pytest.mark.parametrize(("known", "num_told"), [(32, 0), (None, 1)])
def test_a_small_batch_is_told_once(known, num_told, monkeypatch):
    told, logged = [], []
    monkeypatch.setattr(batch_size, "rank_zero_info", told.append)
    advisor = BatchSizeAdvisor()
    monkeypatch.setattr(advisor, "log_step", lambda *arguments: logged.append(arguments[-1]))
    advisor.b_min = 32
    trainer = SimpleNamespace(strategy=SimpleNamespace(plan=SimpleNamespace(b_min=known)))
    for index in range(2):
        advisor.on_train_batch_end(trainer, None, None, SimpleNamespace(num_samples=16), index)
    assert len(told) == num_told
    assert "smaller than b_min, 32" in advisor.text  # the report shows it in any case
    assert "From 32 samples on" in advisor.text
    # No batch is advised that the data does not have.
    assert batch_size.batch_size_text(16, 32, 31) == ""
    assert "From 32 samples on" in batch_size.batch_size_text(16, 32, 32)
    assert [values["plan/batch_over_b_min"] for values in logged] == [0.5]
