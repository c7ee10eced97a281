"""Precision routing: FP8 where it is harmless, BF16 where it is not, per expert and per stage."""

from __future__ import annotations

from moe_ext.precision.bank import ExpertBank
from moe_ext.precision.calibrate_files import CalibratedCheckpoint, calibrate_checkpoint
from moe_ext.precision.calibration import calibrate
from moe_ext.precision.convert import Converted, convert_checkpoint
from moe_ext.precision.layer_plan import LayerPlan, Precision, StagePlan
from moe_ext.precision.mixed import fused_moe_mixed
from moe_ext.precision.mixed_reference import fused_moe_mixed_reference
from moe_ext.precision.plan import PrecisionPlan
from moe_ext.precision.planning import Choice, PlannedPrecision, plan_precision
from moe_ext.precision.realistic import RealisticLayer, Tokens, realistic_layer
from moe_ext.precision.stats import LayerStats, PrecisionStats

__all__ = [
    "CalibratedCheckpoint",
    "Choice",
    "Converted",
    "ExpertBank",
    "LayerPlan",
    "LayerStats",
    "PlannedPrecision",
    "Precision",
    "PrecisionPlan",
    "PrecisionStats",
    "RealisticLayer",
    "StagePlan",
    "Tokens",
    "calibrate",
    "calibrate_checkpoint",
    "convert_checkpoint",
    "fused_moe_mixed",
    "fused_moe_mixed_reference",
    "plan_precision",
    "realistic_layer",
]
