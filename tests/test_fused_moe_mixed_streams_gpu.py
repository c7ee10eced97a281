"""`fused_moe_mixed` in CUDA graphs, on other streams, with memory of the caller; twice the same."""

from __future__ import annotations

import pytest
import torch
from moe_ext.precision import ExpertBank, fused_moe_mixed_reference
from support.bank import FORMS, PAIRS, PLANS, integer_bank, layer_of, plan_of_pairs, with_scales
from support.fused_moe import Sizes
from support.graphs import assert_every_replay_is_right, captured
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

SIZES = Sizes(num_tokens=33, num_experts=8, top_k=4, hidden=256, intermediate=192)
PLANS_OF_PAIRS = {
    "all four": plan_of_pairs(8, PAIRS),
    "by expert": plan_of_pairs(8, (PAIRS[0], PAIRS[3])),
    "few in BF16": plan_of_pairs(8, (PAIRS[0],) * 7 + (PAIRS[3],)),
    "down alone": plan_of_pairs(8, (PAIRS[0], PAIRS[1])),
}
plans = pytest.mark.parametrize("name", PLANS_OF_PAIRS)


@plans
@pytest.mark.parametrize("layout", ["expert", "channel", "segments"])
@pytest.mark.parametrize(("num_tokens", "inner"), [(2, 192), (33, 192), (33, 1152), (200, 192)])
def test_replays_with_fresh_routing(num_tokens, inner, layout, name):
    """Back to back, several layers a graph: a race between kernels would show in some replay."""
    sizes = Sizes(num_tokens, 8, 4, 256, inner)
    bank, (hidden, weights, ids) = integer_bank(layout, PLANS_OF_PAIRS[name], sizes, "cuda")
    ids = ids.int()
    outs = [torch.empty_like(hidden) for _ in range(4)]
    size = bank.workspace_size(num_tokens, 4)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def layers():
        for out in outs:
            bank(hidden, weights, ids, out=out, workspace=workspace)

    routings = []
    for seed in range(20):
        generator = torch.Generator("cuda").manual_seed(seed)
        drawn = torch.randint(
            -1, 2 + seed % 8, ids.shape, generator=generator, device="cuda", dtype=torch.int32
        )
        routings.append((drawn, fused_moe_mixed_reference(hidden, bank, weights, drawn)))
    assert_every_replay_is_right(captured(layers), ids, routings, outs)


# Down in BF16 first, then in FP8 first: quantised apart, and in place.
@pytest.mark.parametrize("num_tokens", [10, 100, 600])
@pytest.mark.parametrize("expert", range(4))
@pytest.mark.parametrize("name", ["all four", "few in BF16"])
@pytest.mark.parametrize("layout", ["expert", "channel", "segments"])
def test_a_long_gemm_is_waited_for_behind_stages_without_rows(layout, name, expert, num_tokens):
    """All rows are of one expert: what lies between its GEMMs and combine ends at once."""
    pairs = {"all four": PAIRS, "few in BF16": (PAIRS[0],) * 7 + (PAIRS[3],)}[name]
    sizes = Sizes(num_tokens, len(pairs), 4, 256, 8192)
    plan = plan_of_pairs(len(pairs), pairs)
    bank, (hidden, weights, ids) = integer_bank(layout, plan, sizes, "cuda")
    ids = torch.full_like(ids, expert if name == "all four" else 7 * (expert % 2))
    expected = fused_moe_mixed_reference(hidden, bank, weights, ids)
    size = bank.workspace_size(num_tokens, 4)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(hidden)

    def poisoned_layer():
        workspace.fill_(0xFF)
        bank(hidden, weights, ids, out=out, workspace=workspace)

    graph = captured(poisoned_layer)
    for _ in range(10):
        poisoned_layer()
        assert_same_bits(out, expected)
        graph.replay()
        assert_same_bits(out, expected)


