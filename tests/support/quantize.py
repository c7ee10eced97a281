"""Inputs of `quantize_fp8`, and its result held against the reference in tensors full of NaN."""

from __future__ import annotations

import moe_ext
import torch
from moe_ext.reference import quantize_fp8_reference
from torch import Tensor

from support.inputs import in_poison, poisoned
from support.tolerance import assert_same_bits, assert_untouched

FP8 = torch.float8_e4m3fn
GRANULARITIES = ("tensor", "row", "1x128", "128x128")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = 128


def spread(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Normal values of very different size from place to place, so that a wrong scale shows."""
    generator = torch.Generator(device).manual_seed(3)
    x = torch.randn(shape, generator=generator, device=device)
    exponents = torch.randint(-6, 7, shape[:-1], generator=generator, device=device)
    columns = torch.arange(shape[-1], device=device) // BLOCK % 5
    return (x * 2.0 ** exponents[..., None] * 2.0**columns).to(dtype)


def scale_shape(granularity: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales, said a second time."""
    *groups, rows, k = shape
    sizes = {
        "tensor": (),
        "row": (rows,),
        "1x128": (rows, -(-k // BLOCK)),
        "128x128": (-(-rows // BLOCK), -(-k // BLOCK)),
    }
    return (*groups, *sizes[granularity])


def scale_rows(granularity: str, rows: int) -> int | None:
    """How many rows of scales so many rows have; None where a tensor has one for all."""
    return {"tensor": None, "128x128": -(-rows // BLOCK)}.get(granularity, rows)


def expand_scale(scale: Tensor, granularity: str, shape: tuple[int, ...]) -> Tensor:
    """One scale for each value of `x`."""
    *_, rows, k = shape
    if granularity == "tensor":
        return scale[..., None, None].expand(shape)
    if granularity == "row":
        return scale[..., None].expand(shape)
    column = torch.arange(k, device=scale.device) // BLOCK
    if granularity == "1x128":
        return scale[..., column]
    row = torch.arange(rows, device=scale.device) // BLOCK
    return scale[..., row, :][..., column]


def poisoned_outputs(
    granularity: str, shape: tuple[int, ...], device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`q` in the middle of NaN, all of that NaN, and scales of NaN with gaps between them."""
    *outer, k = shape
    store = poisoned((*outer, k + 16), FP8, device)
    sizes = scale_shape(granularity, shape)
    gaps = poisoned((*(2 * size for size in sizes),), torch.float32, device)
    return store[..., :k], store, gaps[tuple(slice(None, None, 2) for _ in sizes)]


def check(x: Tensor, granularity: str, counts: list[int] | None = None, **options: object) -> None:
    """Quantise into poison and hold every bit against the reference of the same device."""
    q, store, scale_out = poisoned_outputs(granularity, tuple(x.shape), str(x.device))
    valid = None
    if counts is not None:
        valid = torch.tensor(counts, dtype=torch.int32, device=x.device)
    moe_ext.quantize_fp8_out(
        x, granularity, q=q, scale_out=scale_out, num_valid_rows=valid, **options
    )
    assert_untouched(store[..., x.shape[-1] :])
    assert_outputs(x, granularity, q, scale_out, counts, **options)


def assert_outputs(
    x: Tensor,
    granularity: str,
    q: Tensor,
    scale_out: Tensor,
    counts: list[int] | None,
    **options: object,
) -> None:
    """Valid rows have the reference's bits, all others are still NaN."""
    rows = x.shape[-2]
    if x.dim() == 2:
        x, q, scale_out = x[None], q[None], scale_out[None]
    if counts is None:
        expected_q, expected_scale = quantize_fp8_reference(x, granularity, **options)
        assert_bits(q, expected_q)
        if "scale" in options:  # comes back in the shape that it had
            expected_scale = expected_scale.reshape(scale_out.shape)
        assert_bits(scale_out, expected_scale)
        return
    for group, count in enumerate(counts):
        valid = min(max(count, 0), rows)
        expected_q, expected_scale = quantize_fp8_reference(
            x[group, :valid], granularity, **options
        )
        assert_bits(q[group, :valid], expected_q)
        assert_untouched(q[group, valid:])
        last = scale_rows(granularity, valid)
        if last is None:
            assert_bits(scale_out[group], expected_scale)
        else:
            assert_bits(scale_out[group, :last], expected_scale)
            assert_untouched(scale_out[group, last:])


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    """As assert_same_bits, for any number of dimensions."""
    assert actual.shape == expected.shape
    if actual.numel():
        columns = actual.shape[-1] if actual.dim() else 1
        assert_same_bits(actual.reshape(-1, columns), expected.reshape(-1, columns))


def poison_rows(x: Tensor, counts: list[int]) -> Tensor:
    """A copy of `x` in the middle of NaN whose rows past the counts are NaN and infinity."""
    x = in_poison(x)
    for group, count in enumerate(counts):
        tail = (x if x.dim() == 2 else x[group])[max(count, 0) :]
        tail.fill_(float("nan"))
        tail[::2] = float("inf")
    return x
