"""Experts of Hugging Face Transformers on `moe_ext`: `register()`, then one word in the model."""

from __future__ import annotations

from moe_ext.integrations.transformers._register import NAME, register

__all__ = ["NAME", "register"]
