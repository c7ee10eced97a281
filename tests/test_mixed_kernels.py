"""Which kernels the GEMMs of a mixture get where they run beside one another, and in what room."""

from __future__ import annotations

import pytest
from moe_ext._configs import all_configs, planner
from moe_ext._fused_moe_scales import WeightScale
from moe_ext.precision import _mixed_kernels

NUM_EXPERTS = 128
SIZES = (2048, 768, NUM_EXPERTS)
SWIGLU = ("swiglu", True, 1.0, float("inf"), "concatenated")
SM_COUNT = 132
scales = pytest.mark.parametrize("scale", [WeightScale("1x128"), WeightScale("row")], ids=str)


def choose(bf16, num_slots, scale, sizes=SIZES, *, batch_invariant=False):
    """The kernels of a layer with so many experts in BF16: gate_up of both, then down."""
    counts = (sizes[2] - bf16, 0, bf16, 0)
    no_bias = (False, False)
    chosen = _mixed_kernels._choose(
        counts, num_slots, sizes, SWIGLU, (scale, scale), no_bias, "promoted", batch_invariant, 132
    )
    configs = [all_configs()[index] for index in chosen]
    assert [config.dtype for config in configs] == ["fp8", "bf16"] * 2
    return configs


def of_shape(config):
    return config.tile_weights, config.tile_tokens, config.ctas_per_sm, config.split_k


@scales
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64])
def test_few_experts_in_bf16_have_tiles_that_fit_beside_those_in_fp8(scale, num_tokens):
    fp8_first, bf16_first, fp8_second, bf16_second = choose(3, 8 * num_tokens, scale)
    assert fp8_first.tile_tokens < _mixed_kernels.FEW_TOKENS
    assert of_shape(fp8_first) == of_shape(bf16_first)
    assert of_shape(fp8_second) == of_shape(bf16_second)


@scales
@pytest.mark.parametrize("num_tokens", [1, 4, 8])
def test_few_rows_leave_large_places(scale, num_tokens):
    sizes = {of_shape(config) for config in choose(3, 8 * num_tokens, scale)}
    assert sizes == {(64, 32, 2, 1)}
    small = next(c.index for c in all_configs() if c.id == "layer_fp8b_w64_t16")
    large = _mixed_kernels._with_large_places(small)
    assert all_configs()[large].id == "layer_fp8b_w64_t32"
    assert _mixed_kernels._with_large_places(large) == large


@scales
def test_half_of_the_experts_have_large_tiles_from_some_rows_on(scale):
    sizes = {}
    for rows in (1, 4, 8, 16, 32):
        configs = choose(NUM_EXPERTS // 2, rows * NUM_EXPERTS, scale)
        sizes[rows] = [(c.tile_weights, c.tile_tokens) for c in configs]
    large = (128, 128)
    assert large not in sizes[4]
    assert sizes[1] == [(64, 16), (64, 32)] * 2
    assert sizes[8][1::2] == [large] * 2 != sizes[8][::2]
    assert sizes[16] == [large] * 4
    few_experts = choose(4, 16 * 8, scale, (2048, 768, 8))
    invariant = choose(64, 16 * NUM_EXPERTS, scale, batch_invariant=True)
    for configs in (few_experts, invariant):
        assert [(c.tile_weights, c.tile_tokens) for c in configs] != sizes[16]


@pytest.mark.parametrize("config", all_configs(), ids=lambda config: config.id)
def test_room_is_whole_clusters_and_never_all(config):
    resident = SM_COUNT * config.ctas_per_sm // config.split_k * config.split_k
    for num_experts in (2, 8, 128, 4096):
        for bf16 in range(1, num_experts, max(1, num_experts // 16)):
            few = 4 * bf16 < num_experts
            assert planner().are_few(bf16, num_experts) == few
            for slots in (1, num_experts, num_experts + 1):
                spared = planner().spared_ctas(slots, num_experts, bf16, config.index, SM_COUNT)
                assert spared % config.split_k == 0
                assert 0 <= spared < resident
                # Of thousands of experts one has no CTA to itself.
                if few and slots <= num_experts and 64 * bf16 >= num_experts:
                    assert spared > 0
                if not few or slots > num_experts:
                    assert spared == 0


def test_room_grows_with_the_experts_in_bf16():
    config = next(c for c in all_configs() if c.id == "layer_fp8b_w64_t16")
    room = [planner().spared_ctas(128, 128, bf16, config.index, SM_COUNT) for bf16 in range(1, 32)]
    assert room == sorted(set(room))
    assert room[2] == 396 * 18 // (18 + 125)
