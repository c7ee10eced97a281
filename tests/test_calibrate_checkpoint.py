"""`calibrate_checkpoint`: the statistics that `calibrate` finds with the same tokens."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from moe_ext import topk_routing
from moe_ext.nn import Experts
from moe_ext.precision import calibrate, calibrate_checkpoint, plan_precision, realistic_layer
from moe_ext.precision.stats import NUMBERS, SHAPES

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file
from support.nn import packed, per_expert

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 128, 64, 300
SOFTMAX = {"model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts_per_tok": TOP_K}
SIGMOID = {
    "model_type": "deepseek_v3",
    "norm_topk_prob": True,
    "num_experts_per_tok": TOP_K,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
CONFIGS = {
    "qwen3": (SOFTMAX, {}),
    "qwen3 without renormalising": (SOFTMAX | {"norm_topk_prob": False}, {"renormalize": False}),
    "mixtral": ({"model_type": "mixtral", "num_experts_per_tok": TOP_K}, {}),
    "deepseek": (
        SIGMOID,
        {"scoring": "sigmoid", "scale": 2.5, "num_groups": 4, "topk_groups": 2},
    ),
    "deepseek v2": (
        SIGMOID | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
        {"scale": 2.5, "num_groups": 4, "topk_groups": 2},
    ),
}


def prefix_of(number):
    return f"model.layers.{number}.mlp.experts"


def write_model(directory, config, numbers=(0, 3), correction=False):
    """Write a checkpoint of realistic layers; return their experts and routers."""
    directory.mkdir()
    found, tensors = {}, {}
    for number in numbers:
        layer = realistic_layer(
            EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K, super_experts=1, seed=number
        )
        router = (torch.randn(EXPERTS, HIDDEN) / 8).bfloat16()
        bias = torch.randn(EXPERTS) if correction else None
        tensors |= per_expert({"w13": layer.w13, "w2": layer.w2}, f"{prefix_of(number)}.")
        tensors[f"model.layers.{number}.mlp.gate.weight"] = router
        if bias is not None:
            tensors[f"model.layers.{number}.mlp.gate.e_score_correction_bias"] = bias
        found[number] = (layer, router, bias)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"hidden_act": "silu"} | config))
    return found


def assert_same(own, wanted):
    for name in NUMBERS:
        assert getattr(own, name) == getattr(wanted, name), name
    for name in SHAPES:
        assert torch.equal(getattr(own, name), getattr(wanted, name)), name


@pytest.mark.parametrize("name", CONFIGS)
def test_the_checkpoints_router_chooses(tmp_path, name):
    config, options = CONFIGS[name]
    correction = config["model_type"] == "deepseek_v3"
    model = write_model(tmp_path / "in", config, correction=correction)
    hidden = {
        f"layers.{n}.hidden_states": layer.tokens(TOKENS, n).hidden_states.view(3, -1, HIDDEN)
        for n, (layer, _, _) in model.items()
    }
    save_file(hidden, tmp_path / "data")
    done = []
    found = calibrate_checkpoint(
        tmp_path / "in", tmp_path / "data", progress=lambda *counts: done.append(counts)
    )
    assert (found.without_tokens, done) == ((), [(1, 2), (2, 2)])
    assert list(found.stats.layers) == [prefix_of(0), prefix_of(3)]
    for number, (layer, router, bias) in model.items():
        rows = hidden[f"layers.{number}.hidden_states"].view(-1, HIDDEN)
        routing = topk_routing(
            rows.float() @ router.float().T, TOP_K, correction_bias=bias, **options
        )
        wanted = calibrate(layer.experts(), [(rows, *routing)]).layers["experts"]
        assert_same(found.stats.layers[prefix_of(number)], wanted)


@pytest.mark.parametrize("base", ["layers.{}", "model.layers.{}.mlp.experts"])
def test_routing_may_be_in_the_data(tmp_path, base):
    model = write_model(tmp_path / "in", {"model_type": "unheard of"})
    data, wanted = {}, {}
    for number, (layer, _, _) in model.items():
        tokens = layer.tokens(TOKENS, seed=5)
        wanted[prefix_of(number)] = calibrate(layer.experts(), [tuple(tokens)], scales="channel")
        for part, tensor in tokens._asdict().items():
            data[f"{base.format(number)}.{part}"] = tensor
    save_file(data, tmp_path / "data")
    found = calibrate_checkpoint(tmp_path / "in", tmp_path / "data", scales="channel").stats
    for name, own in found.layers.items():
        assert_same(own, wanted[name].layers["experts"])
    planned = plan_precision(found, byte_budget=0.2)
    for number, (layer, _, _) in model.items():
        assert (prefix_of(number), layer.super_experts[0], "down") in set(planned.plan.bf16())


def test_gpt_oss_is_packed_transposed_and_interleaved_with_biases(tmp_path):
    layer = realistic_layer(EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K)
    biases = {
        "w13_bias": torch.randn(EXPERTS, 2 * INTERMEDIATE).bfloat16(),
        "w2_bias": torch.randn(EXPERTS, HIDDEN).bfloat16(),
    }
    prefix, router = "model.layers.4.mlp", torch.randn(EXPERTS, HIDDEN).bfloat16() / 8
    router_bias = torch.randn(EXPERTS).bfloat16()
    tensors = packed(
        {"w13": layer.w13, "w2": layer.w2} | biases, f"{prefix}.experts.", transposed=True
    )
    tensors |= {f"{prefix}.router.weight": router, f"{prefix}.router.bias": router_bias}
    (tmp_path / "in").mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "in/model.safetensors")
    config = {"model_type": "gpt_oss", "num_experts_per_tok": TOP_K, "hidden_act": "silu"}
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    hidden = layer.tokens(TOKENS).hidden_states
    save_file({"layers.4.hidden_states": hidden}, tmp_path / "data")
    own = calibrate_checkpoint(tmp_path / "in", tmp_path / "data").stats.layers
    experts = Experts.from_state_dict(
        tensors,
        prefix=f"{prefix}.experts",
        activation="swiglu_oai",
        gate_up_layout="interleaved",
    )
    logits = hidden.float() @ router.float().T + router_bias.float()
    routing = topk_routing(logits, TOP_K, scoring="softmax_topk")
    wanted = calibrate(experts, [(hidden, *routing)]).layers["experts"]
    assert_same(own[f"{prefix}.experts"], wanted)


def test_layers_without_data_are_judged_from_their_weights(tmp_path):
    model = write_model(tmp_path / "in", SOFTMAX)
    save_file({"layers.3.hidden_states": model[3][0].tokens(64).hidden_states}, tmp_path / "data")
    found = calibrate_checkpoint(tmp_path / "in", tmp_path / "data")
    assert found.without_tokens == (prefix_of(0),)
    assert bool(found.stats.layers[prefix_of(0)].from_weights.all())
    error = found.stats.layers[prefix_of(0)].error
    assert int(error[:, 1].argmax()) == model[0][0].super_experts[0]


@pytest.mark.parametrize("part", ["hidden_states", "topk_weights"])
@pytest.mark.parametrize("base", ["layers.3", prefix_of(3)])
def test_a_value_that_is_not_finite_is_found_in_the_data(tmp_path, part, base):
    model = write_model(tmp_path / "in", SOFTMAX)
    data = {
        f"{name}.{of}": tensor.clone()
        for name, number in (("layers.0", 0), (base, 3))
        for of, tensor in model[number][0].tokens(64)._asdict().items()
    }
    data[f"{base}.{part}"].view(64, -1)[7, 1] = math.nan
    save_file(data, tmp_path / "data")
    said = refused(tmp_path, min_rows=1)
    assert said == (f'"{base}.{part}" of TMP/data must be finite, got nan in row 7, counted from 0')
    # A row that no expert takes may hold anything.
    data[f"{base}.topk_ids"][7] = -1
    save_file(data, tmp_path / "data")
    calibrate_checkpoint(tmp_path / "in", tmp_path / "data", min_rows=1)


def test_an_input_beyond_bf16_is_found_where_the_router_chooses(tmp_path):
    model = write_model(tmp_path / "in", SOFTMAX)
    hidden = model[0][0].tokens(64).hidden_states.double().view(2, 32, HIDDEN)
    hidden[1, 3, 5] = 1e300
    save_file({"layers.0.hidden_states": hidden}, tmp_path / "data")
    assert refused(tmp_path) == (
        '"layers.0.hidden_states" of TMP/data must be finite, got inf in row 35, counted from 0'
    )


def refused(tmp_path, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        calibrate_checkpoint(tmp_path / "in", tmp_path / "data", **options)
    return str(error.value).replace(str(tmp_path), "TMP").removeprefix("calibrate_checkpoint: ")


HIDDEN_STATES = torch.ones(4, HIDDEN).bfloat16()
IDS = torch.zeros(4, TOP_K, dtype=torch.int64)
DATA = {
    "another layer": (
        {"layers.1.hidden_states": HIDDEN_STATES},
        "TMP/data must hold hidden_states, topk_ids, topk_weights of layers (layers.0, layers.3, "
        '...), got "layers.1.hidden_states"',
    ),
    "another part": (
        {"layers.0.input_ids": IDS},
        "TMP/data must hold hidden_states, topk_ids, topk_weights of layers (layers.0, layers.3, "
        '...), got "layers.0.input_ids"',
    ),
    "no hidden states": (
        {"layers.0.topk_ids": IDS},
        f'TMP/data must hold hidden_states of "{prefix_of(0)}", alone or with topk_ids and '
        "topk_weights, got topk_ids",
    ),
    "no weights": (
        {"layers.0.topk_ids": IDS, "layers.0.hidden_states": HIDDEN_STATES},
        f'TMP/data must hold hidden_states of "{prefix_of(0)}", alone or with topk_ids and '
        "topk_weights, got topk_ids, hidden_states",
    ),
    "columns": (
        {"layers.0.hidden_states": HIDDEN_STATES[:, :8].contiguous()},
        f'the hidden_states of "{prefix_of(0)}" must be floating and have 128 columns, got '
        "torch.bfloat16 (4, 8)",
    ),
    "ids of another model": (
        {
            "layers.0.hidden_states": HIDDEN_STATES,
            "layers.0.topk_ids": IDS + 98,
            "layers.0.topk_weights": IDS.float(),
        },
        f'topk_ids of "{prefix_of(0)}" must be below the {EXPERTS} experts of the checkpoint, got '
        "98",
    ),
    "rows": (
        {
            "layers.0.hidden_states": HIDDEN_STATES,
            "layers.0.topk_ids": IDS[:3].clone(),
            "layers.0.topk_weights": IDS[:3].float(),
        },
        f'topk_ids and topk_weights of "{prefix_of(0)}" must be whole and floating, of one shape, '
        "with a row for each of 4 hidden states, got torch.int64 (3, 2) and torch.float32 (3, 2)",
    ),
    "no tokens": (
        {"layers.0.hidden_states": HIDDEN_STATES[:0].clone()},
        "TMP/data must hold tokens that reach an expert, got none: `layers.N.hidden_states`, N "
        "being the number of a layer",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_does_not_fit(tmp_path, name):
    tensors, message = DATA[name]
    write_model(tmp_path / "in", SOFTMAX)
    save_file(tensors, tmp_path / "data")
    assert refused(tmp_path) == message


WITHOUT = {name: value for name, value in SOFTMAX.items() if name != "norm_topk_prob"}
MODELS = {
    "unknown": (
        {"model_type": "other"},
        "`model_type` of config.json must be one of mixtral, qwen2_moe, qwen3_moe, qwen3_next, "
        "olmoe, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, gpt_oss where the data has no "
        f'topk_ids and topk_weights for "{prefix_of(0)}", got "other"',
    ),
    "without a key": (
        WITHOUT,
        'config.json must say "norm_topk_prob", as models of qwen3_moe do, got none',
    ),
    "without top k": (
        {"model_type": "mixtral"},
        'config.json must say "num_experts_per_tok", an int, got none',
    ),
    "other router": (
        SOFTMAX | {"model_type": "gpt_oss"},
        'the checkpoint must have "model.layers.0.mlp.router.weight", or the data topk_ids and '
        f'topk_weights for "{prefix_of(0)}", got neither',
    ),
    "activation": (
        SOFTMAX | {"hidden_act": "tanh"},
        '`hidden_act` of config.json must be one of "silu" for gated experts, got "tanh"; '
        "`activation` may say it",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_not_known(tmp_path, name):
    config, message = MODELS[name]
    write_model(tmp_path / "in", config)
    if config.get("model_type") == "gpt_oss":  # whose experts are packed and interleaved
        layer = realistic_layer(EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K)
        tensors = {f"{prefix_of(0)}.gate_up_proj": layer.w13, f"{prefix_of(0)}.down_proj": layer.w2}
        save_file(tensors, tmp_path / "in/model.safetensors")
    save_file({"layers.0.hidden_states": HIDDEN_STATES}, tmp_path / "data")
    assert refused(tmp_path) == message


def save_qwen3_moe(transformers, directory):
    """Save a model of three layers, the middle one without experts."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(directory)


