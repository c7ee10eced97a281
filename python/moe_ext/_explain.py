"""`moe_ext.explain`: the kernel that would run for a problem, why, and what it should cost."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Sequence

import torch

from moe_ext._checks import MAX_GROUPS, MAX_SIZE
from moe_ext._configs import planner
from moe_ext._dispatch import ITEM_BYTES, Problem, choose, floor_us, predict_us
from moe_ext._library import cuda_device
from moe_ext._measure import gemm_call, median_us, num_copies
from moe_ext._scales import SCALE_BLOCK, block_kind

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choice for one problem; `print` it, or read the fields.

    Attributes:
        dtype: "bf16" or "fp8" operands.
        accumulate: "fp32" (bf16), "promoted", "fast" or, with scales per block, "block", or
            "shifted" where they begin inside k (fp8).
        num_rows: rows of `a`.
        num_groups: matrices in `b`.
        n: columns of the result.
        k: summed dimension.
        sm_count: streaming multiprocessors of the GPU.
        config: id of the chosen kernel.
        config_index: its index, what the C++ op takes.
        source: "table" (a measured choice) or "cost model".
        reason: the table's measurement, or the cost model's estimate.
        active_groups: groups that own at least one row.
        largest_group: rows of the largest group.
        num_tiles: output tiles, each computed by one CTA.
        waves: num_tiles over the CTAs that run at the same time.
        padded_rows: rows computed beyond the real ones, because tiles have fixed widths.
        token_widths: token tile widths in use, ascending.
        weight_bytes: bytes of the active groups' weights.
        floor_us: the least the GEMM can take on an H200: weights read once, or the dense rate,
            plus 2 us.
        predicted_us: the cost model's estimate.
        measured_us: the median time on the GPU that was asked for, None where none was.
    """

    dtype: str
    accumulate: str
    num_rows: int
    num_groups: int
    n: int
    k: int
    sm_count: int
    config: str
    config_index: int
    source: str
    reason: str
    active_groups: int
    largest_group: int
    num_tiles: int
    waves: float
    padded_rows: int
    token_widths: tuple[int, ...]
    weight_bytes: int
    floor_us: float
    predicted_us: float
    measured_us: float | None = None

    def __str__(self) -> str:
        """Lay the choice out in a few aligned lines."""
        widths = ", ".join(map(str, self.token_widths)) or "none"
        lines = (
            (
                "problem",
                f"{self.dtype} {self.accumulate}, {self.num_rows} rows in {self.num_groups} "
                f"groups, n {self.n}, k {self.k}",
            ),
            ("kernel", f"{self.config} (index {self.config_index})"),
            *lines_of("why", f"{self.source}: {self.reason}"),
            (
                "work",
                f"{self.active_groups} groups with rows, the largest {self.largest_group}; "
                f"token tiles of {widths}",
            ),
            (
                "tiles",
                f"{self.num_tiles} on {self.sm_count} SMs, {self.waves:.2f} waves, "
                f"{self.padded_rows} rows of padding",
            ),
            ("weights", f"{self.weight_bytes / 2**20:.1f} MiB"),
            (
                "time",
                said_times(self.floor_us, self.predicted_us, self.measured_us)
                + of_rows(self.active_groups, self.num_groups, "groups"),
            ),
        )
        return aligned(lines)


def said_times(floor: float, predicted: float, measured: float | None) -> str:
    """Say the times of a problem."""
    said = f"floor {floor:.1f} us, predicted {predicted:.1f} us"
    return said if measured is None else f"{said}, measured {measured:.1f} us"


