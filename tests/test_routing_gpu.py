"""The routing kernel against the reference, on the GPU, among values that must not count."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.routing import (
    DTYPES,
    EXPERTS,
    FLOAT_MAX,
    INFINITY,
    NAN,
    SCORINGS,
    among_winners,
    assert_routing,
    check,
    normal_logits,
    some_bias,
)

pytestmark = pytest.mark.gpu

SPECIAL = (NAN, -NAN, INFINITY, -INFINITY, 0.0, -0.0, FLOAT_MAX, -FLOAT_MAX, 1e-45, 88.8, -104.0)

scorings = pytest.mark.parametrize("scoring", SCORINGS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@scorings
@dtypes
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_every_number_of_experts(scoring, dtype, num_experts):
    logits = normal_logits(70, num_experts, DTYPES[dtype], "cuda")
    for top_k in sorted({min(top_k, num_experts) for top_k in (1, 6, 8, 10, 22, 32)}):
        check(logits, top_k, scoring=scoring)
        check(among_winners(logits), top_k, scoring=scoring, renormalize=False, scale=2.5)


@scorings
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_bias(scoring, num_experts):
    top_k = min(8, num_experts)
    logits = normal_logits(70, num_experts, torch.bfloat16, "cuda")
    for dtype in (torch.float32, torch.bfloat16):
        bias = some_bias(num_experts, dtype, "cuda")
        check(logits, top_k, scoring=scoring, correction_bias=bias, scale=2.5)
        around = torch.full((num_experts, 3), 1e4, dtype=dtype, device="cuda")
        around[:, 1] = bias
        check(among_winners(logits), top_k, scoring=scoring, correction_bias=around[:, 1])


@scorings
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("num_groups", "topk_groups", "size"),
    [
        (8, 4, 32),
        (8, 3, 20),
        (8, 8, 32),
        (4, 2, 40),
        (2, 1, 1024),
        (3, 2, 5),
        (5, 4, 33),
        (16, 3, 24),
        (31, 30, 7),
        (32, 1, 64),
        (32, 9, 1),
        (17, 2, 1),
    ],
)
def test_groups(scoring, biased, num_groups, topk_groups, size):
    num_experts = num_groups * size
    bias = some_bias(num_experts, device="cuda") if biased else None
    logits = among_winners(normal_logits(70, num_experts, torch.float32, "cuda"))
    for top_k in {1, min(8, topk_groups * size), min(32, topk_groups * size)}:
        check(
            logits,
            top_k,
            scoring=scoring,
            correction_bias=bias,
            num_groups=num_groups,
            topk_groups=topk_groups,
        )


@dtypes
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_ties(dtype, num_experts):
    """Small integers, so that most are equal and every sum with a bias is exact."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(-2, 3, (70, num_experts), generator=generator)
    logits = logits.to(DTYPES[dtype]).cuda()
    bias = torch.randint(-2, 3, (num_experts,), generator=generator).float().cuda()
    top_k = min(32, num_experts)
    check(logits, top_k)
    check(torch.zeros_like(logits), top_k)
    check(logits, top_k, scoring="softmax_topk", correction_bias=bias)
    for num_groups in (2, 4, 32):
        if num_experts % num_groups == 0:
            groups = {"num_groups": num_groups, "topk_groups": num_groups // 2}
            few = min(top_k, num_experts // 2)
            check(logits, few, **groups)
            check(logits, few, scoring="softmax_topk", correction_bias=bias, **groups)
            check(torch.zeros_like(logits), few, **groups)


@scorings
@pytest.mark.parametrize("num_experts", [1, 8, 32, 33, 128, 160, 256, 512, 2048])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("biased", [False, True])
def test_special_values(scoring, num_experts, share, biased):
    generator = torch.Generator().manual_seed(9)
    logits = normal_logits(70, num_experts)
    hit = torch.rand(logits.shape, generator=generator) < share
    which = torch.randint(len(SPECIAL), logits.shape, generator=generator)
    logits = torch.where(hit, torch.tensor(SPECIAL)[which], logits).cuda()
    logits[3], logits[4], logits[5, 1:] = NAN, -INFINITY, -INFINITY
    options = {"scoring": scoring, "scale": 2.5}
    if biased:
        options["correction_bias"] = some_bias(num_experts, device="cuda")
    top_k = min(8, num_experts)
    for renormalize in (False, True):
        check(logits, top_k, renormalize=renormalize, **options)
    if num_experts % 8 == 0:
        few = min(top_k, num_experts // 2)
        check(logits, few, num_groups=8, topk_groups=4, **options)
    weights, ids = moe_ext.topk_routing(logits, top_k, **options)
    assert ids[3:5].tolist() == [list(range(top_k))] * 2
    assert bool((weights[3:5] == 0).all())


@pytest.mark.parametrize("out", [NAN, -INFINITY])
@pytest.mark.parametrize("num_experts", [8, 256, 512])
def test_biases_that_take_experts_out(out, num_experts):
    bias = torch.zeros(num_experts, device="cuda")
    bias[1::2], bias[4] = out, INFINITY
    logits = normal_logits(70, num_experts, device="cuda")
    weights, ids = moe_ext.topk_routing(logits, 5, scoring="sigmoid", correction_bias=bias)
    assert bool((ids[:, 0] == 4).all())
    assert bool((ids[:, :4] % 2 == 0).all())
    if num_experts == 8:
        assert bool((ids[:, 4] == 1).all())
        assert bool((weights[:, 4] == 0).all())
    assert bool((weights[:, :4] > 0).all())


@pytest.mark.parametrize("size", [2, 4, 32])
def test_a_group_with_one_expert_left_beats_those_with_none(size):
    logits = torch.full((5, 8 * size), NAN, device="cuda")
    logits[:, 6 * size + 1] = -8
    bias = torch.zeros(8 * size, device="cuda")
    for options in ({}, {"correction_bias": bias, "scoring": "sigmoid"}):
        check(logits, 2, num_groups=8, topk_groups=1, **options)
        ids = moe_ext.topk_routing(logits, 2, num_groups=8, topk_groups=1, **options)[1]
        assert ids.tolist() == [[6 * size + 1, 6 * size]] * 5


@dtypes
@pytest.mark.parametrize("num_experts", [8, 33, 128, 256, 512, 2048])
def test_strides_and_addresses(dtype, num_experts):
    base = normal_logits(80, num_experts + 16, DTYPES[dtype], "cuda")
    top_k = min(8, num_experts)
    for logits in (
        base[::2, :num_experts],
        base[:, 1 : num_experts + 1],  # no address is aligned
        base[:, 8 : num_experts + 8],
        base[3:4, :num_experts].expand(70, num_experts),
        base.T.contiguous().T[:, :1],
    ):
        check(logits, min(top_k, logits.shape[1]), scoring="sigmoid")


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 127, 128, 129, 8192])
def test_numbers_of_tokens(num_tokens):
    check(normal_logits(num_tokens, 128, torch.bfloat16, "cuda"), 8)
    bias = some_bias(256, device="cuda")
    if num_tokens > 0:
        check(
            normal_logits(num_tokens, 256, torch.float32, "cuda"),
            8,
            scoring="sigmoid",
            correction_bias=bias,
            num_groups=8,
            topk_groups=4,
            scale=2.5,
        )


def test_more_than_2_31_logits():
    num_tokens, num_experts, tail = 2**20 + 3, 2048, 7
    logits = torch.zeros(num_tokens, num_experts, dtype=torch.bfloat16, device="cuda")
    logits[-tail:] = normal_logits(tail, num_experts, torch.bfloat16, "cuda")
    weights, ids = moe_ext.topk_routing(logits, 8)
    assert_routing(logits[-tail:], weights[-tail:], ids[-tail:], 8)
    expected = torch.arange(8, dtype=torch.int32, device="cuda")
    assert bool((ids[:-tail] == expected).all())


def test_the_cpu_gives_the_same_ids():
    logits = normal_logits(100, 256)
    weights, ids = moe_ext.topk_routing(logits.cuda(), 8)
    expected_weights, expected_ids = moe_ext.topk_routing(logits, 8)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=2e-6, atol=1e-12)


