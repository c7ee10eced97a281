"""Buffers of rows for the tests of `fused_moe_masked`, and the same rows as tokens of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from support.fused_moe import Sizes, assert_layer_is_right, random_layer
from support.tolerance import assert_untouched

MASKED_OPERANDS = ("hidden_states", "w13", "w2", "counts")
ROUTING = ("topk_weights", "topk_ids")
# Empty experts first, last and in the middle; full buffers; one row.
COUNTS = (0, 3, 9, 0, 1, 9, 2, 0)
MAX_ROWS = 9


def masked_layer(
    layout: str,
    activation: str = "swiglu",
    counts: tuple[int, ...] = COUNTS,
    max_rows: int = MAX_ROWS,
    hidden: int = 192,
    intermediate: int = 96,
    device: str = "cpu",
) -> dict[str, object]:
    """Arguments of `fused_moe_masked`, as `random_layer` makes them; rows that do not count NaN."""
    sizes = sizes_of(counts, max_rows, hidden, intermediate)
    return in_buffers(random_layer(layout, activation, sizes, device), counts, max_rows)


def sizes_of(counts: tuple[int, ...], max_rows: int, hidden: int, intermediate: int) -> Sizes:
    """A layer with as many tokens as the buffers have rows."""
    return Sizes(len(counts) * max_rows, len(counts), 1, hidden, intermediate)


def in_buffers(
    layer: dict[str, object], counts: tuple[int, ...], max_rows: int
) -> dict[str, object]:
    """A layer's tokens, whatever they chose, in buffers; counts may be any, as the op takes them.

    The buffers lie in NaN, and rows that do not count are NaN.
    """
    x = layer["hidden_states"]
    num_rows, hidden = x.shape
    around = torch.full((num_rows, hidden + 16), float("nan"), device=x.device).bfloat16()
    rows = around[:, :hidden].view(len(counts), max_rows, hidden)
    for expert, own in enumerate(x.view(rows.shape)):
        count = min(max(counts[expert], 0), max_rows)
        rows[expert, :count] = own[:count]
    ends = torch.tensor(counts, dtype=torch.int32, device=x.device)
    kept = {name: value for name, value in layer.items() if name not in ROUTING}
    return kept | {"hidden_states": rows, "counts": ends}


def clamped_counts(layer: dict[str, object]) -> list[int]:
    """How many rows of each expert count."""
    max_rows = layer["hidden_states"].shape[1]
    return [min(max(count, 0), max_rows) for count in layer["counts"].tolist()]


def rows_that_count(x: Tensor, layer: dict[str, object]) -> Tensor:
    """The rows of all experts' buffers that count, one after the other."""
    counts = clamped_counts(layer)
    return torch.cat([own[:count] for own, count in zip(x, counts, strict=True)])


def as_tokens(layer: dict[str, object]) -> dict[str, object]:
    """Arguments of `fused_moe` whose tokens are the rows that count, each with one expert."""
    counts = torch.tensor(clamped_counts(layer))
    ids = torch.arange(len(counts)).repeat_interleave(counts)[:, None]
    tokens = {name: value for name, value in layer.items() if name != "counts"}
    return tokens | {
        "hidden_states": rows_that_count(layer["hidden_states"], layer),
        "topk_ids": ids.to(layer["counts"].device),
        "topk_weights": torch.ones(ids.shape, device=layer["counts"].device),
    }


def assert_rest_untouched(out: Tensor, layer: dict[str, object]) -> None:
    """What does not count must still be the NaN it was filled with."""
    for own, count in zip(out, clamped_counts(layer), strict=True):
        assert_untouched(own[count:])


def assert_masked_is_right(out: Tensor, layer: dict[str, object]) -> None:
    """Hold the rows of `out` that count against the reference, on the same device."""
    rows = rows_that_count(out, layer)
    assert (out.shape, out.dtype) == (layer["hidden_states"].shape, torch.bfloat16)
    if rows.shape[0]:
        assert_layer_is_right(rows, as_tokens(layer))
