"""A table of measured points: the nearest one answers, and nothing where none is near."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from moe_ext import _dispatch
from moe_ext._configs import matching_configs
from moe_ext._dispatch_points import Points, Tuned

log2 = math.log2


def make_points(seed=0, num_shapes=25, **options):
    """Shapes as layers have them; every choice has a name of its own."""
    draw = random.Random(seed)
    shapes = [
        Tuned(
            f"shape {number}",
            draw.choice([8, 32, 128, 512]),
            draw.choice([384, 1536, 7168, 28672]),
            draw.choice([192, 2048, 4096]),
            tuple((8 * 4**step, f"{number}-{step}", "1.00x") for step in range(7)),
        )
        for number in range(num_shapes)
    ]
    return Points("fp8", "promoted", *shapes, where="rows.jsonl", min_weight_tiles=1, **options)


def distance(num_rows, num_groups, n, k, shape, rows):
    x, measured = log2(max(num_rows, 1)), log2(rows)
    by_group = x - log2(num_groups) - measured + log2(shape.num_groups)
    of_shape = log2(n / shape.n) ** 2 + log2(k / shape.k) ** 2
    return (x - measured) ** 2 + by_group**2 + 0.3 * of_shape


def test_it_is_the_nearest_of_all_points():
    points, draw = make_points(), random.Random(1)
    for number in range(2000):
        problem = (
            int(2 ** draw.uniform(0, 18)),
            draw.choice([1, 4, 8, 60, 128, 300]),
            draw.randint(8, 30000),
            draw.randint(16, 9000),
        )
        if number % 2:  # a shape that was measured
            problem = (problem[0], *draw.choice(points.tuned)[1:4])
        every = [
            distance(*problem, shape, rows)
            for shape in points.tuned
            for rows, _, _ in shape.choices
        ]
        found = points.nearest(*problem, 132)
        if found is None:
            assert min(every) > 36
        else:
            mine = distance(*problem, found.tuned, found.num_rows)
            assert mine == pytest.approx(min(every), abs=1e-9)


def test_a_measured_point_answers_for_itself():
    shapes = [
        Tuned(name, groups, n, k, ((groups, f"{name} few", ""), (8 * groups, f"{name} many", "")))
        for name, (groups, n, k) in zip(
            "abc", [(128, 1536, 2048), (128, 2048, 768), (8, 28672, 4096)], strict=True
        )
    ]
    points = Points("bf16", "fp32", *shapes, where="")
    for shape in shapes:
        for rows, name, _ in shape.choices:
            assert points.nearest(rows, *shape[1:4], 132).kernel == name
        # Between two counts the nearer one, in octaves.
        few, many = (rows for rows, _, _ in shape.choices)
        middle = math.sqrt(few * many)
        assert points.nearest(int(0.98 * middle), *shape[1:4], 132).kernel.endswith("few")
        assert points.nearest(int(1.02 * middle), *shape[1:4], 132).kernel.endswith("many")
        assert points.nearest(few // 4, *shape[1:4], 132).kernel.endswith("few")


def test_the_more_alike_shape_answers():
    shapes = [Tuned(str(n), 64, n, 2048, ((512, f"n{n}", ""),)) for n in (1024, 4096)]
    points = Points("bf16", "fp32", *shapes, where="")
    for n, expected in ((1000, "n1024"), (1900, "n1024"), (2200, "n4096"), (8000, "n4096")):
        assert points.nearest(512, 64, n, 2048, 132).kernel == expected


def test_nothing_is_said_of_what_is_unlike_all_that_was_measured():
    points = Points(
        "bf16",
        "fp32",
        Tuned("a", 64, 1024, 2048, ((512, "a", ""),)),
        where="",
        min_weight_tiles=512,
    )
    assert points.nearest(512, 64, 1024, 2048, 132) is not None
    assert points.nearest(512, 64, 1024, 2048, 78) is None
    assert points.nearest(512, 32, 1024, 2048, 132) is not None  # 512 tiles of weights
    assert points.nearest(512, 31, 1024, 2048, 132) is None  # 496
    assert points.nearest(1 << 17, 64, 1024, 2048, 132) is None  # eight octaves of rows
    assert Points("bf16", "fp32", where="").nearest(512, 64, 1024, 2048, 132) is None


def test_it_says_why():
    nearest = make_points().nearest(100, 128, 1536, 2048, 132)
    assert nearest.reason.startswith("1.00x; measured with ")
    assert nearest.reason.endswith("; rows.jsonl")
    assert f"{nearest.num_rows} rows in {nearest.tuned.num_groups} groups" in nearest.reason


def test_kernels_are_listed_once():
    shape = Tuned("a", 8, 8, 8, ((1, "x+y", ""), (2, "x", ""), (4, "z", "")))
    assert Points("bf16", "fp32", shape, where="").kernels() == ("x", "y", "z")


def test_the_dispatcher_takes_the_nearest_or_asks_the_model():
    configs = matching_configs("fp8", "promoted")
    names = [config.id for config in configs]
    shape = Tuned("a", 128, 1536, 2048, ((8, names[3], "3"), (8192, names[0], "0")))
    gone = Tuned("b", 128, 8192, 8192, ((512, "swap_gone", ""),))
    points = Points("fp8", "promoted", shape, gone, where="rows.jsonl")

    def decide(num_rows, n=1536, k=2048, sm_count=132):
        problem = _dispatch.Problem("fp8", "promoted", num_rows, 128, n, k, sm_count)
        return _dispatch.decide(problem, configs, points)

    assert decide(16).config.id == names[3]
    assert decide(2048).config.id == names[0]
    assert decide(16).source == "table"
    assert "rows.jsonl" in decide(16).reason
    for other in (decide(16, sm_count=78), decide(512, n=8192, k=8192)):
        assert other.source == "cost model"


def test_a_shape_is_looked_at_once_and_the_cache_is_bounded():
    points = make_points()
    for n, rows in itertools.product(range(1024, 1024 + 1100), (8, 64)):
        points.nearest(rows, 128, n, 2048, 132)
    assert len(points._by_shape) <= 1024
