"""Modules: the experts of a layer with their weights, and the layer around them."""

from __future__ import annotations

from moe_ext.nn.experts import Experts
from moe_ext.nn.moe_layer import MoELayer

__all__ = ["Experts", "MoELayer"]
