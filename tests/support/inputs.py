"""Named problems with poisoned surroundings: whatever no result may depend on is NaN."""

from __future__ import annotations

import dataclasses
import functools

import torch
from moe_ext.reference import (
    grouped_gemm_reference,
    quantize_fp8_per_block,
    quantize_fp8_per_tensor,
)
from torch import Tensor

FP8 = torch.float8_e4m3fn
# What a problem's operands are: FP8 comes with one scale for each tensor or group, per row and
# channel, per block, or per block that begins inside k.
DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": FP8,
    "fp8_channel": FP8,
    "fp8_block": FP8,
    "fp8_shifted": FP8,
}
ROW_PADDING = 16  # elements between the end of a row and the next one
TAIL_ROWS = 5  # rows of `a` past the last offset


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of each group and the two other sizes; `k_bytes` so that both dtypes share a tail."""

    rows: tuple[int, ...]
    n: int
    k_bytes: int
    n_segments: int = 1  # with scales per block
    n_offset: int = 0
    k_offset: int = 0


ISSUE_ROWS = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257)
CASES = {
    "one_token": Case((1,), 256, 512),
    "every_tile_edge": Case(ISSUE_ROWS, 256, 512),
    "every_tile_edge_tails": Case(ISSUE_ROWS, 192, 720),
    "first_middle_last_empty": Case((0, 5, 0, 0, 17, 0), 136, 256),
    "all_groups_empty": Case((0, 0, 0), 64, 256),
    "all_in_one_group": Case((0, 700, 0, 0), 512, 1024),
    "one_large_group": Case((1500,), 384, 512),
    "n_8": Case((3, 70, 130), 8, 256),
    "n_176": Case((3, 0, 300), 176, 352),
    "n_2880_k_2880": Case((2, 33), 2880, 2880),
    "k_16_bytes": Case((9, 129), 128, 16),
    "k_zero": Case((9, 0, 129), 128, 0),
    "k_464_bytes": Case((20, 100), 128, 464),
    "k_360_bytes": Case((3, 130), 128, 360),
    "k_720_bytes": Case((20, 100), 128, 720),
    "k_one_short_of_a_stage": Case((20, 100), 128, 1008),
    "deep_k": Case((4, 66), 128, 8192),
    "257_groups": Case(tuple((7 * group) % 11 for group in range(257)), 128, 256),
}
# Scale blocks that a tensor-parallel cut leaves short, that restart in the middle of n, that begin
# inside a block: (n, k, n_segments, n_offset).
BLOCK_SHAPES = (
    (192, 384, 1, 0),
    (192, 384, 1, 64),
    (320, 192, 1, 0),
    (352, 512, 2, 0),
    (192, 320, 2, 0),
    (384, 160, 2, 0),
    (384, 256, 2, 64),
    (1408, 704, 2, 0),
    (2880, 2880, 1, 0),
    (176, 96, 1, 0),
    (360, 352, 1, 24),
    (512, 1024, 2, 0),
)
# The same where blocks begin inside k: (n, k, n_segments, n_offset, k_offset).
SHIFTED_SHAPES = (
    (256, 192, 1, 0, 64),
    (256, 176, 1, 0, 48),
    (256, 360, 1, 0, 104),
    (256, 232, 1, 0, 104),
    (256, 88, 1, 40, 88),
    (384, 512, 2, 64, 127),
    (384, 640, 2, 64, 1),
    (192, 704, 1, 0, 96),
    (2880, 2880, 1, 24, 33),
)
BLOCK_ROWS = (0, 1, 7, 9, 64, 65, 130, 3)
# The reference loops over groups, so this one is kept out of what runs for every kernel.
MANY_GROUPS = Case(tuple(int(group % 3 == 0) for group in range(4096)), 64, 128)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of the op and what it must give in the first `num_valid` rows, in float32."""

    a: Tensor
    b: Tensor
    offs: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    expected: Tensor
    num_valid: int
    case: Case

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.a, self.b, self.offs

    @property
    def scales(self) -> dict[str, object]:
        scales: dict[str, object] = {"scale_a": self.scale_a, "scale_b": self.scale_b}
        if self.case.n_segments != 1:
            scales["n_segments"] = self.case.n_segments
        if self.case.n_offset or self.case.k_offset:
            scales["scale_b_offset"] = (self.case.n_offset, self.case.k_offset)
        return scales


