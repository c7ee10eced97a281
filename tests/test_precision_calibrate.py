"""`calibrate`: errors are those of the banks it is for, and super experts are found."""

from __future__ import annotations

import math

import moe_ext
import pytest
import torch
from moe_ext.nn import Experts, MoELayer
from moe_ext.precision import (
    ExpertBank,
    LayerPlan,
    PrecisionStats,
    calibrate,
    fused_moe_mixed_reference,
    plan_precision,
    realistic_layer,
)
from moe_ext.precision.layer_plan import STAGES
from support.fused_moe import Sizes, random_layer
from support.nn import experts_of, inputs_of
from torch import nn

SIZES = Sizes(num_tokens=64, num_experts=4, top_k=2, hidden=192, intermediate=96)
OPTIONS = {
    "plain": {},
    "channel": {"scales": "channel"},
    "mixed": {"scales": {"gate_up": "tensor", "down": "block"}},
    "interleaved": {"activation": "swiglu_oai", "gate_up_layout": "interleaved", "bias": True},
    "ungated": {"activation": "relu2"},
    "on input": {"apply_router_weight_on_input": True, "routed_scale": 1.5},
}


def layer_of(options):
    """Experts in BF16, a batch of them, and the layouts of scales."""
    options = dict(options)
    scales, bias = options.pop("scales", "block"), options.pop("bias", False)
    layer = random_layer("bf16", options.pop("activation", "swiglu"), SIZES)
    if bias:
        layer |= {
            "w13_bias": torch.randn(layer["w13"].shape[:2]).bfloat16(),
            "w2_bias": torch.randn(layer["w2"].shape[:2]).bfloat16(),
        }
    return experts_of(layer, **options), inputs_of(layer), scales


def outputs(bank, batch):
    return fused_moe_mixed_reference(batch[0], bank, *batch[1:], out_dtype=torch.float32).double()


@pytest.mark.parametrize("name", OPTIONS)
def test_errors_are_those_of_a_bank_with_one_stage_in_fp8(name):
    experts, batch, scales = layer_of(OPTIONS[name])
    stats = calibrate(experts, [batch], scales=scales, min_rows=1).layers["experts"]
    layouts = scales if isinstance(scales, dict) else dict.fromkeys(STAGES, scales)
    plan = LayerPlan(SIZES.num_experts)
    for stage, layout in layouts.items():
        plan = plan.with_fp8(stages=stage, scales=layout)
    in_fp8 = outputs(ExpertBank.from_experts(plan, bf16=experts), batch)
    plan = plan.with_bf16()
    in_bf16 = outputs(ExpertBank.from_experts(plan, bf16=experts), batch)
    assert stats.signal == pytest.approx(float(in_bf16.square().sum()), rel=0.01)
    assert stats.signal_max == pytest.approx(float(in_bf16.abs().max()), rel=0.02)
    # A bank rounds results to BF16, which adds to the errors.
    assert stats.fp8_noise == pytest.approx(float((in_fp8 - in_bf16).square().sum()), rel=0.05)
    for expert in range(SIZES.num_experts):
        for index, stage in enumerate(STAGES):
            one = plan.with_fp8(experts=expert, stages=stage)
            change = outputs(ExpertBank.from_experts(one, bf16=experts), batch) - in_bf16
            measured = float(stats.error[expert, index])
            assert measured == pytest.approx(float(change.square().sum()), rel=0.05)
            assert float(stats.worst[expert, index]) == pytest.approx(
                float(change.abs().max()), rel=0.2
            )
    assert stats.rows.tolist() == torch.bincount(batch[2].flatten(), minlength=4).tolist()
    assert not stats.from_weights.any()


def test_ranges_of_activations():
    experts, (hidden, weights, ids), _ = layer_of({})
    stats = calibrate(experts, [(hidden, weights, ids)]).layers["experts"]
    rows = hidden[(ids == 2).any(1)].float()
    assert float(stats.input_max[2, 0]) == float(rows.abs().max())
    assert float(stats.input_rms[2, 0]) == pytest.approx(float(rows.square().mean().sqrt()))
    gate, up = (rows @ experts.w13[2].float().T).chunk(2, 1)
    middle = (nn.functional.silu(gate) * up).bfloat16().float()
    assert float(stats.input_max[2, 1]) == pytest.approx(float(middle.abs().max()), rel=0.01)
    down = middle @ experts.w2[2].float().T
    assert float(stats.output_max[2, 1]) == pytest.approx(float(down.abs().max()), rel=0.01)
    assert float(stats.output_max[2, 0]) == pytest.approx(
        float(torch.cat([gate, up]).abs().max()), rel=0.01
    )


