"""Experts of Hugging Face Transformers on `moe_ext`: `register()`, then one word in the model."""

from __future__ import annotations

try:
    from moe_ext.integrations.transformers._register import NAME, register
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "transformers":
        raise
    raise ModuleNotFoundError(
        "moe_ext.integrations.transformers: the package transformers must be installed, got none: "
        'pip install "moe-ext[transformers]"',
        name=error.name,
    ) from None

__all__ = ["NAME", "register"]