def test_token_ids_become_hidden_states_by_the_model(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    save_qwen3_moe(transformers, tmp_path / "in")
    ids = torch.randint(64, (3, 50))
    save_file({"input_ids": ids}, tmp_path / "data")
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    capsys.readouterr()
    own = calibrate_checkpoint(tmp_path / "in", tmp_path / "data").stats
    assert capsys.readouterr() == ("", "")
    seen = {}
    for number in (0, 2):

        def keep(module, args, number=number):
            seen.setdefault(f"layers.{number}.hidden_states", []).append(args[0])

        model.model.layers[number].mlp.register_forward_pre_hook(keep)
    with torch.no_grad():
        for sequence in ids:
            model(input_ids=sequence[None])
    save_file({name: torch.cat(parts) for name, parts in seen.items()}, tmp_path / "states")
    wanted = calibrate_checkpoint(tmp_path / "in", tmp_path / "states").stats
    assert list(own.layers) == [prefix_of(0), prefix_of(2)]
    for name, layer in wanted.layers.items():
        assert layer.num_tokens == ids.numel()
        assert_same(own.layers[name], layer)


def test_token_ids_beyond_the_vocabulary(tmp_path):
    transformers = pytest.importorskip("transformers")
    save_qwen3_moe(transformers, tmp_path / "in")
    save_file({"input_ids": torch.tensor([[1, 64, 3]])}, tmp_path / "data")
    assert refused(tmp_path) == (
        "input_ids must be from 0 to 63, the model's vocabulary, got 1 to 64"
    )


def test_token_ids_that_are_none(tmp_path):
    write_model(tmp_path / "in", SOFTMAX)
    save_file({"input_ids": torch.ones(4)}, tmp_path / "data")
    assert refused(tmp_path) == (
        "input_ids must be whole numbers of shape (sequences, length), got torch.float32 (4,)"
    )


def test_token_ids_need_transformers(tmp_path, monkeypatch):
    write_model(tmp_path / "in", SOFTMAX)
    save_file({"input_ids": torch.ones(1, 4, dtype=torch.int32)}, tmp_path / "data")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"`transformers` must be installed for data "):
        calibrate_checkpoint(tmp_path / "in", tmp_path / "data")


def test_checkpoints_that_cannot_be_calibrated(tmp_path):
    write_model(tmp_path / "in", SOFTMAX)
    save_file({"layers.0.hidden_states": HIDDEN_STATES}, tmp_path / "data")
    path = tmp_path / "in/model.safetensors"
    tensors = load_file(path)
    fp8 = {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if ".experts." in n}
    save_file(tensors | fp8 | {f"{n}_scale": torch.ones(1) for n in fp8}, path)
    assert refused(tmp_path) == (
        f'the experts of "{prefix_of(0)}" must be bfloat16, float16 or float32, got float8_e4m3fn'
    )
    save_file({"x": torch.ones(1)}, path)
    assert refused(tmp_path) == "TMP/in must have layers of experts, got none"
    assert refused(tmp_path, min_rows=0) == "`min_rows` must be an int of at least 1, got 0"
