"""Layers for the tests of `fused_moe`, and what they must give, by a plain loop over experts."""

from __future__ import annotations

import dataclasses

import moe_ext
import torch
from moe_ext.reference import fused_moe_reference
from torch import Tensor
from torch.nn import functional

from bench.layer_reference import layer_by_parts
from support.tolerance import assert_close_to_reference, dissimilarity

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MAX_DISSIMILARITY_BY_TIES = 1e-3
BLOCK = 128
GATED = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh")
UNGATED = ("relu2", "silu")
ACTIVATIONS = GATED + UNGATED
# How weights are stored; FP8 ones by the layout of their scales.
LAYOUTS = ("bf16", "tensor", "expert", "channel", "block", "segments")
OPERANDS = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a layer; small ones by default."""

    num_tokens: int = 9
    num_experts: int = 5
    top_k: int = 3
    hidden: int = 192
    intermediate: int = 96


def is_gated(activation: str) -> bool:
    """Whether `w13` holds gate and up."""
    return activation in GATED


def routing(sizes: Sizes, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights and ids, drawn without replacement."""
    shape = (sizes.num_tokens, sizes.num_experts)
    logits = torch.randn(shape, generator=generator)
    weights, ids = logits.softmax(1).topk(sizes.top_k, dim=1)
    return weights.to(device), ids.to(device)


def quantize_weight(weight: Tensor, layout: str, halves: bool) -> tuple[Tensor, Tensor]:
    """FP8 weights and their scales, said again; `halves` of rows may have grids of their own."""
    experts, n, k = weight.shape
    if layout in ("tensor", "expert", "channel"):
        dims = {"tensor": (0, 1, 2), "expert": (1, 2), "channel": (2,)}[layout]
        scale = weight.abs().amax(dims, keepdim=True) / FP8_MAX
        q = (weight / scale).to(FP8)
        return q, scale.reshape(
            {"tensor": (), "expert": (experts,), "channel": (experts, n)}[layout]
        )
    parts = weight.chunk(2, dim=1) if layout == "segments" and halves else (weight,)
    scales = [_block_scales(part) for part in parts]
    expanded = torch.cat(
        [expand_blocks(s, p.shape[1], k) for s, p in zip(scales, parts, strict=True)], dim=1
    )
    scale = torch.stack(scales, dim=1) if len(parts) == 2 else scales[0]
    return (weight / expanded).to(FP8), scale


