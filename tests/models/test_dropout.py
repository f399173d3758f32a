"""Counted dropout: the rate, independence, and masks that do not depend on company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.dropout import (
    CountedDropout,
    PackedRows,
    count_dropout,
    dropout_rows,
    layer_key,
)
from lightning_entrain.models.tiny import nano_vlm, vlm_from_configs


def mask(samples: tuple[int, ...], lengths: tuple[int, ...], **options: Any) -> Tensor:
    layer = CountedDropout(options.get("p", 0.3), options.get("key", layer_key("a", 0)))
    rows = PackedRows(
        samples=samples, lengths=(lengths,), step=torch.tensor(options.get("step", 1))
    )
    with dropout_rows(rows):
        return layer(torch.ones(sum(lengths), options.get("columns", 64)))


def test_the_rate_and_the_scale() -> None:
    for p in (0.1, 0.5, 0.9):
        found = mask((0, 1), (300, 700), p=p, columns=500)
        values = found.unique()
        torch.testing.assert_close(values, torch.tensor([0.0, 1 / (1 - p)]))
        share = (found == 0).double()
        spread = (p * (1 - p)) ** 0.5
        assert abs(share.mean() - p) < 5 * spread / 500_000**0.5
        assert abs(share.mean(0) - p).max() < 5 * spread / 1000**0.5
        assert abs(share.mean(1) - p).max() < 5 * spread / 500**0.5
    assert mask((0,), (4,), p=1.0).count_nonzero() == 0


def test_masks_differ_by_step_layer_seed_sample_row_and_column() -> None:
    one = mask((5,), (200,))
    others = [
        mask((5,), (200,), step=2),
        mask((6,), (200,)),
        mask((5,), (200,), key=layer_key("b", 0)),
        mask((5,), (200,), key=layer_key("a", 1)),
        one.roll(1, 0),
        one.roll(1, 1),
    ]
    for other in others:
        assert ((one == 0) == (other == 0)).double().mean() == pytest.approx(0.58, abs=0.02)
    assert torch.equal(one, mask((5,), (200,)))


def test_a_sample_has_its_masks_in_any_company() -> None:
    together = mask((3, 7, 1), (5, 9, 4))
    assert torch.equal(together[5:14], mask((7,), (9,)))
    assert torch.equal(together, torch.cat([mask((3, 7), (5, 9)), mask((1,), (4,))]))


def test_it_takes_the_place_of_dropout() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Dropout(0.0), nn.Dropout(0.5))
    assert count_dropout(net, 0)
    assert [type(part) for part in net] == [nn.Linear, CountedDropout, nn.Dropout, CountedDropout]
    assert count_dropout(net, 0)
    net.eval()
    assert torch.equal(net[1](torch.ones(3, 4)), torch.ones(3, 4))
    assert not count_dropout(nn.Sequential(nn.Dropout(0.0)), 0)
    with pytest.raises(ConfigError, match=r"1 is a Dropout2d with rate 0\.3"):
        count_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.3)), 0)


def test_unknown_rows_are_refused() -> None:
    layer = CountedDropout(0.5, 1)
    with pytest.raises(RuntimeMismatchError, match=r"shape \(3, 4\).*planned batch"):
        layer(torch.ones(3, 4))
    rows = PackedRows(samples=(0,), lengths=((5,),), step=torch.tensor(1))
    with dropout_rows(rows), pytest.raises(RuntimeMismatchError, match=r"shape \(1, 2, 3, 3\)"):
        layer(torch.ones(1, 2, 3, 3))


def test_models_without_dropout_have_no_counter() -> None:
    assert "dropout_step" not in nano_vlm().state_dict()


def test_attention_dropout_is_refused() -> None:
    model = nano_vlm()
    config = model.llm.config.to_dict() | {"attention_dropout": 0.1}
    with pytest.raises(ConfigError, match=r"attention_dropout.*nn.Dropout layers may stay"):
        vlm_from_configs(model.encoder.config, config, image_token_id=0)
