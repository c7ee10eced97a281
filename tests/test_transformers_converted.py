"""A checkpoint of `convert_checkpoint` as a model of Transformers."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from moe_ext.integrations.transformers import register
from moe_ext.integrations.transformers._converted import BankedExperts
from moe_ext.precision import ExpertBank, LayerPlan, PrecisionPlan, convert_checkpoint
from support.tiny_models import ModelClass, experts_of, output_of, tiny_model, tokens
from support.tolerance import assert_same_bits, dissimilarity

pytestmark = pytest.mark.filterwarnings("ignore")

QWEN3 = ModelClass("qwen3_moe", "Qwen3MoeExperts")


def names_of(model):
    experts = experts_of(model)
    return [name for name, module in model.named_modules() if any(module is e for e in experts)]


def converted(tmp_path, bf16=(), left_out=()):
    """Write a tiny model and convert it, with some experts in BF16 and some layers as they are."""
    model = tiny_model(QWEN3)
    model.save_pretrained(tmp_path / "source")
    names = [name for name in names_of(model) if name not in left_out]
    count = experts_of(model)[0].num_experts
    plan = PrecisionPlan({name: LayerPlan(count).with_bf16(experts=bf16) for name in names})
    convert_checkpoint(tmp_path / "source", plan, tmp_path / "out")
    return model, tmp_path / "out"


@pytest.mark.parametrize("bf16", [(), (1,), "all"], ids=["FP8", "a mixture", "BF16"])
@torch.no_grad()
def test_it_loads(tmp_path, bf16):
    count = experts_of(tiny_model(QWEN3))[0].num_experts
    source, folder = converted(tmp_path, range(count) if bf16 == "all" else bf16)
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = tokens("cpu")
    for name in names_of(source):
        own = model.get_submodule(name)
        assert isinstance(own, BankedExperts)
        bank = ExpertBank.from_checkpoint(folder, name)
        for key, tensor in bank.state_dict().items():
            assert_same_bits(own.bank.state_dict()[key].view(torch.uint8), tensor.view(torch.uint8))
    off = dissimilarity(output_of(model, ids), output_of(source, ids))
    assert off < (1e-4 if bf16 == "all" else 0.02)
    out = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 3)


@torch.no_grad()
def test_layers_without_a_plan_are_loaded_as_they_are(tmp_path):
    left_out = names_of(tiny_model(QWEN3))[-1:]
    source, folder = converted(tmp_path, left_out=left_out)
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name in left_out:
        own, theirs = model.get_submodule(name), source.get_submodule(name)
        assert_same_bits(own.gate_up_proj, theirs.gate_up_proj)


# Gate and up interleaved, with biases; and experts that checkpoints name otherwise.
@pytest.mark.parametrize(
    ("made", "prefix"),
    [
        (ModelClass("gpt_oss", "GptOssExperts"), "model.layers.{}.mlp.experts"),
        (ModelClass("mixtral", "MixtralExperts"), "model.layers.{}.block_sparse_moe.experts"),
    ],
    ids=["gpt-oss", "mixtral"],
)
@torch.no_grad()
def test_models_of_other_forms(tmp_path, made, prefix):
    model = tiny_model(made)
    model.save_pretrained(tmp_path / "source")
    experts = experts_of(model)
    layers = {
        prefix.format(index): LayerPlan(own.num_experts).with_bf16(experts=0, stages="down")
        for index, own in enumerate(experts)
    }
    convert_checkpoint(tmp_path / "source", PrecisionPlan(layers), tmp_path / "out")
    register()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16
    )
    assert sum(isinstance(own, BankedExperts) for own in loaded.modules()) == len(experts)
    off = dissimilarity(output_of(loaded, tokens("cpu")), output_of(model, tokens("cpu")))
    assert 1e-6 < off < 0.03


def test_a_plan_of_other_layers_is_refused(tmp_path):
    _, folder = converted(tmp_path)
    path = folder / "precision_plan.json"
    path.write_text(path.read_text().replace("model.layers.0", "model.layers.7"))
    register()
    with pytest.raises(
        ValueError, match=r"'model.layers.7.mlp.experts' must be one module of exper"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("length", [0, 4, -100])
def test_a_truncated_file_is_named(tmp_path, length):
    _, folder = converted(tmp_path)
    path = folder / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    register()
    with pytest.raises(ValueError, match=r"truncated, damaged or of another form$") as error:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert str(error.value).startswith(f"moe_ext: {path} must be a whole safetensors file, got ")


@pytest.mark.parametrize("version", [2, "1", None])
def test_another_version_is_refused(tmp_path, version):
    _, folder = converted(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["version"] = version
    path.write_text(json.dumps(config))
    register()
    message = (
        r"^moe_ext: `quantization_config.version` must be an int from 1 to 1, which this moe_ext "
        r"reads, got "
    )
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.gpu
@torch.no_grad()
def test_it_loads_to_a_gpu(tmp_path):
    source, folder = converted(tmp_path, bf16=(1,))
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cuda"
    )
    for bank in (own.bank for own in model.modules() if isinstance(own, BankedExperts)):
        assert bank.w13_fp8.is_cuda
    ids = tokens("cpu")
    off = dissimilarity(output_of(model, ids.cuda()).cpu(), output_of(source, ids))
    assert off < 0.02


@torch.no_grad()
def test_places_that_are_filled_with_each_call_are_refused(tmp_path):
    pytest.importorskip("accelerate")
    _, folder = converted(tmp_path)
    register()
    others = ("embed_tokens", "layers.1", "norm", "rotary_emb")
    places = {"lm_head": "cpu", "model.layers.0": "disk"} | {
        f"model.{own}": "cpu" for own in others
    }
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts must stay on a GPU or the CPU"):
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map=places, offload_folder=tmp_path / "offload"
        )


def test_it_is_not_saved(tmp_path):
    _, folder = converted(tmp_path)
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["plan"]
