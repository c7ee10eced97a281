"""`fused_moe` in CUDA graphs, on other streams and devices, with memory of the caller."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import fused_moe_reference
from support.fused_moe import LAYOUTS, OPERANDS, Sizes, integer_layer, random_layer
from support.graphs import assert_every_replay_is_right, captured
from support.tolerance import assert_close_to_reference, assert_same_bits

pytestmark = pytest.mark.gpu

layouts = pytest.mark.parametrize("layout", LAYOUTS)
SIZES = Sizes(num_tokens=33, num_experts=8, top_k=4, hidden=256, intermediate=192)


def workspace_of(sizes, num_tokens):
    size = moe_ext.fused_moe_workspace_size(
        num_tokens=num_tokens,
        top_k=sizes.top_k,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_experts=sizes.num_experts,
    )
    return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("layout", ["bf16", "tensor", "channel", "segments"])
def test_replays_with_fresh_routing(layout):
    """Back to back, several layers a graph: a race between kernels would show in some replay."""
    layer = integer_layer(layout, SIZES, "cuda")
    layer["topk_ids"] = layer["topk_ids"].int()
    outs = [torch.empty_like(layer["hidden_states"]) for _ in range(4)]
    workspace = workspace_of(SIZES, SIZES.num_tokens)

    def layers():
        for out in outs:
            moe_ext.fused_moe_out(**layer, out=out, workspace=workspace)

    # A few routings whose results are known: some experts empty, ids from elsewhere.
    routings = []
    for seed in range(20):
        generator = torch.Generator("cuda").manual_seed(seed)
        ids = torch.randint(
            -1, 2 + seed % 8, (33, 4), generator=generator, device="cuda", dtype=torch.int32
        )
        expected = fused_moe_reference(**layer | {"topk_ids": ids})
        routings.append((ids, expected))
    graph = captured(layers)
    assert_every_replay_is_right(graph, layer["topk_ids"], routings, outs)


@layouts
def test_weights_changed_in_place_take_effect(layout):
    layer = integer_layer(layout, SIZES, "cuda")
    other = integer_layer(layout, SIZES, "cuda", seed=2)
    out = torch.empty_like(layer["hidden_states"])
    graph = captured(lambda: moe_ext.fused_moe_out(**layer, out=out))
    graph.replay()
    assert_same_bits(out, fused_moe_reference(**layer))
    for name, tensor in other.items():
        if name not in OPERANDS or name in ("w13", "w2"):
            layer[name].copy_(tensor)
    graph.replay()
    assert_same_bits(out, fused_moe_reference(**layer))
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@layouts
def test_one_workspace_for_different_numbers_of_tokens(layout):
    workspace = workspace_of(SIZES, 300)
    for num_tokens in (300, 1, 33, 300, 0, 7, 128, 2):
        sizes = Sizes(num_tokens, SIZES.num_experts, SIZES.top_k, SIZES.hidden, SIZES.intermediate)
        layer = integer_layer(layout, sizes, "cuda", seed=num_tokens)
        out = moe_ext.fused_moe(**layer, workspace=workspace)
        assert_same_bits(out, fused_moe_reference(**layer))


@pytest.mark.parametrize("shift", [1, 8, 255])
def test_a_workspace_at_any_address(shift):
    layer = integer_layer("block", SIZES, "cuda")
    size = workspace_of(SIZES, SIZES.num_tokens).numel()
    memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
    out = moe_ext.fused_moe(**layer, workspace=memory[shift : shift + size])
    assert_same_bits(out, fused_moe_reference(**layer))
    assert bool((memory[:shift] == 0xFF).all())
    assert bool((memory[shift + size :] == 0xFF).all())


@layouts
def test_runs_on_the_current_stream(layout):
    layer = integer_layer(layout, SIZES, "cuda")
    moe_ext.fused_moe(**layer)
    source, expected = layer["hidden_states"], fused_moe_reference(**layer)
    layer["hidden_states"] = torch.zeros_like(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        layer["hidden_states"].copy_(source)
        out = moe_ext.fused_moe(**layer)
    # A kernel on the default stream would have finished before the copy.
    stream.synchronize()
    assert_same_bits(out, expected)


def test_two_streams_at_once():
    layers = [integer_layer("bf16", SIZES, "cuda", seed=seed) for seed in (1, 2)]
    expected = [fused_moe_reference(**layer) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(50):
        for stream, layer, own in zip(streams, layers, outs, strict=True):
            with torch.cuda.stream(stream):
                own.append(moe_ext.fused_moe(**layer))
    torch.cuda.synchronize()
    for own, one in zip(outs, expected, strict=True):
        for out in own:
            assert_same_bits(out, one)


@layouts
def test_does_not_synchronise(layout):
    layer = random_layer(layout, "swiglu", SIZES, "cuda")
    moe_ext.fused_moe(**layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_ext.fused_moe(**layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@layouts
def test_memory_beyond_inputs_and_output(layout):
    sizes = Sizes(600, 8, 4, 1024, 512)
    layer = random_layer(layout, "swiglu", sizes, "cuda")
    out = torch.empty_like(layer["hidden_states"])
    moe_ext.fused_moe_out(**layer, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moe_ext.fused_moe_out(**layer, out=out)
    used = torch.cuda.max_memory_allocated() - before
    rows = sizes.num_tokens * sizes.top_k
    assert used <= rows * ((sizes.intermediate + sizes.hidden) * 2 + 16) + 4 * 2**20
    workspace = workspace_of(sizes, sizes.num_tokens)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moe_ext.fused_moe_out(**layer, out=out, workspace=workspace)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.multi_gpu
def test_the_tensors_device_is_used_and_the_current_one_restored():
    with torch.cuda.device(0):
        layer = random_layer("block", "swiglu", SIZES, "cuda:1")
        out = moe_ext.fused_moe(**layer)
        assert out.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert_close_to_reference(out, fused_moe_reference(**layer, out_dtype=torch.float32))