@scorings
def test_every_run_gives_the_same_bits(scoring):
    logits = normal_logits(1000, 256, torch.bfloat16, "cuda")
    bias = some_bias(256, device="cuda")
    options = {"scoring": scoring, "correction_bias": bias, "renormalize": False}
    weights, ids = moe_ext.topk_routing(logits, 8, **options)
    for _ in range(5):
        again = moe_ext.topk_routing(logits, 8, **options)
        assert torch.equal(again[0], weights)
        assert torch.equal(again[1], ids)
    # Nor does it matter which tokens are beside a token, or where it lies.
    for first in (1, 2, 3, 500):
        part = moe_ext.topk_routing(logits[first : first + 7], 8, **options)
        assert torch.equal(part[0], weights[first : first + 7])
        assert torch.equal(part[1], ids[first : first + 7])


@pytest.mark.parametrize("num_experts", [128, 256, 512])
def test_logits_may_change_between_replays(num_experts):
    logits = normal_logits(9, num_experts, torch.bfloat16, "cuda")
    weights = torch.empty(9, 8, device="cuda")
    ids = torch.empty(9, 8, dtype=torch.int32, device="cuda")
    bias = some_bias(num_experts, device="cuda")
    options = {"scoring": "sigmoid", "correction_bias": bias}
    copied = torch.empty_like(logits)

    def call():
        copied.copy_(logits)  # a node in front that is no kernel
        moe_ext.topk_routing_out(copied, 8, weights=weights, ids=ids, **options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for replay in range(5):
        logits.copy_(logits.roll(replay + 1, 1))
        bias.copy_(bias.roll(1))
        weights.fill_(NAN)
        ids.fill_(-7)
        graph.replay()
        assert_routing(logits, weights, ids, 8, **options)


def test_it_waits_for_the_kernel_in_front():
    """Launches may begin before the kernel in front has ended: many in a row, each on the last."""
    logits = normal_logits(64, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    moe_ext.topk_routing(logits, 8)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x, results = logits, []
        for _ in range(50):
            weights, ids = moe_ext.topk_routing(x, 8)
            results.append((x, weights, ids))
            # The best expert of each token is out from here on.
            x = x.scatter(1, ids[:, :1].long(), -INFINITY)
    for _ in range(3):
        graph.replay()
        for x, weights, ids in results:
            assert_routing(x, weights, ids, 8)
    order = torch.stack([ids[:, 0] for _, _, ids in results], 1)
    assert torch.equal(order, logits.sort(-1, descending=True).indices[:, :50].int())


def test_a_capture_behind_two_streams():
    source = normal_logits(64, 256, device="cuda") / 8  # three times of which do not saturate
    logits, bias = torch.zeros_like(source), torch.zeros(256, device="cuda")
    moe_ext.topk_routing(logits, 8)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            bias += 0.25
        logits += source
        torch.cuda.current_stream().wait_stream(side)
        weights, ids = moe_ext.topk_routing(logits, 8, scoring="sigmoid", correction_bias=bias)
    for replay in range(1, 4):
        graph.replay()
        expected = torch.full((256,), 0.25 * replay)
        torch.testing.assert_close(bias.cpu(), expected)
        options = {"scoring": "sigmoid", "correction_bias": bias}
        assert_routing(logits, weights, ids, 8, **options)


def test_runs_on_the_current_stream():
    source = normal_logits(64, 256, device="cuda")
    logits = torch.zeros_like(source)
    moe_ext.topk_routing(logits, 8)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        logits.copy_(source)
        weights, ids = moe_ext.topk_routing(logits, 8)
    # A kernel on the default stream would have finished before the copy.
    stream.synchronize()
    assert_routing(source, weights, ids, 8)


def test_does_not_synchronise():
    logits, bias = normal_logits(64, 256, device="cuda"), some_bias(256, device="cuda")
    moe_ext.topk_routing(logits, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_ext.topk_routing(logits, 8, correction_bias=bias, num_groups=8, topk_groups=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.multi_gpu
def test_another_device_than_the_current_one():
    logits = normal_logits(64, 256, device="cuda:1")
    with torch.cuda.device(0):
        weights, ids = moe_ext.topk_routing(logits, 8)
        assert torch.cuda.current_device() == 0
    assert weights.device == ids.device == logits.device
    assert_routing(logits, weights, ids, 8)
