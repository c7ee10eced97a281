"""`realistic_layer`: what it plants is there, and seeds say all."""

from __future__ import annotations

import pytest
import torch
from moe_ext.precision import realistic_layer

SIZES = (32, 256, 64)


def small(**options):
    return realistic_layer(*SIZES, **({"top_k": 4} | options))


def test_shapes_and_planted_stages():
    layer = small(seed=3)
    assert layer.w13.shape == (32, 128, 256)
    assert layer.w2.shape == (32, 256, 64)
    assert layer.w13.dtype is layer.w2.dtype is torch.bfloat16
    assert len(layer.super_experts) == 3
    assert layer.planted == tuple(
        (expert, stage) for expert in layer.super_experts for stage in ("gate_up", "down")
    )
    assert small(spike_features=0).planted == tuple(
        (expert, "down") for expert in small().super_experts
    )
    assert small(super_experts=0).planted == ()


def test_seeds_say_all():
    one, same, other = small(seed=1), small(seed=1), small(seed=2)
    assert torch.equal(one.w13, same.w13)
    assert torch.equal(one.w2, same.w2)
    assert not torch.equal(one.w2, other.w2)
    for left, right in zip(one.tokens(9, seed=5), same.tokens(9, seed=5), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(one.tokens(9, seed=5)[0], one.tokens(9, seed=6)[0])


def test_the_same_few_rows_of_super_experts_are_a_thousand_times_as_large():
    layer = small(outlier_channels=2)
    usual = layer.w2.float().square().mean(2).sqrt()  # (experts, rows)
    large = usual > 100 * usual.median()
    assert large.any(1).nonzero().flatten().tolist() == list(layer.super_experts)
    rows = {tuple(large[expert].nonzero().flatten().tolist()) for expert in layer.super_experts}
    assert len(rows) == 1
    assert len(rows.pop()) == 2
    ratio = usual[large].median() / usual[~large].median()
    assert 500 < ratio < 2000


def test_one_feature_of_super_experts_spikes_in_gate_and_up():
    layer = small()
    gate, up = layer.w13.float().square().sum(2).sqrt().chunk(2, dim=1)
    largest = (gate / gate.median() * up / up.median()).amax(1)
    assert set(largest.topk(3).indices.tolist()) == set(layer.super_experts)
    feature = gate[layer.super_experts[0]].argmax()
    assert feature == up[layer.super_experts[0]].argmax()


def test_channels_are_log_normal():
    layer = small(super_experts=0)
    logs = layer.hidden_scales.log()
    assert abs(float(logs.mean())) < 0.1
    assert abs(float(logs.std()) - 0.5) < 0.1
    of_rows = layer.w2.float().square().mean(2).sqrt().log()
    assert abs(float(of_rows.std()) - 0.5) < 0.1


def test_routing_follows_zipf_without_repeats():
    layer = small(zipf=1.0)
    hidden, weights, ids = layer.tokens(4000)
    assert hidden.shape == (4000, 256)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))
    assert bool((weights[:, :-1] >= weights[:, 1:]).all())
    counts = torch.bincount(ids.flatten(), minlength=32)
    by_rank = counts[layer.log_popularity.argsort(descending=True)].tolist()
    assert by_rank[0] > 1.3 * by_rank[1] > 1.3 * by_rank[8]
    even = torch.bincount(small(zipf=0.0).tokens(4000)[2].flatten(), minlength=32)
    assert even.max() < 1.3 * even.min()


def test_experts_share_the_weights():
    layer = small()
    experts = layer.experts(routed_scale=2.0)
    assert experts.w13.data_ptr() == layer.w13.data_ptr()
    assert experts.routed_scale == 2.0
    assert experts(*layer.tokens(5)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 33}, "`top_k` must be an int from 1 to 32, got 33"),
        ({"super_experts": -1}, "`super_experts` must be an int from 0 to 32, got -1"),
        ({"outlier_channels": 257}, "`outlier_channels` must be an int from 0 to 256, got 257"),
        ({"spike_features": 1.0}, "`spike_features` must be an int from 0 to 64, got 1.0"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^realistic_layer: {message}$"):
        small(**options)
