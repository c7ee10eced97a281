"""What a provider is: an implementation of an op that the benchmark can call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from bench.layer import LayerProblem
from bench.layouts import CONTIGUOUS
from bench.problem import Problem
from bench.scales import has_blocks
from bench.timing import Call

P = TypeVar("P", Problem, LayerProblem)


@dataclass(frozen=True)
class Variant:
    """One way a provider can run a cell: the columns of a row that it decides."""

    dtype: str
    scale: str
    accumulate: str
    # Forced kernels, one or as many as there are stages, joined by "+"; None: the provider chooses.
    config: str | None = None
    batch_invariant: bool = False


def kernels_of(config: str, num_stages: int) -> list[str]:
    """Return the kernel of each stage that a configuration names."""
    names = config.split("+")
    return names * num_stages if len(names) == 1 else names


def joined(kernels: Sequence[str]) -> str:
    """Return the configuration that names one kernel for each stage."""
    return "+".join(kernels[:1] if len(set(kernels)) == 1 else kernels)


def accumulations(
    dtype: str, accumulates: Sequence[str], scales: Sequence[str]
) -> list[tuple[str, str]]:
    """Return (scale, accumulate) of this project's variants: BF16 always accumulates in fp32, FP8
    once per layout and accumulation that it has."""
    if dtype == "bf16":
        return [("none", "fp32")]
    return [
        (scale, accumulate)
        for scale in scales
        for accumulate in accumulates
        if accumulate == "promoted" or not has_blocks(scale)
    ]


class Provider(ABC, Generic[P]):
    """An implementation under measurement, of GEMMs or of whole layers. A missing one is skipped, a
    wrong one not timed."""

    name: str
    needs: str  # what must be there for it to be available
    layouts: tuple[str, ...] = (CONTIGUOUS,)  # of `bench.layouts.LAYOUTS`
    batch_invariant: bool = False  # whether it has such a mode

    @abstractmethod
    def available(self) -> bool:
        """Return whether it can be imported and called here."""

    @abstractmethod
    def variants(
        self,
        dtype: str,
        accumulates: Sequence[str],
        scales: Sequence[str],
        configs: Sequence[str],
    ) -> list[Variant]:
        """Return the variants to measure.

        Args:
            dtype: "bf16" or "fp8".
            accumulates: Requested FP8 accumulation: "promoted", "fast".
            scales: Requested FP8 scale layouts, of `bench.scales.SCALES`.
            configs: Kernels to force; ["all"] for every one that fits, [] for its own choice.
        """

    @abstractmethod
    def prepare(self, problem: P, variant: Variant) -> Call:
        """Return the call to check and to time; it must not allocate outside PyTorch's allocator,
        synchronise, or read device memory on the host."""

    def unpack(self, problem: P, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of call 0 in the shape of the problem's own, for the check;
        not timed."""
        return list(outputs)

    def config_name(self, problem: P, variant: Variant) -> str:
        """Return the kernel that runs, one name per stage joined by "+"; empty when unknown."""
        return variant.config or ""