def test_a_huge_weight_is_a_finite_one(tmp_path):
    experts, batch, _ = layer_of({})
    with torch.no_grad():
        experts.w2[1, 3, 5] = 1e10
    stats = calibrate(experts, [batch], scales="tensor")
    weight = experts.w2[1].double()
    centred = weight - weight.mean()
    kurtosis = centred.pow(4).mean() / centred.square().mean() ** 2
    own = stats.layers["experts"].kurtosis[1, 1]
    assert float(own) == pytest.approx(float(kurtosis), rel=1e-4)
    stats.save(tmp_path / "stats")
    assert PrecisionStats.load(tmp_path / "stats").layers["experts"].kurtosis[1, 1] == own


def test_statistics_of_weights():
    experts, batch, _ = layer_of({})
    stats = calibrate(experts, [batch], scales="tensor").layers["experts"]
    weight = experts.w2[1].double()
    centred = weight - weight.mean()
    kurtosis = centred.pow(4).mean() / centred.square().mean() ** 2
    assert float(stats.kurtosis[1, 1]) == pytest.approx(float(kurtosis), rel=1e-4)
    rms = weight.square().mean().sqrt()
    assert float(stats.max_over_rms[1, 1]) == pytest.approx(
        float(weight.abs().max() / rms), rel=1e-5
    )
    q, scale = moe_ext.quantize_fp8(experts.w2[1], "tensor")
    lost = (q.double() * scale - weight).square().sum() / weight.square().sum()
    assert float(stats.weight_error[1, 1]) == pytest.approx(float(lost), rel=1e-4)


def test_batches_add_up():
    experts, (hidden, weights, ids), _ = layer_of({})
    whole = calibrate(experts, [(hidden, weights, ids)], min_rows=1).layers["experts"]
    batches = [
        {"hidden_states": hidden[:10], "topk_weights": weights[:10], "topk_ids": ids[:10]},
        (
            hidden[10:].reshape(2, 27, -1),
            weights[10:].reshape(2, 27, 2),
            ids[10:].reshape(2, 27, 2),
        ),
    ]
    parts = calibrate(experts, iter(batches), min_rows=1).layers["experts"]
    assert parts.num_tokens == whole.num_tokens == 64
    assert torch.equal(parts.rows, whole.rows)
    torch.testing.assert_close(parts.error, whole.error, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts.worst, whole.worst, rtol=1e-4, atol=0)
    assert parts.signal == pytest.approx(whole.signal, rel=1e-6)


def test_tokens_wait_in_bounded_memory(monkeypatch):
    experts, (hidden, weights, ids), _ = layer_of({})
    monkeypatch.setattr("moe_ext.precision.calibration._HELD_BYTES", 20 * 192 * 2)
    added = []
    add = moe_ext.precision._measure.Measurement.add

    def count(self, parts):
        added.append(sum(part.hidden_states.shape[0] for part in parts))
        add(self, parts)

    monkeypatch.setattr("moe_ext.precision._measure.Measurement.add", count)
    batches = [tuple(t[i : i + 8] for t in (hidden, weights, ids)) for i in range(0, 64, 8)]
    parts = calibrate(experts, batches, min_rows=1).layers["experts"]
    assert added == [24, 24, 16]
    whole = calibrate(experts, [(hidden, weights, ids)], min_rows=1).layers["experts"]
    torch.testing.assert_close(parts.error, whole.error, rtol=1e-5, atol=0)


def test_ids_of_experts_elsewhere_do_not_count():
    experts, (hidden, weights, ids), _ = layer_of({})
    local = Experts.from_state_dict(
        {"gate_up_proj": experts.w13, "down_proj": experts.w2}, first_expert=1, num_local=2
    )
    whole = calibrate(experts, [(hidden, weights, ids)], min_rows=1).layers["experts"]
    table = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    for batch in (
        (hidden, weights, ids),
        {"hidden_states": hidden, "topk_weights": weights, "topk_ids": ids, "expert_map": table},
    ):
        part = calibrate(local, [batch], min_rows=1).layers["experts"]
        torch.testing.assert_close(part.error, whole.error[1:3], rtol=1e-6, atol=0)
        assert torch.equal(part.rows, whole.rows[1:3])


