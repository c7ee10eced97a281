"""Functions with the signatures of others, so that a call site changes by its import alone."""

from __future__ import annotations

from moe_ext.compat._fused_experts import fused_experts
from moe_ext.compat._grouped_mm import grouped_mm

__all__ = ["fused_experts", "grouped_mm"]
