"""The sort's kernels against the reference, every element, in the middle of poison."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext._library import device_kernels
from moe_ext.reference import sort_tokens_reference
from support.tokens import INT64_MAX, INT64_MIN, POISON, assert_sorted, draw_ids, strange_ids

pytestmark = pytest.mark.gpu

MARGIN = 64
# Around the borders between the ways to sort: none, a warp, 128 slots, a CTA with 1, 2 and 4 slots
# a thread (half as many from about 3,000 experts on), a cluster with 1 to 8, a grid with 4 and 8.
ENTRIES = (0, 1, 7, 8, 31, 32, 33, 127, 128, 129, 255, 1024, 1025, 2048, 2049, 4096, 4097)
LARGE_ENTRIES = (8192, 8193, 16385, 32768, 32769, 65536, 65537, 70000)
HUGE_ENTRIES = (1 << 19, (1 << 19) + 1, 1 << 20, 1 << 22)
EXPERTS = (1, 2, 8, 60, 128, 256, 257, 512, 1024, 1025, 3055, 3060, 4096)
FEW_EXPERTS = (1, 8, 128, 257, 4096)
DTYPES = {"int32": torch.int32, "int64": torch.int64}

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def shaped(entries):
    """The largest top_k up to 8 that divides the entries."""
    top_k = next(top_k for top_k in range(8, 0, -1) if entries % top_k == 0)
    return entries // top_k, top_k


def sort_into_poison(ids, num_experts, first_expert=0, expert_map=None):
    """Call the C++ op; what lies around its outputs and scratch must stay as it was."""
    kernels = device_kernels(ids.get_device())
    elems = kernels.sort_tokens_scratch(ids.numel(), num_experts)
    sizes = (num_experts, ids.numel(), ids.numel(), elems)
    stores = [
        torch.full((size + 2 * MARGIN,), POISON, dtype=torch.int32, device=ids.device)
        for size in sizes
    ]
    views = [store[MARGIN : MARGIN + size] for store, size in zip(stores, sizes, strict=True)]
    *outputs, scratch = views
    kernels.sort_tokens_configured(
        ids, *outputs, scratch if elems else None, expert_map, first_expert
    )
    for store, size in zip(stores, sizes, strict=True):
        assert bool((store[:MARGIN] == POISON).all())
        assert bool((store[MARGIN + size :] == POISON).all())
    return tuple(outputs)


def check(ids, num_experts, first_expert=0, expert_map=None):
    expected = sort_tokens_reference(
        ids, num_experts, first_expert=first_expert, expert_map=expert_map
    )
    assert_sorted(sort_into_poison(ids, num_experts, first_expert, expert_map), expected)
    return expected


@dtypes
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_every_size(dtype, num_experts):
    for entries in ENTRIES:
        for strange in (0.0, 0.3):
            shape = shaped(entries)
            check(draw_ids(*shape, num_experts, DTYPES[dtype], "cuda", strange), num_experts)


@dtypes
@pytest.mark.parametrize("num_experts", EXPERTS)
def test_large_sizes(dtype, num_experts):
    for entries in LARGE_ENTRIES:
        ids = draw_ids(*shaped(entries), num_experts, DTYPES[dtype], "cuda", strange=0.1)
        check(ids, num_experts)


@pytest.mark.parametrize("num_experts", FEW_EXPERTS)
@pytest.mark.parametrize("entries", HUGE_ENTRIES)
def test_huge_sizes(entries, num_experts):
    dtype = torch.int32 if num_experts == 8 else torch.int64
    check(draw_ids(*shaped(entries), num_experts, dtype, "cuda", strange=0.1), num_experts)


@pytest.mark.parametrize("entries", [8, 100, 1000, 4096, 65536, 1 << 20])
@pytest.mark.parametrize("num_experts", FEW_EXPERTS)
def test_all_to_one(entries, num_experts):
    for expert in {0, num_experts // 2, num_experts - 1, num_experts, -1}:
        ids = torch.full(shaped(entries), expert, device="cuda")
        offs, row_slot, _ = check(ids, num_experts)
        here = 0 <= expert < num_experts
        assert int(offs[-1]) == (entries if here else 0)
        expected = torch.arange(entries) if here else torch.full((entries,), -1)
        assert torch.equal(row_slot.cpu(), expected.int())


@pytest.mark.parametrize("entries", [32, 128, 4096, 65536, 1 << 18])
def test_neighbours_and_runs(entries):
    """Ids that rise, fall and alternate: an order of its own for every warp."""
    place = torch.arange(entries, device="cuda").view(shaped(entries))
    for ids in (place % 128, 127 - place % 128, place % 2 * 127, place * 128 // entries):
        check(ids, 128)


@dtypes
@pytest.mark.parametrize("entries", [16, 96, 2000, 40000, 200000])
def test_strange_ids_with_an_offset_and_a_map(dtype, entries):
    kind = DTYPES[dtype]
    ids = draw_ids(*shaped(entries), 200, kind, "cuda", strange=0.2)
    check(ids, 60, first_expert=70)
    check(ids, 60, first_expert=2**31 - 1)
    expert_map = torch.randperm(200, device="cuda").int()
    expert_map[expert_map >= 60] = -1
    expert_map[:4] = torch.tensor([60, -(2**31), 2**31 - 1, -2], device="cuda")
    check(ids, 60, expert_map=expert_map)
    check(ids, 60, expert_map=expert_map[:50])
    check(ids, 60, expert_map=expert_map[:0])


@dtypes
@pytest.mark.parametrize("num_experts", [1, 128, 4096])
def test_only_strange_ids(dtype, num_experts):
    strange = torch.tensor(strange_ids(num_experts, DTYPES[dtype]), dtype=DTYPES[dtype])
    for tokens in (1, 40, 1500, 30000):
        offs, row_slot, slot_row = check(strange.cuda().repeat(tokens, 1), num_experts)
        assert int(offs.abs().max()) == 0
        assert int(row_slot.max()) == int(slot_row.max()) == -1


def test_the_ends_of_int64_beside_a_large_first_expert():
    ids = torch.tensor([[INT64_MIN, INT64_MAX, 2**31 - 1, 2**31, INT64_MIN + 2**31]], device="cuda")
    _, row_slot, _ = check(ids, 4096, first_expert=2**31 - 1)
    assert row_slot.tolist() == [2, 3, -1, -1, -1]


@dtypes
@pytest.mark.parametrize("num_tokens", [3, 15, 300, 7000, 40000])
def test_strided_ids(dtype, num_tokens):
    base = draw_ids(num_tokens * 2, 24, 64, DTYPES[dtype], "cuda", strange=0.1)
    for ids in (base[::2, 3:11], base[:num_tokens, 5:12], base[5:6, :9].expand(num_tokens, 9)):
        check(ids, 64)


def test_32_choices_and_one():
    for num_tokens in (1, 4, 5, 3000):
        for top_k in (1, 32):
            check(draw_ids(num_tokens, top_k, 256, torch.int64, "cuda"), 256)


@pytest.mark.parametrize("entries", [8, 128, 2048, 65536, 1 << 20])
def test_the_public_op_and_run_to_run(entries):
    ids = draw_ids(*shaped(entries), 128, torch.int64, "cuda", strange=0.1)
    expected = sort_tokens_reference(ids, 128)
    for _ in range(20):
        assert_sorted(moe_ext.sort_tokens(ids, 128), expected)


@pytest.mark.parametrize("entries", [64, 2048, 65536, 1 << 18])
def test_ids_may_change_between_replays(entries):
    ids = draw_ids(*shaped(entries), 256, torch.int64, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moe_ext.sort_tokens(ids, 256)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = moe_ext.sort_tokens(ids, 256)
    for step in range(100):
        fresh = draw_ids(*shaped(entries), 1 + step * 4, torch.int64, "cuda", strange=step / 200)
        ids.copy_(fresh)
        for result in results:
            result.fill_(POISON)
        graph.replay()
        assert_sorted(results, sort_tokens_reference(fresh, 256))


@pytest.mark.parametrize("entries", [64, 2048, 65536, 1 << 18])
def test_runs_on_the_current_stream(entries):
    source = draw_ids(*shaped(entries), 128, torch.int64, "cuda")
    ids = torch.full_like(source, -1)
    moe_ext.sort_tokens(ids, 128)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        ids.copy_(source)
        results = moe_ext.sort_tokens(ids, 128)
    # A kernel on the default stream would have finished before the copy.
    stream.synchronize()
    assert_sorted(results, sort_tokens_reference(source, 128))


def test_does_not_synchronise():
    many = [draw_ids(*shaped(entries), 128, torch.int64, "cuda") for entries in (64, 2048, 1 << 18)]
    for ids in many:
        moe_ext.sort_tokens(ids, 128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in many:
            moe_ext.sort_tokens(ids, 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_op_refuses_outputs_of_the_wrong_size():
    sort = device_kernels(0).sort_tokens_configured
    ids = draw_ids(4, 2, 8, torch.int64, "cuda")

    def int32(size):
        return torch.empty(size, dtype=torch.int32, device="cuda")

    for sizes, argument in (
        ((8, 7, 8), "row_slot"),
        ((8, 8, 9), "slot_row"),
        ((0, 8, 8), "experts"),
    ):
        with pytest.raises(ValueError, match=argument):
            sort(ids, *map(int32, sizes), None, None, 0)
    many = draw_ids(1 << 17, 8, 8, torch.int64, "cuda")
    sizes = (8, many.numel(), many.numel())
    for scratch in (None, int32(10)):
        with pytest.raises(ValueError, match="`scratch` must have"):
            sort(many, *map(int32, sizes), scratch, None, 0)


@pytest.mark.multi_gpu
def test_a_device_that_is_not_the_current_one():
    ids = draw_ids(300, 8, 128, torch.int64, "cuda:1")
    assert_sorted(moe_ext.sort_tokens(ids, 128), sort_tokens_reference(ids, 128))
    assert torch.cuda.current_device() == 0