# super experts


@pytest.mark.parametrize("seed", range(20))
def test_super_experts_and_their_stages_are_found(seed):
    layer = realistic_layer(128, 128, 64, seed=seed, outlier_channels=2)
    stats = calibrate(layer.experts(), [tuple(layer.tokens(2048, seed=seed))])
    planned = plan_precision(stats, byte_budget=0.03)
    first = {(choice.expert, choice.stage) for choice in planned.choices[: len(layer.planted)]}
    assert first == set(layer.planted)
    assert planned.extra_bytes <= 0.03 * planned.fp8_bytes


@pytest.mark.parametrize("scales", ["channel", "tensor"])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_found_with_other_scales_and_without_spikes(scales, seed):
    layer = realistic_layer(128, 128, 64, seed=seed, outlier_channels=2, spike_features=0)
    stats = calibrate(layer.experts(), [tuple(layer.tokens(2048, seed=seed))], scales=scales)
    planned = plan_precision(stats, byte_budget=0.03)
    # Of gate and up too, whose errors pass the large rows.
    assert {choice.expert for choice in planned.choices[:6]} == set(layer.super_experts)


def test_super_experts_that_no_token_chose_are_found_by_their_weights():
    layer = realistic_layer(64, 128, 64, seed=1, top_k=4, super_experts=2)
    hidden, weights, ids = layer.tokens(4096)
    kept = ~torch.isin(ids, torch.tensor(layer.super_experts))
    stats = calibrate(layer.experts(), [(hidden, weights, ids.where(kept, -1))])
    own = stats.layers["experts"]
    assert own.from_weights.nonzero().flatten().tolist() == list(layer.super_experts)
    planned = plan_precision(stats, byte_budget=0.05)
    assert {choice.expert for choice in planned.choices[:4]} == set(layer.super_experts)
    assert all(choice.from_weights for choice in planned.choices[:4])
    assert not any(choice.from_weights for choice in planned.choices[4:])


def test_ordinary_experts_are_judged_alike_by_rows_and_by_weights():
    layer = realistic_layer(32, 128, 64, top_k=4, super_experts=0, zipf=0.0)
    hidden, weights, ids = layer.tokens(2048)
    by_rows = calibrate(layer.experts(), [(hidden, weights, ids)]).layers["experts"]
    hidden_from = ids.where(ids >= 4, -1)  # of four experts nothing is seen
    by_weights = calibrate(layer.experts(), [(hidden, weights, hidden_from)]).layers["experts"]
    assert by_weights.from_weights.tolist() == [True] * 4 + [False] * 28
    expected = by_rows.error[:4] / by_rows.rows[:4, None] * by_weights.min_rows
    ratio = by_weights.error[:4] / expected
    assert bool(((ratio > 0.5) & (ratio < 2)).all()), ratio


def test_where_all_experts_are_rare_weights_decide():
    layer = realistic_layer(16, 128, 64, top_k=2, super_experts=1)
    stats = calibrate(layer.experts(), [tuple(layer.tokens(8))], min_rows=1000).layers["experts"]
    assert stats.from_weights.all()
    assert int(stats.error.sum(1).argmax()) == layer.super_experts[0]


def test_errors_of_stages_add_up():
    layer = realistic_layer(32, 256, 128, top_k=4, super_experts=0)
    stats = calibrate(layer.experts(), [tuple(layer.tokens(512))]).layers["experts"]
    assert stats.predicted_snr_db == pytest.approx(stats.fp8_snr_db, abs=0.2)
    assert 20 < stats.fp8_snr_db < 32
    assert stats.snr_db.shape == (32, 2)
    assert float(stats.snr_db.min()) > stats.fp8_snr_db


# layers and models


def moe_layer(seed=0, hidden=64):
    generator = torch.Generator().manual_seed(seed)
    layer = realistic_layer(8, hidden, 32, top_k=2, super_experts=1, seed=seed)
    router = nn.Linear(hidden, 8, bias=False)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, hidden, generator=generator))
    return MoELayer(router, layer.experts(), top_k=2), layer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(moe_layer(seed)[0] for seed in range(3))
        self.head = nn.Linear(64, 5, bias=False).bfloat16()

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = x + scale * nn.functional.rms_norm(block(x), (64,))
        return self.head(x)