@plans
def test_one_workspace_for_different_numbers_of_tokens(name):
    workspace = None
    for num_tokens in (300, 1, 33, 300, 0, 7, 128, 2):
        sizes = Sizes(num_tokens, 8, 4, 256, 192)
        bank, inputs = integer_bank(
            "segments", PLANS_OF_PAIRS[name], sizes, "cuda", seed=num_tokens
        )
        if workspace is None:
            size = bank.workspace_size(300, 4)
            workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        expected = fused_moe_mixed_reference(inputs[0], bank, *inputs[1:])
        assert_same_bits(bank(*inputs, workspace=workspace), expected)


@plans
def test_runs_on_the_current_stream(name):
    bank, (source, weights, ids) = integer_bank("segments", PLANS_OF_PAIRS[name], SIZES, "cuda")
    expected = bank(source, weights, ids)
    hidden = torch.zeros_like(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        hidden.copy_(source)
        out = bank(hidden, weights, ids)
    # A kernel on the default stream would have finished before the copy.
    stream.synchronize()
    assert_same_bits(out, expected)


def test_two_streams_at_once():
    made = [
        integer_bank("segments", PLANS_OF_PAIRS["all four"], SIZES, "cuda", seed=seed)
        for seed in (1, 2)
    ]
    expected = [fused_moe_mixed_reference(own[0], bank, *own[1:]) for bank, own in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(50):
        for stream, (bank, own), results in zip(streams, made, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(bank(*own))
    torch.cuda.synchronize()
    for results, one in zip(outs, expected, strict=True):
        for out in results:
            assert_same_bits(out, one)


def random_bank(form, name, sizes, **options):
    experts, inputs, scales = layer_of(form, sizes)
    for option, value in options.items():
        setattr(experts, option, value)
    bank = ExpertBank.from_experts(with_scales(PLANS[name], scales), bf16=experts)
    return bank.to("cuda"), tuple(tensor.to("cuda") for tensor in inputs)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_twice_the_same_bits(form, name):
    bank, inputs = random_bank(form, name, Sizes(700, 6, 3, 384, 256))
    first = bank(*inputs)
    assert not bool(first.isnan().any())
    for _ in range(5):
        assert_same_bits(bank(*inputs), first)


@pytest.mark.parametrize("name", ["by expert", "all four"])
@pytest.mark.parametrize("form", ["plain", "channel", "tensor"])
def test_a_token_does_not_depend_on_its_batch(form, name):
    bank, inputs = random_bank(form, name, Sizes(300, 6, 3, 384, 256), batch_invariant=True)
    together = bank(*inputs)
    for begin, end in ((5, 6), (0, 2), (17, 34), (100, 165), (0, 299)):
        some = tuple(tensor[begin:end].contiguous() for tensor in inputs)
        assert_same_bits(bank(*some), together[begin:end])


@pytest.mark.parametrize("name", PLANS)
def test_the_host_never_waits(name):
    bank, inputs = random_bank("plain", name, Sizes(130, 6, 3, 384, 256))
    table = torch.arange(6, dtype=torch.int32, device="cuda")
    bank(*inputs, expert_map=table)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bank(*inputs)
        bank(*inputs, expert_map=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", PLANS)
def test_memory_beyond_inputs_and_output(name):
    sizes = Sizes(600, 6, 4, 1024, 512)
    bank, inputs = random_bank("plain", name, sizes)
    table = torch.arange(6, dtype=torch.int32, device="cuda")
    out = torch.empty_like(inputs[0])
    bank(*inputs, out=out, expert_map=table)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bank(*inputs, out=out, expert_map=table)
    used = torch.cuda.max_memory_allocated() - before
    rows = sizes.num_tokens * sizes.top_k
    bound = rows * ((sizes.intermediate + sizes.hidden) * 2 + 16)
    assert used <= bound + sizes.num_tokens * (sizes.hidden + 4 * sizes.hidden // 128) + 2**20
    workspace = torch.empty(bank.workspace_size(600, 4), dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bank(*inputs, out=out, workspace=workspace, expert_map=table)
    assert torch.cuda.max_memory_allocated() == before