def offs_of(rows: tuple[int, ...] | list[int], device: str = "cpu") -> Tensor:
    """End row of each group."""
    ends = torch.tensor(rows, dtype=torch.int64).cumsum(0)
    return ends.to(torch.int32).to(device)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of NaN."""
    if dtype is torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def in_poison(x: Tensor, tail_rows: int = 0) -> Tensor:
    """A copy of `x` as a view of a larger tensor that holds NaN everywhere else."""
    *leading, rows, columns = x.shape
    margin = 0 if tail_rows else 3
    pitch = (columns + ROW_PADDING + 15) // 16 * 16
    shape = (*leading, margin + rows + max(tail_rows, margin), pitch)
    view = poisoned(shape, x.dtype, str(x.device))[
        ..., margin : margin + rows + tail_rows, :columns
    ]
    bytes_or_items = torch.uint8 if x.dtype is torch.float8_e4m3fn else x.dtype
    view.view(bytes_or_items)[..., :rows, :] = x.view(bytes_or_items)
    return view


def poisoned_out(num_rows: int, n: int, dtype: torch.dtype, device: str) -> Tensor:
    """An output of NaN with padding between its rows."""
    return poisoned((num_rows, n + ROW_PADDING), dtype, device)[:, :n]


def random_operands(
    case: Case, dtype: str, device: str, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Normal data, as a layer's: every output has about the same size."""
    a, b = _draw(case, dtype, lambda *shape: torch.randn(*shape, generator=generator))
    a, b = a.to(device), (b / max(1, a.shape[1]) ** 0.5).to(device)
    if dtype == "bf16":
        return a.bfloat16(), b.bfloat16(), None, None
    if dtype == "fp8_block" and (0 in a.shape or 0 in b.shape):
        return integer_operands(case, dtype, device, generator)
    if 0 in a.shape or 0 in b.shape:
        ones = torch.ones((), device=device), torch.ones(len(case.rows), device=device)
        return a.to(DTYPES[dtype]), b.to(DTYPES[dtype]), *ones
    # Weights of very different size from group to group, so that a wrong scale shows.
    b = b * torch.logspace(-2, 1, len(case.rows), device=device)[:, None, None]
    if dtype == "fp8_channel":
        (a, scale_a), (b, scale_b) = quantize_fp8_per_tensor(a, 1), quantize_fp8_per_tensor(b, 2)
        return a, b, scale_a, scale_b
    if dtype == "fp8_block":
        a, scale_a = quantize_fp8_per_block(a * _spread(a.shape[1], device), (1, 128))
        b, scale_b = _quantize_weights(b * _spread(b.shape[2], device), case)
        return a, b, _column_major(scale_a), scale_b
    (a, scale_a), (b, scale_b) = quantize_fp8_per_tensor(a), quantize_fp8_per_tensor(b, 1)
    return a, b, scale_a, scale_b


