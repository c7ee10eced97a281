"""What `topk_routing` promises, on the CPU: choice, weights, groups, special values."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.routing import (
    DTYPES,
    FLOAT_MAX,
    INFINITY,
    NAN,
    SCORINGS,
    normal_logits,
    plain_routing,
    some_bias,
)

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

scorings = pytest.mark.parametrize("scoring", SCORINGS)


def assert_equals_plain(logits, top_k, *, bias=None, **options):
    weights, ids = moe_ext.topk_routing(logits, top_k, correction_bias=bias, **options)
    biases = None if bias is None else bias.tolist()
    for row, logits_of_row in enumerate(logits.float().tolist()):
        expected_weights, expected_ids = plain_routing(logits_of_row, top_k, bias=biases, **options)
        assert ids[row].tolist() == expected_ids
        assert weights[row].tolist() == pytest.approx(expected_weights, rel=1e-5)


@scorings
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_it_equals_a_plain_loop(scoring, dtype, biased, renormalize):
    bias = some_bias(40) if biased else None
    logits = normal_logits(20, 40, DTYPES[dtype])
    options = {"scoring": scoring, "renormalize": renormalize, "scale": 2.5}
    assert_equals_plain(logits, 6, bias=bias, **options)


@scorings
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(8, 3), (4, 4), (5, 1), (20, 7), (2, 1)])
def test_groups_equal_a_plain_loop(scoring, biased, num_groups, topk_groups):
    bias = some_bias(40) if biased else None
    options = {"scoring": scoring, "num_groups": num_groups, "topk_groups": topk_groups}
    assert_equals_plain(normal_logits(30, 40), 6, bias=bias, **options)


def test_a_group_is_as_good_as_its_best_or_as_its_best_two_with_a_bias():
    logits = torch.tensor([[5.0, 0.0, 4.0, 4.0]])
    options = {"scoring": "softmax_topk", "num_groups": 2}
    assert moe_ext.topk_routing(logits, 2, **options)[1].tolist() == [[0, 1]]
    bias = torch.zeros(4)
    ids = moe_ext.topk_routing(logits, 2, correction_bias=bias, **options)[1]
    assert ids.tolist() == [[2, 3]]


def test_groups_of_one_expert():
    bias = torch.tensor([0.0, 3.0, 1.0])
    ids = moe_ext.topk_routing(
        torch.zeros(1, 3), 2, correction_bias=bias, num_groups=3, topk_groups=2
    )[1]
    assert ids.tolist() == [[1, 2]]


def test_a_bias_chooses_and_does_not_weigh():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    bias = torch.tensor([1.0, 0.0, 0.0])
    weights, ids = moe_ext.topk_routing(
        logits, 2, scoring="sigmoid", correction_bias=bias, renormalize=False
    )
    assert ids.tolist() == [[0, 2]]
    assert weights.tolist()[0] == pytest.approx([0.5, logits[0, 2].sigmoid().item()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_either_dtype_and_any_stride(dtype):
    logits, bias = normal_logits(9, 32), some_bias(32, dtype)
    strided = bias.repeat_interleave(3)[::3]
    expected = moe_ext.topk_routing(logits, 4, scoring="sigmoid", correction_bias=bias.float())
    actual = moe_ext.topk_routing(logits, 4, scoring="sigmoid", correction_bias=strided)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[0], expected[0])


def test_models():
    """The formulas of well-known models, as their own code has them."""
    logits = normal_logits(16, 64)
    # Mixtral, Qwen3: softmax, then the largest, then renormalised, in all three spellings.
    probabilities, ids = logits.softmax(-1).topk(8)
    renormalised = probabilities / probabilities.sum(-1, keepdim=True)
    for options in ({}, {"scoring": "softmax_topk"}, {"scoring": "softmax_topk", "scale": 1.0}):
        weights, chosen = moe_ext.topk_routing(logits, 8, **options)
        assert torch.equal(chosen, ids.int())
        torch.testing.assert_close(weights, renormalised)
    # OLMoE, Qwen2, DeepSeek-V2-Lite: not renormalised.
    weights, _ = moe_ext.topk_routing(logits, 8, renormalize=False)
    torch.testing.assert_close(weights, probabilities)
    # Llama 4: one expert, weighed by its sigmoid.
    weights, chosen = moe_ext.topk_routing(logits, 1, scoring="sigmoid", renormalize=False)
    torch.testing.assert_close(weights, logits.amax(-1, keepdim=True).sigmoid())
    assert torch.equal(chosen, logits.argmax(-1, keepdim=True).int())
    # DeepSeek-V3: groups by their best two, masked, sigmoid of the chosen over its sum, x 2.5.
    bias = some_bias(64)
    scores = logits.sigmoid()
    grouped = (scores + bias).unflatten(1, (8, 8))
    kept = grouped.topk(2).values.sum(-1).topk(4).indices
    mask = torch.ones(16, 8, dtype=torch.bool).scatter(1, kept, False)
    ids = grouped.masked_fill(mask[..., None], -INFINITY).flatten(1).topk(8).indices
    chosen_scores = scores.gather(1, ids)
    weights, chosen = moe_ext.topk_routing(
        logits,
        8,
        scoring="sigmoid",
        correction_bias=bias,
        num_groups=8,
        topk_groups=4,
        scale=2.5,
    )
    assert torch.equal(chosen, ids.int())
    torch.testing.assert_close(weights, chosen_scores / chosen_scores.sum(-1, keepdim=True) * 2.5)


@scorings
def test_ties_go_to_the_lowest_id(scoring):
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 1.0, 0.0]])
    for bias in (None, torch.zeros(6)):
        ids = moe_ext.topk_routing(logits, 6, scoring=scoring, correction_bias=bias)[1]
        assert ids.tolist() == [[1, 3, 4, 0, 2, 5]]
        ids = moe_ext.topk_routing(
            torch.zeros(1, 6), 2, scoring=scoring, correction_bias=bias, num_groups=3
        )[1]
        assert ids.tolist() == [[0, 1]]


def test_logits_tell_apart_what_scores_do_not():
    logits = torch.tensor([[40.0, 50.0, 45.0]])
    assert bool((logits.sigmoid() == 1).all())
    assert moe_ext.topk_routing(logits, 2, scoring="sigmoid")[1].tolist() == [[1, 2]]


@scorings
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out", [NAN, -INFINITY])
def test_an_expert_that_is_out_comes_last_and_weighs_nothing(scoring, biased, out):
    logits = normal_logits(5, 8)
    bias = torch.zeros(8) if biased else None
    options = {"scoring": scoring, "correction_bias": bias, "scale": 3.0}
    without = torch.tensor([0, 1, 2, 4, 5, 7])
    logits[:, 3] = logits[:, 6] = out
    if biased:
        bias[3] = 100
        options["correction_bias"] = bias
    weights, ids = moe_ext.topk_routing(logits, 8, **options)
    expected, places = moe_ext.topk_routing(
        logits[:, without], 6, **options | {"correction_bias": bias[without] if biased else None}
    )
    assert torch.equal(ids[:, :6], without.int()[places])
    assert torch.equal(ids[:, 6:], torch.tensor([[3, 6]]).int().expand(5, 2))
    torch.testing.assert_close(weights[:, :6], expected)
    assert bool((weights[:, 6:] == 0).all())


@scorings
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_of_nan(scoring, groups, biased):
    logits = normal_logits(3, 16)
    logits[1] = NAN
    options = {"num_groups": groups[0], "topk_groups": groups[1], "scoring": scoring}
    bias = some_bias(16) if biased else None
    weights, ids = moe_ext.topk_routing(logits, 5, correction_bias=bias, **options)
    assert ids[1].tolist() == [0, 1, 2, 3, 4]
    assert weights[1].tolist() == [0.0] * 5
    assert bool((weights[::2].sum(-1) > 0.99).all())


@pytest.mark.parametrize("out", [NAN, -INFINITY])
def test_a_bias_can_take_an_expert_out(out):
    bias = torch.tensor([0.0, out, 0.0, INFINITY])
    weights, ids = moe_ext.topk_routing(
        torch.tensor([[0.0, 9.0, 1.0, -9.0]]), 4, scoring="sigmoid", correction_bias=bias
    )
    assert ids.tolist() == [[3, 2, 0, 1]]
    assert weights[0, 3] == 0
    assert weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("scoring", "expected"),
    [
        ("softmax", [0.5, 0.5, 0.0]),
        ("softmax_topk", [0.5, 0.5, 0.0]),
        ("sigmoid", [0.4, 0.4, 0.2]),
        ("sqrt_softplus", [0.5, 0.5, 0.0]),
    ],
)
def test_infinite_logits_share_the_weight(scoring, expected):
    logits = torch.tensor([[0.0, INFINITY, -3.0, INFINITY]])
    for bias in (None, torch.zeros(4)):
        weights, ids = moe_ext.topk_routing(logits, 3, scoring=scoring, correction_bias=bias)
        assert ids.tolist() == [[1, 3, 0]]
        assert weights.tolist()[0] == pytest.approx(expected)


def test_a_kept_group_fills_up_before_others_are_asked():
    """Experts that are out but in the best group come before any of a group that was dropped."""
    logits = torch.tensor([[1.0, 1.0, 9.0, NAN]])
    weights, ids = moe_ext.topk_routing(logits, 2, num_groups=2)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[1.0, 0.0]]


def test_a_group_with_one_expert_left_beats_one_with_none():
    logits = torch.tensor([[NAN, NAN, NAN, -8.0]])
    ids = moe_ext.topk_routing(logits, 2, correction_bias=torch.zeros(4), num_groups=2)[1]
    assert ids.tolist() == [[3, 2]]


def test_small_scores_are_not_lost():
    logits = torch.full((1, 4), -60.0)
    weights, _ = moe_ext.topk_routing(logits, 2, scoring="sqrt_softplus")
    assert weights.tolist()[0] == pytest.approx([0.5, 0.5])
    weights, _ = moe_ext.topk_routing(logits, 2, scoring="sigmoid", renormalize=False)
    assert weights.tolist()[0] == pytest.approx([8.7565e-27] * 2)


logit = strategies.floats(width=32) | strategies.sampled_from([0.0, 1.0, NAN, INFINITY, -INFINITY])


@scorings
@hypothesis.given(data=strategies.data(), num_groups=strategies.sampled_from([1, 2, 4]))
@hypothesis.settings(deadline=None, max_examples=100)
def test_properties(scoring, data, num_groups):
    size = data.draw(strategies.integers(1, 6))
    count = num_groups * size
    topk_groups = data.draw(strategies.integers(1, num_groups))
    top_k = data.draw(strategies.integers(1, topk_groups * size))
    renormalize = data.draw(strategies.booleans())
    row = torch.tensor([data.draw(strategies.lists(logit, min_size=count, max_size=count))])
    bias = None
    if data.draw(strategies.booleans()):
        values = strategies.lists(logit, min_size=count, max_size=count)
        bias = torch.tensor(data.draw(values))
    options = {
        "scoring": scoring,
        "correction_bias": bias,
        "renormalize": renormalize,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
    }
    weights, ids = moe_ext.topk_routing(row, top_k, **options)
    chosen = ids[0].tolist()
    assert len(set(chosen)) == top_k
    assert all(0 <= expert < count for expert in chosen)
    assert len({expert // size for expert in chosen}) <= topk_groups
    assert bool((weights >= 0).all())
    assert bool(weights.isfinite().all())
    out = row[0].isnan() | (row[0] == -INFINITY)
    assert bool((weights[0][out[ids[0].long()]] == 0).all())
    if renormalize:
        # Below 1 only where all weights are as good as zero.
        assert weights.sum() <= 1 + 1e-5
    if bias is None:
        order = row[0][ids[0].long()].nan_to_num(nan=-INFINITY, posinf=FLOAT_MAX, neginf=-INFINITY)
        assert bool((order[:-1] >= order[1:]).all())
    # One more expert to choose leaves those before it as they are.
    if top_k < topk_groups * size:
        more = moe_ext.topk_routing(row, top_k + 1, **options)[1]
        assert more[0, :top_k].tolist() == chosen
    scaled, again = moe_ext.topk_routing(row, top_k, **options, scale=4.0)
    assert torch.equal(again, ids)
    assert torch.equal(scaled, weights * 4)


def test_a_token_does_not_depend_on_others():
    logits = normal_logits(7, 24)
    together = moe_ext.topk_routing(logits, 5)
    for row in range(7):
        alone = moe_ext.topk_routing(logits[row : row + 1], 5)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (2, 2), (32, 32), (2048, 32), (2047, 1), (512, 10)]
)
def test_sizes(num_experts, top_k):
    for num_tokens in (0, 1, 5):
        logits = normal_logits(num_tokens, num_experts)
        weights, ids = moe_ext.topk_routing(logits, top_k)
        assert weights.shape == ids.shape == (num_tokens, top_k)
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        assert torch.equal(ids, logits.topk(top_k).indices.int())


def test_no_tokens_with_groups_and_bias():
    weights, ids = moe_ext.topk_routing(
        torch.empty(0, 8), 2, correction_bias=torch.zeros(8), num_groups=4, topk_groups=2
    )
    assert weights.shape == ids.shape == (0, 2)


def test_strided_rows():
    base = normal_logits(10, 40)
    for logits in (base[::2], base[:, 3:20], base[4:5].expand(6, 40), base.T[:1].T):
        weights, ids = moe_ext.topk_routing(logits, 1)
        expected = moe_ext.topk_routing(logits.contiguous(), 1)
        assert torch.equal(weights, expected[0])
        assert torch.equal(ids, expected[1])


def test_out_writes_rows_and_nothing_between_them():
    logits = normal_logits(4, 16)
    weights, ids = torch.full((4, 5), NAN), torch.full((4, 5), -7, dtype=torch.int32)
    moe_ext.topk_routing_out(logits, 3, weights=weights[:, 1:4], ids=ids[:, 1:4])
    expected = moe_ext.topk_routing(logits, 3)
    assert torch.equal(weights[:, 1:4], expected[0])
    assert torch.equal(ids[:, 1:4], expected[1])
    assert bool(weights[:, ::4].isnan().all())
    assert bool((ids[:, ::4] == -7).all())