def test_a_layer_takes_hidden_states():
    layer, source = moe_layer()
    hidden = source.tokens(200)[0]
    stats = calibrate(layer, [hidden[:120].reshape(4, 30, 64), hidden[120:]])
    assert list(stats.layers) == ["experts"]
    own = stats.layers["experts"]
    weights, ids = layer.route(hidden)
    direct = calibrate(layer.experts, [(hidden, weights, ids)]).layers["experts"]
    torch.testing.assert_close(own.error, direct.error, rtol=1e-5, atol=0)
    assert own.model_noise is None
    assert stats.model_share("experts") is None


def test_a_model_has_all_its_layers_measured_and_their_part_in_its_output():
    model = Model()
    batches = [torch.randn(40, 64).bfloat16(), {"x": torch.randn(2, 20, 64).bfloat16()}]
    before = [model(batches[0]), model(**batches[1])]
    stats = calibrate(model, batches)
    assert list(stats.layers) == [f"blocks.{i}.experts" for i in range(3)]
    assert torch.equal(model(batches[0]), before[0])  # hooks are gone
    shares = [stats.model_share(name) for name in stats.layers]
    assert float(sum(share.sum() for share in shares)) == pytest.approx(1.0)
    signal = sum(float(out.detach().double().square().sum()) for out in before)
    for index, (name, own) in enumerate(stats.layers.items()):
        assert own.num_tokens == 80
        assert own.model_signal == pytest.approx(signal, rel=1e-6)
        bank = ExpertBank.from_experts(LayerPlan(8), bf16=model.blocks[index].experts)
        other = Model()
        other.load_state_dict(model.state_dict())
        other.blocks[index].experts = bank
        noise = sum(
            float((out - wanted).detach().double().square().sum())
            for out, wanted in zip((other(batches[0]), other(**batches[1])), before, strict=True)
        )
        assert own.model_noise == pytest.approx(noise, rel=1e-3), name


def test_whose_part_in_the_output_may_be_left_out():
    stats = calibrate(Model(), [torch.randn(8, 64).bfloat16()], measure_model=False)
    assert all(own.model_noise is None for own in stats.layers.values())


def test_outputs_of_models():
    class Result:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(Model):
        form = staticmethod(Result)

        def forward(self, *args, **options):
            return self.form(super().forward(*args, **options))

    torch.manual_seed(0)
    model, batch = Wrapped(), (torch.randn(20, 64).bfloat16(), 0.5)
    noises = []
    for form in (Result, lambda out: (out, None), lambda out: {"x": out}):
        Wrapped.form = staticmethod(form)
        output = None if len(noises) < 2 else (lambda result: result["x"])
        stats = calibrate(model, [batch], model_output=output)
        noises.append([own.model_noise for own in stats.layers.values()])
    assert noises[0] == noises[1] == noises[2]
    assert all(noise > 0 for noise in noises[0])


# what is refused


class TwoLayers(nn.Module):
    """Two layers of experts, of which one gets no token."""

    def __init__(self, layer):
        super().__init__()
        self.used, self.idle = layer.experts(), layer.experts()

    def forward(self, *tokens):
        return self.used(*tokens)


def test_a_layer_without_a_token_is_judged_from_its_weights():
    source = realistic_layer(16, 128, 96, top_k=4, super_experts=1, seed=3)
    model = TwoLayers(source)
    stats = calibrate(model, [tuple(source.tokens(256))], measure_model=False)
    used, idle = stats.layers["used"], stats.layers["idle"]
    assert bool(idle.from_weights.all())
    assert (idle.num_tokens, int(idle.rows.sum()), idle.fp8_noise) == (0, 0, 0)
    for part in ("kurtosis", "max_over_rms", "weight_error"):
        assert torch.equal(getattr(idle, part), getattr(used, part))
    assert bool((idle.error > 0).all())
    (super_expert,) = source.super_experts
    assert int(idle.error[:, 1].argmax()) == super_expert
    # What FP8 changes in normal weights is about as much of an output in any layer.
    ratio = float(idle.error.sum()) / idle.signal
    assert 1e-4 < ratio < 0.1
    planned = plan_precision(stats, byte_budget=0.2)
    assert ("idle", super_expert, "down") in set(planned.plan.bf16())


