"""The op `moe_ext::quantize_fp8`: contract, schema, CPU and CUDA implementation, fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._autograd import autograd_kernel
from moe_ext._call import call
from moe_ext._quantize_checks import check_quantize_fp8
from moe_ext._quantize_run import empty_outputs, run_quantize_fp8, run_quantize_fp8_out
from moe_ext._words import check_given

_OPTIONS = "Tensor? scale=None, Tensor? num_valid_rows=None, bool power_of_two=False"
_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY.define(
    f"quantize_fp8(Tensor x, str granularity, *, {_OPTIONS}) -> (Tensor q, Tensor scale)",
    tags=_TAGS,
)
_LIBRARY.define(
    f"quantize_fp8_out(Tensor x, str granularity, *, {_OPTIONS}, Tensor(a!) q, "
    "Tensor(b!) scale_out) -> ()",
    tags=_TAGS,
)
_QUANTIZE_FP8 = torch.ops.moe_ext.quantize_fp8.default
_QUANTIZE_FP8_OUT = torch.ops.moe_ext.quantize_fp8_out.default


def quantize_fp8(
    x: Tensor,
    granularity: str,
    *,
    scale: Tensor | None = None,
    num_valid_rows: Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 E4M3, with scales as `grouped_gemm` takes them: `q * scale` approximates `x`.

    scale = largest |x| / 448 over the values that share it, q = x / scale rounded to nearest even.

    Args:
        x: (rows, k) or (groups, rows, k), bfloat16, float16 or float32, k contiguous, other strides
            of any kind; CUDA, or CPU for the slow reference. Any size may be 0.
        granularity: which values share a scale. "tensor": all (of a group); "row": a row;
            "1x128": 128 values of a row, for activations; "128x128": 128 rows x 128 values, for
            weights. The last block of either dimension may be short.
        scale: "tensor" only: a float32 scale to use in place of a computed one, () or (1,), or
            (groups,) for 3-D `x`; positive, normal and below 2**127 (not checked, other values
            give unspecified ones). Same device.
        num_valid_rows: int32 on the device of `x`, () or (1,), or (groups,) for 3-D `x`: only so
            many leading rows (of each group) are read; clamped to 0 .. rows. Never read by the host
            on CUDA, and may be a slice such as `offs[-1]`. None is all rows.
        power_of_two: round each scale up to a power of two, as E8M0 can hold it.

    Returns:
        `q`: float8_e4m3fn, the shape of `x`, rows 16-byte aligned: the stride between rows is k
        rounded up to a multiple of 16. `scale`: float32, contiguous: () or (groups,) for "tensor",
        (..., rows) for "row", (..., rows, ceil(k / 128)) for "1x128", (..., ceil(rows / 128),
        ceil(k / 128)) for "128x128"; the argument `scale` itself where it was given. Rows past
        `num_valid_rows`, and scales of such rows alone, are left unwritten (uninitialised memory).

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Where all values are zero, or there are none, the scale is 1 and `q` is zero. A computed
        scale is at least 2**-126, the smallest normal float32, so blocks below 448 * 2**-126
        use less of FP8's range; it lies within 2**-126 .. 2**120. Values beyond 448 scales become
        +-448. NaN becomes NaN in `q` and does not enter the scale; an infinity becomes +-448 and
        counts as the largest float32 (3.4e38) in the scale, so other values of its block vanish.
        Bit for bit the same on CPU and CUDA. Does not synchronise on CUDA; safe in CUDA graphs
        (counts may change between replays). Inputs that require grad are accepted, backward
        raises: inference only.

    Example:
        >>> q, scale = quantize_fp8(torch.full((2, 256), 3.5).bfloat16(), "1x128")
        >>> scale.shape, scale[0, 0].item(), q[0, 0].item()
        (torch.Size([2, 2]), 0.0078125, 448.0)
    """
    check_given("quantize_fp8", "x", x)
    q, computed = call(
        _QUANTIZE_FP8,
        (x, granularity),
        {"scale": scale, "num_valid_rows": num_valid_rows, "power_of_two": power_of_two},
    )
    return q, computed if scale is None else scale


def quantize_fp8_out(
    x: Tensor,
    granularity: str,
    *,
    q: Tensor,
    scale_out: Tensor,
    scale: Tensor | None = None,
    num_valid_rows: Tensor | None = None,
    power_of_two: bool = False,
) -> None:
    """Quantise to FP8 E4M3 as `quantize_fp8`, into tensors of the caller.

    Args:
        x: as in `quantize_fp8`, like all arguments but the two below.
        granularity: see `quantize_fp8`.
        q: float8_e4m3fn, the shape and device of `x`, k contiguous, any other strides of at least
            k. Must overlap neither itself nor an input (not checked).
        scale_out: float32, the shape that `quantize_fp8` returns for the granularity, same device,
            any strides, not overlapping. Receives the scales, also a given one.
        scale: see `quantize_fp8`.
        num_valid_rows: see `quantize_fp8`.
        power_of_two: see `quantize_fp8`.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rows of `q` past `num_valid_rows`, and scales of such rows alone, keep what they held, as
        does what lies between rows. Otherwise as `quantize_fp8`.
    """
    check_given("quantize_fp8_out", "x", x)
    call(
        _QUANTIZE_FP8_OUT,
        (x, granularity),
        {
            "scale": scale,
            "num_valid_rows": num_valid_rows,
            "power_of_two": power_of_two,
            "q": q,
            "scale_out": scale_out,
        },
    )


def _quantize_fp8_fake(x: Tensor, granularity: str, **options: Any) -> tuple[Tensor, Tensor]:
    check_quantize_fp8("quantize_fp8", None, x, granularity, **options)
    return empty_outputs(x, granularity, options.get("scale"))


def _quantize_fp8_out_fake(
    x: Tensor, granularity: str, *, q: Tensor, scale_out: Tensor, **options: Any
) -> None:
    check_quantize_fp8("quantize_fp8_out", (q, scale_out), x, granularity, **options)


for _name, _op, _implementation, _fake, _outputs in (
    ("quantize_fp8", _QUANTIZE_FP8, run_quantize_fp8, _quantize_fp8_fake, ()),
    (
        "quantize_fp8_out",
        _QUANTIZE_FP8_OUT,
        run_quantize_fp8_out,
        _quantize_fp8_out_fake,
        ("q", "scale_out"),
    ),
):
    _LIBRARY.impl(_name, _implementation, "CPU")
    _LIBRARY.impl(_name, _implementation, "CUDA")
    _LIBRARY.impl(
        _name, autograd_kernel(_op, _implementation, _outputs), "Autograd", with_keyset=True
    )
    torch.library.register_fake(f"moe_ext::{_name}", _fake, lib=_LIBRARY)
