"""The measured choices for blocks that plain order does not take: those of all."""

from __future__ import annotations

from moe_ext import _dispatch_table_block

CHOICES = _dispatch_table_block.CHOICES
