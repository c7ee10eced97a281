"""`register`, and whole models after it: generate, torch.compile, device maps, FP8, CUDA graphs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from moe_ext.integrations.transformers import NAME, register
from support.tiny_models import (
    ModelClass,
    experts_of,
    output_of,
    pinned_routing,
    recorded_routing,
    tiny_model,
    tokens,
)
from support.tolerance import assert_same_bits, dissimilarity
from torch import nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

# What Transformers warns of is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

QWEN3 = ModelClass("qwen3_moe", "Qwen3MoeExperts")
GPT_OSS = ModelClass("gpt_oss", "GptOssExperts")
PHI = ModelClass("phimoe", "PhimoeExperts")


def test_moe_ext_does_not_import_transformers():
    script = "import sys, moe_ext; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_the_name_is_known_after_registration():
    register()
    register()
    model = tiny_model(QWEN3)
    model.set_experts_implementation(NAME)
    assert model.config._experts_implementation == NAME
    config = model.config
    config._experts_implementation = None
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=NAME)
    assert made.config._experts_implementation == NAME


def test_what_is_no_model_with_experts_is_refused():
    with pytest.raises(
        ValueError, match=r"must be a transformers\.PreTrainedModel or None, got dict"
    ):
        register({})
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match=r"must have experts .*, got LlamaForCausalLM without"):
        register(transformers.LlamaForCausalLM(config))


def test_a_refused_model_is_left_as_it_was():
    model = tiny_model(GPT_OSS)
    strides = [experts.gate_up_proj.stride() for experts in experts_of(model)]
    experts_of(model)[-1].float()
    with pytest.raises(ValueError, match="gate_up_proj of GptOssExperts must be bfloat16"):
        register(model)
    assert [experts.gate_up_proj.stride() for experts in experts_of(model)] == strides
    assert model.config._experts_implementation == "eager"


def test_experts_of_a_form_that_is_not_known_are_refused():
    # As those of later releases that normalise each expert's result.
    model = tiny_model(QWEN3)
    experts_of(model)[0].has_post_expert_norm = True
    with pytest.raises(ValueError, match="has_post_expert_norm of Qwen3MoeExperts must be False"):
        register(model)
    register()
    model.set_experts_implementation(NAME)
    with pytest.raises(ValueError, match="has_post_expert_norm of Qwen3MoeExperts must be False"):
        output_of(model, tokens("cpu"))
    experts_of(model)[0].has_post_expert_norm = False
    register(model)


def test_sizes_that_no_kernel_takes_are_refused():
    model = tiny_model(QWEN3)
    experts = experts_of(model)[0]
    experts.down_proj = nn.Parameter(experts.down_proj[..., :-2].detach())
    with pytest.raises(ValueError, match=r"down_proj of Qwen3MoeExperts must .* multiples of 8"):
        register(model)


def test_registration_packs():
    model = tiny_model(GPT_OSS)
    register(model)
    for experts in experts_of(model):
        assert experts.gate_up_proj.stride(1) == experts.down_proj.stride(1) == 1


def test_a_saved_model_loads_again(tmp_path):
    model, ids = tiny_model(GPT_OSS), tokens("cpu")
    register(model)
    out = output_of(model, ids)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation=NAME
    )
    assert_same_bits(output_of(loaded, ids), out)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generate(cache, device):
    model, ids = tiny_model(QWEN3, device), tokens(device, batch=1)
    given = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    logits = output_of(model, ids)[0, -1]
    register(model)
    out = model.generate(ids, **given)
    assert out.shape == (1, 18)
    assert torch.equal(out[:, :12], ids)
    # Eager may find another token almost as likely.
    assert logits[out[0, 12]] > logits.max() - 0.05 * logits.abs().max()


@pytest.mark.parametrize("made", [QWEN3, GPT_OSS, PHI], ids=str)
@torch.no_grad()
def test_a_compiled_model(made, device):
    torch._dynamo.reset()
    model, ids = tiny_model(made, device), tokens(device)
    register(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(input_ids=ids, use_cache=False).logits.float()
    assert dissimilarity(out, output_of(model, ids)) < 1e-4


@torch.no_grad()
def test_a_model_compiled_before_its_first_call():
    torch._dynamo.reset()
    register()
    model, ids = tiny_model(QWEN3), tokens("cpu")
    model.set_experts_implementation(NAME)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(input_ids=ids, use_cache=False).logits.float()
    assert_same_bits(out, output_of(model, ids))


@torch.no_grad()
def test_weights_that_accelerate_keeps_elsewhere(device):
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_model(GPT_OSS, device), tokens(device)
    register(model)
    expected = output_of(model, ids)
    model = tiny_model(GPT_OSS)
    model.set_experts_implementation(NAME)
    accelerate.cpu_offload(model, execution_device=torch.device(device))
    assert all(parameter.is_meta for parameter in experts_of(model)[0].parameters())
    for _ in range(2):
        assert dissimilarity(output_of(model, ids).cpu(), expected.cpu()) < 1e-4


@pytest.mark.multi_gpu
@torch.no_grad()
def test_a_model_on_two_gpus():
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_model(QWEN3, "cuda:0"), tokens("cuda:0")
    register(model)
    expected = output_of(model, ids)
    device_map = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    model = accelerate.dispatch_model(model, device_map=device_map)
    assert dissimilarity(output_of(model, ids).cpu(), expected.cpu()) < 1e-4


@torch.no_grad()
def test_a_model_with_fp8_experts(device):
    model, ids = tiny_model(QWEN3, device), tokens(device)
    calls, expected = recorded_routing(model, lambda: output_of(model, ids))
    weights = [
        {name: p.float() for name, p in experts.named_parameters()} for experts in experts_of(model)
    ]
    own = FineGrainedFP8Config(weight_block_size=(128, 128))
    others = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    replace_with_fp8_linear(model, modules_to_not_convert=others, quantization_config=own)
    for experts, given in zip(experts_of(model), weights, strict=True):
        for name, weight in given.items():
            # 48 features: gate and up have one block each, in rows and columns.
            parts = weight.unflatten(1, (2, -1)) if name == "gate_up_proj" else weight[:, None]
            scale = parts.abs().amax((2, 3)) / 448
            values = (parts / scale[..., None, None]).flatten(1, 2).to(torch.float8_e4m3fn)
            setattr(experts, name, nn.Parameter(values, requires_grad=False))
            setattr(
                experts,
                f"{name}_scale_inv",
                nn.Parameter(scale[..., None].contiguous(), requires_grad=False),
            )
    register(model)
    out = pinned_routing(model, calls, lambda: output_of(model, ids))
    assert dissimilarity(out, expected) < 1e-2


@pytest.mark.gpu
@torch.no_grad()
def test_a_decode_step_in_a_cuda_graph():
    model = tiny_model(QWEN3, "cuda")
    register(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    prompt = tokens("cuda")
    model(input_ids=prompt, past_key_values=cache, use_cache=True)
    step = prompt[:, :1].clone()
    position = torch.full((2, 1), prompt.shape[1], device="cuda")

    def run():
        return model(
            input_ids=step, past_key_values=cache, position_ids=position, use_cache=True
        ).logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    first = out.clone()
    step.add_(1)
    graph.replay()
    assert torch.isfinite(out).all()
    assert not torch.equal(out, first)
