"""Every model of Transformers that uses its registry of experts, by moe_ext and by eager."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from moe_ext.integrations.transformers import NAME, register
from support.tiny_models import (
    MODEL_CLASSES,
    experts_of,
    output_of,
    pinned_routing,
    recorded_routing,
    tiny_model,
    tokens,
)
from support.tolerance import assert_close_to_reference, dissimilarity

# Twice eager's own distance from float32: both round, at other places.
MARGIN = 2.0


@pytest.mark.parametrize("made", MODEL_CLASSES, ids=str)
def test_logits_are_as_close_to_float32_as_those_of_eager(made, device):
    model, ids = tiny_model(made, device), tokens(device)
    assert made.experts in {type(module).__name__ for module in experts_of(model)}
    calls, eager = recorded_routing(model, lambda: output_of(model, ids))
    exact_model = copy.deepcopy(model).float()
    exact = pinned_routing(exact_model, calls, lambda: output_of(exact_model, ids))
    register(model)
    ours = pinned_routing(model, calls, lambda: output_of(model, ids))
    assert dissimilarity(ours, exact) <= MARGIN * dissimilarity(eager, exact)
    # The comparison would hide experts that hardly matter.
    with torch.no_grad():
        for experts in experts_of(model):
            experts.down_proj.zero_()
    without = pinned_routing(model, calls, lambda: output_of(model, ids))
    assert dissimilarity(without, exact) > 100 * dissimilarity(ours, exact)


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
