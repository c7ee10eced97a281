"""`PrecisionPlan`: what it holds, one-line choices, JSON, and what is refused in which words."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from moe_ext.precision import LayerPlan, Precision, PrecisionPlan, StagePlan
from moe_ext.precision.layer_plan import STAGES

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

COUNTS = {"layers.0.experts": 4, "layers.1.experts": 6, "layers.2.experts": 4}
UNIFORM = PrecisionPlan.uniform(COUNTS)


def in_bf16(plan):
    return set(plan.bf16())


def test_uniform_plans():
    assert in_bf16(UNIFORM) == set()
    assert UNIFORM["layers.1.experts", 5, "down"] == Precision("fp8", "block")
    whole = PrecisionPlan.uniform(COUNTS, "bf16", scales="channel")
    assert whole[0, 0, "gate_up"] == Precision("bf16", None)
    assert len(in_bf16(whole)) == 2 * (4 + 6 + 4)
    assert all(layer.is_uniform for layer in (*UNIFORM.layers.values(), *whole.layers.values()))


def test_down_of_all_layers_is_one_line():
    plan = UNIFORM.with_bf16(stages="down")
    assert in_bf16(plan) == {(n, e, "down") for n, count in COUNTS.items() for e in range(count)}
    assert not plan.layer(0).is_uniform


def test_first_and_last_layers_are_one_line():
    plan = UNIFORM.with_bf16(layers=(0, -1))
    assert {name for name, _, _ in in_bf16(plan)} == {"layers.0.experts", "layers.2.experts"}
    assert len(in_bf16(plan)) == 16


def test_experts_of_a_layer_by_name():
    plan = UNIFORM.with_bf16(layers="layers.1.experts", experts=(5, 2), stages="gate_up")
    assert plan.layer(1).gate_up.bf16 == (2, 5)
    assert plan.with_fp8(experts=iter([2])).layer(1).gate_up.bf16 == (5,)
    assert plan.with_fp8() == UNIFORM


def test_scales_are_of_a_stage():
    plan = UNIFORM.with_fp8(layers=1, stages="down", scales="tensor")
    assert plan[1, 0, "down"].scales == "tensor"
    assert plan[1, 0, "gate_up"].scales == plan[0, 0, "down"].scales == "block"


def test_plans_do_not_change_and_compare_by_value():
    plan = UNIFORM.with_bf16(layers=0)
    assert plan != UNIFORM
    assert plan == UNIFORM.with_bf16(layers=0)
    assert hash(plan) == hash(UNIFORM.with_bf16(layers=0))
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError, match="plans do not change"):
        plan._layers = {}
    with pytest.raises(TypeError):
        plan.layers["x"] = LayerPlan(1)
    with pytest.raises(AttributeError):
        plan.layer(0).num_experts = 3
    reordered = PrecisionPlan(dict(reversed(plan.layers.items())))
    assert reordered != plan  # first and last are others


def test_repr():
    assert repr(UNIFORM.with_bf16(layers=1)) == (
        "PrecisionPlan(3 layers, 12 of 28 expert stages in BF16)"
    )


def test_a_part_of_the_experts():
    layer = LayerPlan(8).with_bf16(experts=(1, 4, 6), stages="down").with_bf16(experts=5)
    part = layer.of_experts(4, 3)
    assert part == LayerPlan(3, StagePlan("block", (1,)), StagePlan("block", (0, 1, 2)))


# JSON


def test_json_is_a_layer_to_a_line():
    plan = UNIFORM.with_bf16(layers=0).with_bf16(layers=1, experts=3, stages="down")
    text = plan.to_json()
    assert text.splitlines()[:5] == [
        "{",
        '  "format": "moe_ext.precision_plan",',
        '  "version": 1,',
        '  "layers": {',
        '    "layers.0.experts": {"num_experts": 4, "gate_up": {"scales": "block", "bf16": "all"}, '
        '"down": {"scales": "block", "bf16": "all"}},',
    ]
    assert '"down": {"scales": "block", "bf16": [3]}' in text.splitlines()[5]
    assert PrecisionPlan.from_json(text) == plan


@st.composite
def plans(draw):
    layers = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=6), max_size=4, unique=True)):
        count = draw(st.integers(1, 9))
        stages = [
            StagePlan(
                draw(st.sampled_from(["block", "channel", "tensor"])),
                tuple(sorted(draw(st.sets(st.integers(0, count - 1))))),
            )
            for _ in STAGES
        ]
        layers[name] = LayerPlan(count, *stages)
    return PrecisionPlan(layers)


@hypothesis.settings(deadline=None)
@given(plans())
def test_json_round_trip(plan):
    again = PrecisionPlan.from_json(plan.to_json())
    assert again == plan
    assert again.names == plan.names


def test_files_appear_when_they_are_complete(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    UNIFORM.save(path)
    assert PrecisionPlan.load(path) == UNIFORM
    monkeypatch.setattr(PrecisionPlan, "to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        UNIFORM.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert PrecisionPlan.load(path) == UNIFORM


def document(**changes):
    stage = {"scales": "block", "bf16": [1]}
    layer = {"num_experts": 4, "gate_up": stage, "down": stage} | changes.pop("layer", {})
    return {"format": "moe_ext.precision_plan", "version": 1, "layers": {"a": layer}} | changes


WRONG_JSON = {
    "no JSON": (
        "{",
        "the text must be JSON, got Expecting property name enclosed in double quotes"
        " at line 1, column 2",
    ),
    "list": ([1], '`format` must be "moe_ext.precision_plan", got a list'),
    "format": (document(format="x"), '`format` must be "moe_ext.precision_plan", got "x"'),
    "later": (
        document(version=2),
        "`version` must be an int from 1 to 1, which this moe_ext reads, got 2",
    ),
    "no version": (
        document(version=None),
        "`version` must be an int from 1 to 1, which this moe_ext reads, got None",
    ),
    "more": (
        document(extra=1),
        'the plan must have nothing but "format", "version", "layers", got "extra"',
    ),
    "layers": (document(layers=[]), "`layers` must be an object, got a list"),
    "layer": (document(layers={"a": 3}), '`layers["a"]` must be an object, got 3'),
    "name": (
        document(layers={"": document()["layers"]["a"]}),
        'the name of a layer must be a string, not empty, got ""',
    ),
    "missing": (
        document(layers={"a": {"num_experts": 1}}),
        '`layers["a"]` must have "gate_up", got "num_experts"',
    ),
    "count": (
        document(layer={"num_experts": 5000}),
        '`layers["a"].num_experts` must be an int from 1 to 4096, got 5000',
    ),
    "count of all": (
        document(layer={"num_experts": 10_000_000_000, "down": {"scales": "block", "bf16": "all"}}),
        '`layers["a"].num_experts` must be an int from 1 to 4096, got 10000000000',
    ),
    "deep": ("[" * 100_000, "the text must be JSON, got values nested too deep"),
    "true": (
        document(layer={"num_experts": True}),
        '`layers["a"].num_experts` must be an int from 1 to 4096, got True',
    ),
    "stage": (
        document(layer={"down": {"scales": "block"}}),
        '`layers["a"].down` must have "bf16", got "scales"',
    ),
    "scales": (
        document(layer={"down": {"scales": "row", "bf16": []}}),
        '`layers["a"].down.scales` must be one of "block", "channel", "tensor", got "row"',
    ),
    "experts": (
        document(layer={"down": {"scales": "block", "bf16": "some"}}),
        '`layers["a"].down.bf16` must be a list of experts or "all", got "some"',
    ),
    "outside": (
        document(layer={"gate_up": {"scales": "block", "bf16": [0, 4]}}),
        '`layers["a"].gate_up.bf16` must hold experts 0 to 3, got 4',
    ),
    "float": (
        document(layer={"gate_up": {"scales": "block", "bf16": [0.0]}}),
        '`layers["a"].gate_up.bf16` must hold experts 0 to 3, got 0.0',
    ),
    "order": (
        document(layer={"gate_up": {"scales": "block", "bf16": [2, 2]}}),
        '`layers["a"].gate_up.bf16` must be ascending, without repeats, got 2 after 2',
    ),
    "repeated": (
        '{"format": "moe_ext.precision_plan", "format": 1}',
        'a name must not be repeated in an object, got "format"',
    ),
}


@pytest.mark.parametrize("name", WRONG_JSON)
def test_what_is_wrong_in_json(name):
    value, message = WRONG_JSON[name]
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        PrecisionPlan.from_json(text)
    assert str(error.value) == f"PrecisionPlan: {message}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89PNG\xff", "`path` must be a file of text, got bytes: {path}"),
        (b"[" * 100_000, "the text must be JSON, got values nested too deep, in {path}"),
        (b"[]", '`format` must be "moe_ext.precision_plan", got a list, in {path}'),
    ],
    ids=["a picture", "deep", "a list"],
)
def test_a_file_that_is_no_plan_is_named(content, said, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        PrecisionPlan.load(path)
    assert str(error.value) == f"PrecisionPlan: {said.format(path=path)}"


WRONG_CALLS = {
    "no mapping": (
        lambda: PrecisionPlan([1]),
        "`layers` must map names to plans of layers, got [1]",
    ),
    "no plan": (lambda: PrecisionPlan({"a": 3}), '`layers["a"]` must be a LayerPlan, got 3'),
    "kind": (
        lambda: PrecisionPlan.uniform(COUNTS, "fp4"),
        '`kind` must be "fp8" or "bf16", got "fp4"',
    ),
    "no experts": (lambda: LayerPlan(0), "`num_experts` must be an int from 1 to 4096, got 0"),
    "stage plan": (lambda: LayerPlan(1, "fp8"), '`gate_up` must be a StagePlan, got "fp8"'),
    "list": (
        lambda: LayerPlan(1, StagePlan(bf16=[0])),
        "`gate_up.bf16` must be a tuple, got [0]",
    ),
    "layer": (
        lambda: UNIFORM.with_bf16(layers="b"),
        'a layer must be a name or position among 3 layers ("layers.0.experts", '
        '"layers.1.experts", "layers.2.experts"), got "b"',
    ),
    "position": (
        lambda: UNIFORM[3, 0, "down"],
        'a layer must be a name or position among 3 layers ("layers.0.experts", '
        '"layers.1.experts", "layers.2.experts"), got 3',
    ),
    "expert": (
        lambda: UNIFORM.with_bf16(layers=0, experts=(1, 4)),
        "an expert must be an int from 0 to 3, got 4",
    ),
    "stage": (
        lambda: UNIFORM.with_bf16(stages="up"),
        'a stage must be one of "gate_up", "down", got "up"',
    ),
    "part": (lambda: LayerPlan(4).of_experts(2, 3), "`count` must be an int from 1 to 2, got 3"),
    "text": (lambda: PrecisionPlan.from_json(3), "`text` must be a string, got 3"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_what_is_refused(name):
    call, message = WRONG_CALLS[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert str(error.value) == f"PrecisionPlan: {message}"
