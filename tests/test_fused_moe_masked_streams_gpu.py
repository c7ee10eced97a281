"""`fused_moe_masked` in CUDA graphs, on other streams and devices."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import fused_moe_masked_reference
from support.fused_moe import LAYOUTS, integer_layer
from support.fused_moe_masked import (
    MASKED_OPERANDS,
    assert_masked_is_right,
    assert_rest_untouched,
    in_buffers,
    masked_layer,
    rows_that_count,
    sizes_of,
)
from support.graphs import assert_every_replay_is_right, captured
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

layouts = pytest.mark.parametrize("layout", LAYOUTS)
COUNTS = (0, 33, 7, 64, 1, 0, 40, 65)
MAX_ROWS = 65


def integers(layout, seed=1, counts=COUNTS):
    """All rows hold numbers, so that counts may change."""
    sizes = sizes_of(COUNTS, MAX_ROWS, 256, 192)
    layer = in_buffers(integer_layer(layout, sizes, "cuda", seed), (MAX_ROWS,) * 8, MAX_ROWS)
    return layer | {"counts": torch.tensor(counts, dtype=torch.int32, device="cuda")}


def expect(out, layer):
    expected = fused_moe_masked_reference(**layer)
    assert_same_bits(rows_that_count(out, layer), rows_that_count(expected, layer))


@layouts
@pytest.mark.parametrize("expected_rows", [None, 0, 8])
def test_counts_may_change_between_replays(layout, expected_rows):
    """Also to more rows than were expected when the kernels were chosen."""
    layer = integers(layout)
    out = torch.empty_like(layer["hidden_states"])
    options = {"out": out, "expected_rows": expected_rows}
    graph = captured(lambda: moe_ext.fused_moe_masked_out(**layer, **options))
    for counts in (
        COUNTS,
        (65, 0, 64, 1, 0, 0, 9, 2),
        (0,) * 8,
        (-1, 66, 2**31 - 1, 65, 8, 8, 0, 3),
    ):
        layer["counts"].copy_(torch.tensor(counts, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expect(out, layer)
        assert_rest_untouched(out, layer)


@pytest.mark.parametrize("layout", ["bf16", "tensor", "channel", "segments"])
def test_replays_with_fresh_counts(layout):
    """Back to back, several layers a graph: a race between kernels would show in some replay."""
    layer = integers(layout)
    outs = [torch.empty_like(layer["hidden_states"]) for _ in range(4)]

    def layers():
        for out in outs:
            moe_ext.fused_moe_masked_out(**layer, out=out)

    draws = []
    for seed in range(20):
        generator = torch.Generator("cuda").manual_seed(seed)
        shape, most = (len(COUNTS),), 2 + 4 * seed
        counts = torch.randint(-1, most, shape, generator=generator, device="cuda").int()
        expected = torch.full_like(outs[0], float("nan"))
        fused_moe_masked_reference(**layer | {"counts": counts}, out=expected)
        draws.append((counts, expected))
    graph = captured(layers)
    assert_every_replay_is_right(graph, layer["counts"], draws, outs)


@layouts
def test_counts_and_rows_of_the_kernel_before(layout):
    """Nothing may be read before the kernel in front, which writes both, has ended."""
    layer = integers(layout)
    source = {name: layer[name].clone() for name in ("hidden_states", "counts")}
    expected = fused_moe_masked_reference(**layer)
    moe_ext.fused_moe_masked(**layer)
    for _ in range(20):
        layer["hidden_states"].fill_(float("nan"))
        layer["counts"].fill_(MAX_ROWS)
        torch.cuda._sleep(1_000_000)
        layer["hidden_states"].copy_(source["hidden_states"])
        layer["counts"].copy_(source["counts"])
        out = moe_ext.fused_moe_masked(**layer)
        assert_same_bits(rows_that_count(out, layer), rows_that_count(expected, layer))


@layouts
def test_weights_changed_in_place_take_effect(layout):
    layer, other = integers(layout), integers(layout, seed=2)
    out = torch.empty_like(layer["hidden_states"])
    graph = captured(lambda: moe_ext.fused_moe_masked_out(**layer, out=out))
    graph.replay()
    expect(out, layer)
    for name, tensor in other.items():
        if name not in MASKED_OPERANDS or name in ("w13", "w2"):
            layer[name].copy_(tensor)
    graph.replay()
    expect(out, layer)
    expect(moe_ext.fused_moe_masked(**layer), layer)


@layouts
def test_runs_on_the_current_stream(layout):
    layer = integers(layout)
    moe_ext.fused_moe_masked(**layer)
    source, expected = layer["hidden_states"], fused_moe_masked_reference(**layer)
    layer["hidden_states"] = torch.zeros_like(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        layer["hidden_states"].copy_(source)
        out = moe_ext.fused_moe_masked(**layer)
    # A kernel on the default stream would have finished before the copy.
    stream.synchronize()
    assert_same_bits(rows_that_count(out, layer), rows_that_count(expected, layer))


@pytest.mark.parametrize("layout", ["bf16", "block"])
def test_two_streams_at_once(layout):
    layers = [integers(layout, seed=seed) for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(50):
        for stream, layer, own in zip(streams, layers, outs, strict=True):
            with torch.cuda.stream(stream):
                own.append(moe_ext.fused_moe_masked(**layer))
    torch.cuda.synchronize()
    for own, layer in zip(outs, layers, strict=True):
        for out in own:
            expect(out, layer)


@layouts
def test_does_not_synchronise(layout):
    layer = integers(layout)
    moe_ext.fused_moe_masked(**layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_ext.fused_moe_masked(**layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@layouts
@pytest.mark.parametrize("expected_rows", [None, 1])
def test_memory_beyond_inputs_and_output(layout, expected_rows):
    layer = masked_layer(layout, "swiglu", (600, 0, 3, 40), 4000, 1024, 512, "cuda")
    out = torch.empty_like(layer["hidden_states"], memory_format=torch.contiguous_format)
    options = {"out": out, "expected_rows": expected_rows}
    moe_ext.fused_moe_masked_out(**layer, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moe_ext.fused_moe_masked_out(**layer, **options)
    used = torch.cuda.max_memory_allocated() - before
    of_a_row = 2 * 512 if layout == "bf16" else 2 * 512 + 1024 + 4 * 8
    assert used <= 4 * 4000 * of_a_row + 4 * 2**20


@pytest.mark.multi_gpu
def test_the_tensors_device_is_used_and_the_current_one_restored():
    with torch.cuda.device(0):
        layer = masked_layer("block", device="cuda:1")
        out = moe_ext.fused_moe_masked(**layer)
        assert out.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert_masked_is_right(out, layer)