def integer_operands(
    case: Case, dtype: str, device: str, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Small integers, whose sums no accumulator rounds, with scales that are powers of two."""
    a, b = _draw(case, dtype, lambda *shape: torch.randint(-4, 5, shape, generator=generator))
    a, b = a.to(device).to(DTYPES[dtype]), b.to(device).to(DTYPES[dtype])
    if dtype == "bf16":
        return a, b, None, None
    groups, (rows, k) = len(case.rows), a.shape
    if dtype == "fp8_channel":
        scale_a, scale_b = _powers((rows, 1), generator), _powers((groups, case.n), generator)
        return a, b, scale_a.to(device), scale_b.to(device)
    if dtype == "fp8_block":
        each = -(-(case.n // case.n_segments + case.n_offset) // 128)
        blocks = (groups, each, -(-(k + case.k_offset) // 128))
        if case.n_segments > 1 or blocks[1:] == (1, 1):  # (groups, 1, 1) would be one per group
            blocks = (groups, case.n_segments, *blocks[1:])
        scale_a = _powers((rows, -(-k // 128)), generator)
        scale_b = _powers(blocks, generator)
        return a, b, _column_major(scale_a.to(device)), scale_b.to(device)
    scale_b = 2.0 ** (torch.arange(groups, device=device) % 5 - 2)
    return a, b, torch.full((1,), 0.5, device=device), scale_b


def _powers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Powers of two from 1/4 to 4."""
    return 2.0 ** torch.randint(-2, 3, shape, generator=generator)


def _column_major(scale: Tensor) -> Tensor:
    """The same values with rows next to each other and padding between the columns."""
    rows, columns = scale.shape
    padded = torch.full((columns, rows + 3), float("nan"), device=scale.device)
    padded[:, :rows] = scale.T
    return padded[:, :rows].T


def _spread(k: int, device: str) -> Tensor:
    """Another size for each 128 of k, so that a wrong block scale shows."""
    return 2.0 ** (torch.arange(k, device=device) // 128 % 7 - 3)


def _quantize_weights(b: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Quantise in blocks, each segment on its own, the first block short by the offsets."""
    q, scales = [], []
    for segment in b.chunk(case.n_segments, dim=1):
        padded = torch.nn.functional.pad(segment, (case.k_offset, 0, case.n_offset, 0))
        quantised, scale = quantize_fp8_per_block(padded, (128, 128))
        q.append(quantised[:, case.n_offset :, case.k_offset :])
        scales.append(scale)
    if case.n_segments == 1:
        one_block = scales[0].shape[1:] == (1, 1)
        return q[0].contiguous(), scales[0][:, None] if one_block else scales[0]
    joined = torch.cat([part.view(torch.uint8) for part in q], dim=1).view(FP8)
    return joined, torch.stack(scales, dim=1)


def _draw(case: Case, dtype: str, draw) -> tuple[Tensor, Tensor]:
    k = case.k_bytes // DTYPES[dtype].itemsize
    return draw(sum(case.rows), k), draw(len(case.rows), case.n, k)


def build_problem(case: Case, dtype: str, values: str, device: str) -> Problem:
    """Make a problem whose `values` are "random" or "integers", all of it embedded in NaN."""
    if dtype == "fp8_shifted":
        case, dtype = dataclasses.replace(case, k_offset=case.k_offset or 40), "fp8_block"
    generator = torch.Generator().manual_seed(1)
    operands = random_operands if values == "random" else integer_operands
    a, b, scale_a, scale_b = operands(case, dtype, device, generator)
    offs = offs_of(case.rows, device)
    expected = grouped_gemm_reference(
        a,
        b,
        offs,
        scale_a,
        scale_b,
        n_segments=case.n_segments,
        scale_b_offset=(case.n_offset, case.k_offset),
        out_dtype=torch.float32,
    )
    if scale_a is not None and scale_a.dim() > 0 and dtype in ("fp8_channel", "fp8_block"):
        tail = torch.full((TAIL_ROWS, *scale_a.shape[1:]), float("nan"), device=device)
        scale_a = torch.cat([scale_a, tail])
        if scale_a.dim() == 2:
            scale_a = _column_major(scale_a)
    return Problem(
        in_poison(a, TAIL_ROWS), in_poison(b), offs, scale_a, scale_b, expected, a.shape[0], case
    )


@functools.cache
def named_problem(name: str, dtype: str, values: str, device: str) -> Problem:
    """Make the problem of `CASES[name]`, once: every kernel runs on the same tensors."""
    return build_problem(CASES[name], dtype, values, device)
