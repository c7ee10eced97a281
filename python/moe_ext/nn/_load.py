"""A checkpoint's form is found, its experts are chosen, and their tensors are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_ext._activations import ACTIVATIONS, INTERLEAVED
from moe_ext.nn._arguments import check_bool, check_selection, check_string
from moe_ext.nn._build import Plan, Reader, build
from moe_ext.nn._packed import PackedReader, refuse_mxfp4
from moe_ext.nn._per_expert import PerExpertReader
from moe_ext.nn._pieces import quoted
from moe_ext.nn._source import LinearsSource, Source


def experts_of_state_dict(
    op: str,
    state_dict: Mapping[str, Tensor],
    *,
    prefix: str,
    num_experts: int | None,
    first_expert: int,
    num_local: int | None,
    intermediate_range: tuple[int, int] | None,
    pad_blocks: bool,
    transposed: bool | None,
    quantize: str | None,
    device: torch.device | str | None,
    consume: bool,
    activation: str,
    gate_up_layout: str,
) -> dict[str, Tensor]:
    """Return the tensors of `Experts` by name; arguments as in `Experts.from_state_dict`."""
    check_selection(op, num_experts, first_expert, num_local, intermediate_range)
    check_string(op, "prefix", prefix)
    check_string(op, "quantize", quantize, optional=True)
    check_bool(op, "pad_blocks", pad_blocks)
    check_bool(op, "transposed", transposed, optional=True)
    check_bool(op, "consume", consume)
    gated = _is_gated(op, activation)
    source = Source(op, state_dict, consume)
    prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    refuse_mxfp4(source, prefix)
    interleaved = gate_up_layout == INTERLEAVED
    packed = PackedReader(
        source, prefix, gated=gated, interleaved=interleaved, transposed=transposed
    )
    single = PerExpertReader(source, prefix, gated)
    if packed.found and single.found:
        raise ValueError(
            f"{op}: `state_dict` must have experts packed or one by one, not both, got "
            f"{source.shown()}"
        )
    if not packed.found and not single.found:
        names = ("gate_up_proj", "0.gate_proj.weight") if gated else ("up_proj", "0.up_proj.weight")
        wanted = " or ".join(quoted(prefix + name) for name in names)
        raise ValueError(f"{op}: `state_dict` must have {wanted}, got {source.shown()}")
    if single.found:
        _refuse_interleaved(op, gate_up_layout)
    reader: Reader = packed if packed.found else single
    experts = _expert_range(op, source, reader, num_experts, first_expert, num_local, packed.found)
    return build(reader, Plan(op, experts, intermediate_range, pad_blocks, quantize, device))


def experts_of_linears(
    op: str,
    experts: Iterable[nn.Module],
    *,
    first_expert: int,
    num_local: int | None,
    intermediate_range: tuple[int, int] | None,
    quantize: str | None,
    device: torch.device | str | None,
    consume: bool,
    activation: str,
    gate_up_layout: str,
) -> dict[str, Tensor]:
    """Return the tensors of `Experts` by name; arguments as in `Experts.from_linears`."""
    check_selection(op, None, first_expert, num_local, intermediate_range)
    check_string(op, "quantize", quantize, optional=True)
    check_bool(op, "consume", consume)
    gated = _is_gated(op, activation)
    _refuse_interleaved(op, gate_up_layout)
    source = LinearsSource(op, experts, consume)
    reader = PerExpertReader(source, "", gated)
    if not reader.found:
        raise ValueError(f"{op}: `experts` must hold modules of linears, got {source.shown()}")
    chosen = _expert_range(op, source, reader, None, first_expert, num_local, True)
    return build(reader, Plan(op, chosen, intermediate_range, False, quantize, device))


def _is_gated(op: str, activation: str) -> bool:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: `activation` must be one of {', '.join(map(quoted, ACTIVATIONS))}, got "
            f'"{activation}"'
        )
    return ACTIVATIONS[activation].gated


def _refuse_interleaved(op: str, gate_up_layout: str) -> None:
    if gate_up_layout == INTERLEAVED:
        raise ValueError(
            f'{op}: `gate_up_layout` must be "concatenated" where gate and up have weights of '
            f'their own, got "{gate_up_layout}"'
        )


def _expert_range(
    op: str,
    source: Source,
    reader: Reader,
    num_experts: int | None,
    first_expert: int,
    num_local: int | None,
    is_complete: bool,
) -> range:
    """Return the experts that are asked for."""
    present = reader.num_experts
    wrong = present != num_experts if is_complete else present > (num_experts or present)
    if num_experts is not None and wrong:
        raise ValueError(
            f"{op}: `{source.argument}` must have {num_experts} experts (`num_experts`), got "
            f"{present}"
        )
    total = present if num_experts is None else num_experts
    end = total if num_local is None else first_expert + num_local
    if not 0 <= first_expert < end <= total:
        raise ValueError(
            f"{op}: `first_expert` and `num_local` must name experts among the {total} of "
            f"`{source.argument}`, at least one, got {first_expert} and {num_local}"
        )
    return range(first_expert, end)
