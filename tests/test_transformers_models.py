"""Every model of Transformers that uses its registry of experts, by moe_ext and by eager."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from moe_ext.integrations.transformers import NAME, register
from support.tiny_models import (
    MODEL_CLASSES,
    closeness,
    output_of,
    recorded_routing,
    tiny_model,
    tokens,
)
from support.tolerance import assert_close_to_reference

# What Transformers warns of is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parent.parent / "docs" / "transformers.md"


@pytest.mark.parametrize("made", MODEL_CLASSES, ids=str)
def test_logits_are_as_close_to_float32_as_those_of_eager(made, device):
    assert (measured := closeness(made, device)).passes, measured


@pytest.mark.parametrize("made", MODEL_CLASSES, ids=str)
def test_each_module_of_experts_is_right(made, device):
    model, ids = tiny_model(made, device), tokens(device)
    calls, _ = recorded_routing(model, lambda: output_of(model, ids))
    register(model)
    with torch.no_grad():
        for experts, hidden, index, weights in calls:
            exact = copy.deepcopy(experts).float()
            exact.config._experts_implementation = "eager"
            expected = exact(hidden.float(), index, weights.float())
            assert experts.config._experts_implementation == NAME
            out = experts(hidden, index, weights)
            assert out.dtype is hidden.dtype
            assert_close_to_reference(out, expected)


def test_the_page_lists_what_is_tested():
    text = PAGE.read_text()
    version = re.search(r"Transformers (\d+\.\d+)\.\d+ has (\d+) classes", text)
    if not transformers.__version__.startswith(f"{version[1]}."):
        pytest.skip(f"the page is of Transformers {version[1]}")
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \|$", text, re.MULTILINE)
    assert listed == [(made.package, made.experts, "yes") for made in MODEL_CLASSES]
    assert len(listed) == int(version[2])