def test_a_model_in_which_a_layer_gets_no_token_is_measured():
    source = realistic_layer(8, 64, 32, top_k=2, super_experts=1)
    stats = calibrate(TwoLayers(source), [tuple(source.tokens(64))])
    assert stats.layers["idle"].model_noise == 0
    assert not bool(stats.model_share("idle").any())


class Nothing(nn.Module):
    def forward(self, x):
        return None


def refused(*args, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        calibrate(*args, **options)
    return str(error.value)


def test_what_is_refused():
    layer, source = moe_layer()
    experts, batch = layer.experts, tuple(source.tokens(4))
    fp8 = Experts(2, 64, 32, dtype=torch.float8_e4m3fn, scales="block")
    assert refused(3, []) == "calibrate: `model_or_layer` must be an nn.Module, got 3"
    assert refused(nn.ReLU(), []) == (
        "calibrate: `model_or_layer` must be or hold moe_ext.nn.Experts, got ReLU without"
    )
    assert refused(fp8, []) == (
        'calibrate: the weights of "experts" must be bfloat16, which FP8 is compared with, got '
        "float8_e4m3fn"
    )
    assert refused(experts, []) == (
        'calibrate: `batches` must hold tokens that reach "experts", got none'
    )
    assert refused(experts, [batch[0]]) == (
        "calibrate: a batch of Experts must be a tuple (hidden_states, topk_weights, topk_ids), "
        "got Tensor"
    )
    assert refused(layer, [3]) == (
        "calibrate: a batch must be a tensor, a tuple of arguments or a mapping of named ones, "
        "got 3"
    )
    assert refused(experts, [batch], min_rows=0) == (
        "calibrate: `min_rows` must be an int of at least 1, got 0"
    )
    assert refused(experts, [batch], scales="row") == (
        'calibrate: `scales` must be one of "block", "channel", "tensor", or one for each of '
        '"gate_up" and "down", got \'row\''
    )
    assert refused(experts, [batch], scales={"down": "block"}).endswith("got {'down': 'block'}")
    hidden = torch.randn(4, 64).bfloat16()
    assert refused(Model(), [hidden], model_output=lambda out: None) == (
        "calibrate: `model_output` must be a tensor, got None"
    )
    assert refused(nn.Sequential(layer, Nothing()), [hidden]) == (
        "calibrate: the model must return a tensor, something with `logits`, or a tuple that "
        "begins with a tensor, got None; `model_output` may say what counts"
    )


def test_an_infinite_output_is_named():
    layer, source = moe_layer()
    hidden, weights, ids = source.tokens(64)
    with torch.no_grad():
        layer.experts.w2[3, 0, 0] = math.inf
    message = refused(layer.experts, [(hidden, weights, ids)], min_rows=1)
    assert message.startswith('calibrate: the output of "experts" must be finite, got ')
    assert message.endswith(" of expert 3")


@pytest.mark.parametrize("min_rows", [1, 1000])
@pytest.mark.parametrize("part", ["hidden_states", "topk_weights"])
def test_a_batch_that_is_not_finite_is_named(part, min_rows):
    layer, source = moe_layer()
    batches = [source.tokens(64, seed) for seed in range(3)]
    getattr(batches[2], part)[5, 1] = math.inf
    message = refused(layer.experts, [tuple(batch) for batch in batches], min_rows=min_rows)
    assert message == (
        f'calibrate: the {part} of "experts" must be finite, got inf in row 5 of batch 2, counted '
        "from 0"
    )
    batches[2].topk_ids[5] = -1  # taken by no expert
    calibrate(layer.experts, [tuple(batch) for batch in batches], min_rows=min_rows)


def test_the_layer_that_makes_inputs_infinite_is_the_one_that_is_named():
    (first, source), (second, _) = moe_layer(), moe_layer()
    hidden = source.tokens(64).hidden_states
    model = nn.Sequential(first, second)
    with torch.no_grad():
        first.experts.w2[:, 0, 0] = math.inf
    message = refused(model, [hidden], min_rows=1)
    assert message.startswith('calibrate: the output of "0.experts" must be finite, got ')
    hidden[9, 0] = math.nan
    assert refused(model, [hidden], min_rows=1) == (
        'calibrate: the hidden_states of "0.experts" must be finite, got nan in row 9 of batch 0, '
        "counted from 0"
    )