def _block_scales(weight: Tensor) -> Tensor:
    experts, n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = functional.pad(weight, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = padded.reshape(experts, rows, BLOCK, columns, BLOCK)
    return blocks.abs().amax((2, 4)).clamp_min(1e-6) / FP8_MAX


def expand_blocks(scale: Tensor, n: int, k: int) -> Tensor:
    """One scale for each weight of (experts, n, k)."""
    rows, columns = (torch.arange(size, device=scale.device) // BLOCK for size in (n, k))
    return scale[:, rows][:, :, columns]


def dequantized(weight: Tensor, scale: Tensor | None) -> Tensor:
    """The weights in float32."""
    if scale is None:
        return weight.float()
    _, n, k = weight.shape
    if scale.dim() == 4:
        expanded = torch.cat([expand_blocks(scale[:, i], n // 2, k) for i in (0, 1)], dim=1)
    elif scale.dim() == 3:
        expanded = expand_blocks(scale, n, k)
    else:
        expanded = scale.reshape(*scale.shape, *(1,) * (3 - scale.dim()))
    return weight.float() * expanded


def random_layer(
    layout: str, activation: str, sizes: Sizes, device: str = "cpu", seed: int = 1
) -> dict[str, object]:
    """Arguments of `fused_moe` whose stages keep the size of their input about the same."""
    generator = torch.Generator().manual_seed(seed)
    n = (2 if is_gated(activation) else 1) * sizes.intermediate
    experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.intermediate
    w13 = (torch.randn(experts, n, hidden, generator=generator) * 2 / hidden**0.5).to(device)
    w2 = (torch.randn(experts, hidden, inner, generator=generator) / inner**0.5).to(device)
    x = torch.randn(sizes.num_tokens, hidden, generator=generator).to(device)
    weights, ids = routing(sizes, device, generator)
    layer: dict[str, object] = {
        "hidden_states": x.bfloat16(),
        "topk_weights": weights,
        "topk_ids": ids,
        "activation": activation,
    }
    if layout == "bf16":
        return layer | {"w13": w13.bfloat16(), "w2": w2.bfloat16()}
    # Experts of different size, so that a wrong scale shows.
    sizes_of_experts = torch.logspace(-1, 0.5, experts, device=device)[:, None, None]
    q13, scale13 = quantize_weight(w13 * sizes_of_experts, layout, is_gated(activation))
    q2, scale2 = quantize_weight(w2 / sizes_of_experts, layout, halves=False)
    return layer | {
        "w13": moe_ext.pad_rows(q13),
        "w2": moe_ext.pad_rows(q2),
        "w13_scale": scale13,
        "w2_scale": scale2,
    }


def integer_layer(
    layout: str, sizes: Sizes, device: str = "cpu", seed: int = 1
) -> dict[str, object]:
    """Arguments whose every step is exact in BF16 and FP8, whatever the order of sums.

    The gate is 32 everywhere, so SiLU leaves it as it is. Each block of 128 hidden values has one
    448 that meets weights of 0, each block of the intermediate one value of 448 = 32 * 14: so all
    computed scales are 1. Scales of weights are powers of two.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.intermediate

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    x = integers(-2, 2, sizes.num_tokens, hidden)
    x[:, ::BLOCK] = FP8_MAX
    up = torch.zeros(experts, inner, hidden)
    column = torch.randint(1, min(hidden, BLOCK), (experts, inner, 1), generator=generator)
    up.scatter_(2, column, integers(0, 1, experts, inner, 1) * 2 - 1)
    up_bias = integers(-1, 1, experts, inner)
    up[:, ::BLOCK], up_bias[:, ::BLOCK] = 0, 14
    w13 = torch.cat([torch.zeros_like(up), up], dim=1)
    w13_bias = torch.cat([torch.full((experts, inner), 32.0), up_bias], dim=1)
    w2 = integers(-1, 1, experts, hidden, inner) * (integers(0, 15, experts, hidden, inner) == 0)
    _, ids = routing(sizes, device, generator)
    weights = 0.5 ** integers(0, 3, sizes.num_tokens, sizes.top_k)
    layer: dict[str, object] = {
        "hidden_states": x.bfloat16().to(device),
        "topk_weights": weights.to(device),
        "topk_ids": ids,
        "w13_bias": w13_bias.to(device),
    }
    if layout == "bf16":
        return layer | {"w13": w13.bfloat16().to(device), "w2": w2.bfloat16().to(device)}
    for name, weight in (("w13", w13), ("w2", w2)):
        _, like = quantize_weight(weight + 1, layout, name == "w13")
        scale = 2.0 ** integers(-1, 1, *like.shape)
        ones = torch.ones(weight.shape)
        q = (weight / dequantized(ones, scale)).to(FP8).to(device)
        layer[name] = moe_ext.pad_rows(q)
        layer[f"{name}_scale"] = scale.to(device)
    return layer


def local_experts(layer: dict[str, object]) -> list[list[int | None]]:
    """The expert here of each slot, one id at a time; None for those elsewhere."""
    experts, first = layer["w13"].shape[0], layer.get("first_expert", 0)
    table = layer.get("expert_map")
    table = None if table is None else table.tolist()

    def expert(id_: int) -> int | None:
        if table is not None:
            id_ = table[id_] if 0 <= id_ < len(table) else -1
        return id_ - first if 0 <= id_ - first < experts else None

    return [[expert(id_) for id_ in row] for row in layer["topk_ids"].tolist()]


def fake_quantized(parts: list[Tensor], weight: str, layer: dict[str, object]) -> list[Tensor]:
    """Each part's values after FP8, by the layout of the scale of `weight`, one block at a time."""
    scale, stage = layer.get(f"{weight}_scale"), weight[1]
    if scale is None:
        return parts
    n = layer[weight].shape[1]
    static = layer.get(f"a{stage}_scale")
    if static is not None:  # one for all
        one = static.reshape(())
        return [(part / one).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * one for part in parts]
    by_row = scale.dim() < 2 or tuple(scale.shape[1:]) == (n,)
    width = parts[0].shape[1] if by_row else BLOCK
    return [
        torch.cat([_fake_quantized_rows(block) for block in part.split(width, dim=1)], dim=1)
        for part in parts
    ]


def _fake_quantized_rows(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.full_like(largest, FP8_MAX), 1.0)
    return (rows / scale).to(FP8).float() * scale


def plain_activation(x: Tensor, layer: dict[str, object]) -> Tensor:
    """The activation, said a second time."""
    name = layer.get("activation", "swiglu")
    if name == "relu2":
        return functional.relu(x) ** 2
    if name == "silu":
        return x * torch.sigmoid(x)
    half = x.shape[1] // 2
    gate, up = x[:, :half], x[:, half:]
    if layer.get("gate_up_layout") == "interleaved":
        gate, up = x[:, ::2], x[:, 1::2]
    limit = layer.get("limit") or (7.0 if name == "swiglu_oai" else None)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if name == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if name == "swiglu_oai":
        return gate * torch.sigmoid((layer.get("alpha") or 1.702) * gate) * (up + 1)
    if name == "geglu":
        return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def plain_layer(layer: dict[str, object]) -> Tensor:
    """The layer in float32, one expert after the other: (num_tokens, hidden), not rounded."""
    x, topk_weights = layer["hidden_states"].float(), layer["topk_weights"].float()
    on_input = layer.get("apply_router_weight_on_input", False)
    w13 = dequantized(layer["w13"], layer.get("w13_scale"))
    w2 = dequantized(layer["w2"], layer.get("w2_scale"))
    experts = range(w13.shape[0])
    slots: list[list[tuple[int, int]]] = [[] for _ in experts]
    for token, row in enumerate(local_experts(layer)):
        for j, expert in enumerate(row):
            if expert is not None:
                slots[expert].append((token, j))
    parts = []
    for own in slots:
        rows = x[[token for token, _ in own]]
        if on_input:
            factors = [topk_weights[slot] for slot in own]
            rows = torch.stack([r * f for r, f in zip(rows, factors, strict=True)]) if own else rows
            rows = rows.bfloat16().float()
        parts.append(rows)
    parts = fake_quantized(parts, "w13", layer)
    middle = []
    for expert in experts:
        bias = layer.get("w13_bias")
        gate_up = functional.linear(
            parts[expert], w13[expert], None if bias is None else bias[expert].float()
        )
        middle.append(plain_activation(gate_up, layer).bfloat16().float())
    middle = fake_quantized(middle, "w2", layer)
    terms: dict[tuple[int, int], Tensor] = {}
    for expert in experts:
        bias = layer.get("w2_bias")
        rows = functional.linear(
            middle[expert], w2[expert], None if bias is None else bias[expert].float()
        )
        terms |= zip(slots[expert], rows.bfloat16().float(), strict=True)
    out = torch.zeros_like(x)
    for (token, j), row in sorted(terms.items(), key=lambda item: item[0]):
        out[token] += row if on_input else row * topk_weights[token, j]
    out = out * layer.get("routed_scale", 1.0)
    addend = layer.get("addend")
    return out if addend is None else out + addend.float()


def assert_layer_is_right(out: Tensor, layer: dict[str, object]) -> None:
    """Hold `out` against the reference of the layer, on the same device.

    In FP8 by parts, since its values may fall on the other side of a tie; what these ties make of
    a layer has a limit of its own.
    """
    expected = fused_moe_reference(**layer, out_dtype=torch.float32)
    if layer["w13"].dtype is FP8:
        assert dissimilarity(out, expected) < MAX_DISSIMILARITY_BY_TIES
        expected = layer_by_parts(**layer, out_dtype=torch.float32)
    assert_close_to_reference(out, expected)
