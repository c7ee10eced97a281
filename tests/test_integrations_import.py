"""What is said where Transformers is not installed."""

from __future__ import annotations

import sys

import pytest


def test_transformers_is_asked_for(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("moe_ext.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "moe-ext\[transformers\]"'):
        import moe_ext.integrations.transformers  # noqa: F401
