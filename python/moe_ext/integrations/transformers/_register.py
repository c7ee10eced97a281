"""`register`: the name "moe_ext" in Transformers' two registries of experts implementations."""

from __future__ import annotations

from typing import Any

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_ext.integrations.transformers._converted import register_converted
from moe_ext.integrations.transformers._forward import experts_forward
from moe_ext.integrations.transformers._gates import checked_gate
from moe_ext.integrations.transformers._pack import check_format, is_experts, pack

NAME = "moe_ext"


def register(model: Any | None = None) -> None:
    """Make `experts_implementation="moe_ext"` known to Transformers, and a model use it.

    Args:
        model: a `transformers.PreTrainedModel`, on its devices and with its weights; every module
            of experts in it is checked and its weights are packed, then its implementation is set
            to "moe_ext". None only registers: each module is then checked and packed at its first
            eager call.

    Raises:
        ValueError: experts of `model` have an activation, a dtype or a scale that `moe_ext` has not
            got; nothing of the model is changed.

    Notes:
        May be called any number of times. Packing concerns weights whose K is not contiguous, as
        gpt-oss' (transposed), or whose rows are not a multiple of 16 bytes: a parameter keeps its
        name, shape and values and gets other strides. One at a time is copied, and no second copy
        stays. FP8 scales stored as powers of two (float8_e8m0fnu) become float32.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> register()
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     name, dtype="bfloat16", experts_implementation="moe_ext"
        ... )  # doctest: +SKIP
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    register_converted()
    if model is None:
        return
    if not hasattr(model, "set_experts_implementation"):
        raise ValueError(
            "register: `model` must be a transformers.PreTrainedModel or None, got "
            f"{type(model).__name__}"
        )
    experts = [module for module in model.modules() if is_experts(module)]
    if not experts:
        raise ValueError(
            "register: `model` must have experts that use Transformers' registry, got "
            f"{type(model).__name__} without"
        )
    for module in experts:
        check_format(module)
        checked_gate(module, module.down_proj.device)
    for module in experts:
        pack(module)
    model.set_experts_implementation(NAME)