def of_rows(active: int, count: int, groups: str) -> str:
    """Say the rows that times are for: the estimate of `why` is the choice's, without offsets."""
    return f', for rows in {active} of {count} {groups} ("why" is for likely routings)'


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Put texts behind labels."""
    return "\n".join(f"{label:8} {text}" for label, text in lines)


def lines_of(label: str, text: str) -> list[tuple[str, str]]:
    """Break a long text at its semicolons."""
    first, *rest = text.split("; ")
    return [(label, first), *(("", part) for part in rest)]


def explain(
    *,
    dtype: torch.dtype | str,
    num_rows: int,
    num_groups: int,
    n: int,
    k: int,
    accumulate: str = "promoted",
    block_scales: bool = False,
    n_segments: int = 1,
    scale_b_offset: Sequence[int] = (0, 0),
    offs: Sequence[int] | None = None,
    sm_count: int | None = None,
    measure_on: torch.device | str | int | None = None,
) -> Explanation:
    """Say which compiled kernel `grouped_gemm` would run, why, and what it should cost.

    Args:
        dtype: torch.bfloat16 or torch.float8_e4m3fn, or "bf16" or "fp8".
        num_rows: rows of `a`: tokens times top-k in a layer.
        num_groups: matrices in `b`.
        n: columns of the result.
        k: summed dimension.
        accumulate: "promoted" or "fast"; bf16 always accumulates in fp32.
        block_scales: fp8 with a scale per 128 of k, which kernels of their own take. (The op sees a
            `b` of a single block as one with a scale per group, and runs other kernels.)
        n_segments: 2 where gate and up have block grids of their own; with `block_scales`.
        scale_b_offset: (n0, k0) where blocks begin inside a shard; with `block_scales`.
        offs: end row of each group, host numbers. None spreads the rows evenly. They change the
            tiles and times that are told, not the choice: the dispatcher never sees them.
        sm_count: streaming multiprocessors of the GPU. None is 132, an H200's, or what
            `measure_on` has.
        measure_on: a CUDA device or its index to time the chosen kernel on: random data, weights
            out of the L2 cache, a CUDA graph, the median of 20 replays. None measures nothing.

    Returns:
        An `Explanation`.

    Raises:
        ValueError: an argument is out of range, or there are no rows to measure.
        RuntimeError: `measure_on` is given and the kernels cannot run there, as the ops say it.

    Notes:
        Host only but with `measure_on`, which allocates 2 to 64 copies of `b`, as many as it takes
        for the weights that a call reads to exceed L2 four times, and synchronises.

    Example:
        >>> explanation = explain(dtype="fp8", num_rows=512, num_groups=128, n=1536, k=2048)
        >>> explanation.num_groups, explanation.active_groups
        (128, 128)
    """
    name = _DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in ITEM_BYTES:
        raise ValueError(
            f'explain: `dtype` must be bfloat16 ("bf16") or float8_e4m3fn ("fp8"), got {dtype!r}'
        )
    if accumulate not in (("promoted",) if name == "bf16" else ("promoted", "fast")):
        raise ValueError(
            'explain: `accumulate` must be "promoted", or "fast" for fp8 operands, got '
            f"{accumulate!r} for {name}"
        )
    if not isinstance(block_scales, bool):
        raise ValueError(f"explain: `block_scales` must be True or False, got {block_scales!r}")
    if block_scales and (name == "bf16" or accumulate != "promoted"):
        raise ValueError(
            f'explain: `block_scales` must be False for bf16 operands or accumulate="fast", got '
            f"True for {name} operands and accumulate={accumulate!r}"
        )
    if type(n_segments) is not int or n_segments not in ((1, 2) if block_scales else (1,)):
        raise ValueError(
            f"explain: `n_segments` must be 1, or 2 with `block_scales`, got {n_segments!r}"
        )
    offset = _sequence("explain", "scale_b_offset", scale_b_offset)
    if len(offset) != 2 or not all(
        type(start) is int and 0 <= start < (SCALE_BLOCK if block_scales else 1) for start in offset
    ):
        raise ValueError(
            f"explain: `scale_b_offset` must be (n0, k0), each 0 to {SCALE_BLOCK - 1} with "
            f"`block_scales` and 0 without, got {offset}"
        )
    num_rows = whole("explain", "num_rows", num_rows, 0, MAX_SIZE)
    num_groups = whole("explain", "num_groups", num_groups, 1, MAX_GROUPS)
    n, k = whole("explain", "n", n, 0, MAX_SIZE), whole("explain", "k", k, 0, MAX_SIZE)
    device, sm_count = gpu_of("explain", measure_on, sm_count)
    ends = ends_of("explain", offs, num_rows, num_groups)
    rows = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    if n % 4:
        raise ValueError(
            f"explain: `n` must be a multiple of 8, or of 4 for float32 results, got {n}"
        )
    decision = choose(
        dtype=name,
        accumulate=block_kind(n, n_segments, *offset) if block_scales else accumulate,
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
        sm_count=sm_count,
    )
    config = decision.config
    plan = planner().plan(ends, num_rows, n, config.index, sm_count)
    active_groups = sum(1 for count in rows if count)
    problem = Problem(name, config.accumulate, ends[-1], num_groups, n, k, sm_count)
    weight_bytes = active_groups * n * k * ITEM_BYTES[name]
    predicted = predict_us(config, problem, active_groups)
    measured = None
    if device is not None:
        if not (ends[-1] and n and k):
            raise ValueError(
                "explain: `measure_on` must be None where nothing is computed, got "
                f"{ends[-1]} rows, n {n}, k {k}"
            )
        copies = num_copies(weight_bytes)
        call = gemm_call(
            dtype=name,
            ends=ends,
            num_rows=num_rows,
            n=n,
            k=k,
            copies=copies,
            device=torch.device("cuda", device),
            accumulate=accumulate,
            block_scales=block_scales,
            n_segments=n_segments,
            scale_b_offset=offset,
            config=config.id,
        )
        measured = median_us("explain", device, call, copies, predicted)
    return Explanation(
        dtype=name,
        accumulate=config.accumulate,
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
        sm_count=sm_count,
        config=config.id,
        config_index=config.index,
        source=decision.source,
        reason=decision.reason,
        active_groups=active_groups,
        largest_group=max(rows),
        num_tiles=plan["num_tiles"],
        waves=plan["waves"],
        padded_rows=plan["padded_rows"],
        token_widths=tuple(sorted({width for width in plan["token_widths"] if width})),
        weight_bytes=weight_bytes,
        floor_us=floor_us(name, ends[-1], active_groups, n, k),
        predicted_us=predicted,
        measured_us=measured,
    )


def gpu_of(
    op: str, measure_on: torch.device | str | int | None, sm_count: int | None
) -> tuple[int | None, int]:
    """Return the index of the GPU to measure on, if any, and the number of SMs to choose for."""
    device, own = None, 132
    if measure_on is not None:
        device, kernels = cuda_device(op, measure_on, "measure_on")
        own = kernels.sm_count
    return device, own if sm_count is None else whole(op, "sm_count", sm_count, 1, 1024)


def ends_of(op: str, offs: Sequence[int] | None, num_rows: int, num_groups: int) -> list[int]:
    """Return the end row of each group, rows spread evenly where nothing is said of them."""
    if offs is None:
        return _even_offs(num_rows, num_groups)
    ends = [
        whole(op, f"offs[{i}]", end, 0, MAX_SIZE)
        for i, end in enumerate(_sequence(op, "offs", offs))
    ]
    if len(ends) != num_groups:
        raise ValueError(f"{op}: `offs` must have {num_groups} entries, got {len(ends)}")
    steps = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    if min(steps) < 0 or ends[-1] > num_rows:
        raise ValueError(
            f"{op}: `offs` must not decrease and end at num_rows = {num_rows} at most, got {ends}"
        )
    return ends


def whole(op: str, argument: str, value: object, least: int, most: int) -> int:
    """Return `value` as an int; raise a ValueError unless it is a whole number in the range."""
    number = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None or not least <= number <= most:
        raise ValueError(
            f"{op}: `{argument}` must be a whole number from {least} to {most}, got {value!r}"
        )
    return number


def _sequence(op: str, argument: str, value: object) -> tuple[int, ...]:
    """Return `value` as a tuple; raise a ValueError unless it is a sequence."""
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"{op}: `{argument}` must be a sequence of whole numbers, got {value!r}"
        ) from None


def _even_offs(num_rows: int, num_groups: int) -> list[int]:
    each, rest = divmod(num_rows, num_groups)
    return [each * (group + 1) + min(rest, group + 1) for group in range(num_groups)]
