"""What holds every replay of a graph against its draw sees a single wrong value in one of them."""

from __future__ import annotations

import pytest
import torch
from support.graphs import REPLAYS, assert_every_replay_is_right


class Doubles:
    """A graph that doubles its argument into both outputs, in one replay with a mistake."""

    def __init__(self, wrong_replay=None):
        self.argument = torch.zeros(3, dtype=torch.int32)
        self.outs = [torch.zeros(4).bfloat16() for _ in range(2)]
        self.replays, self.wrong_replay = 0, wrong_replay

    def replay(self):
        for out in self.outs:
            assert out.isnan().all()
            out[:3] = 2 * self.argument
        if self.replays == self.wrong_replay:
            self.outs[1][2] += 1
        self.replays += 1


def draws():
    made = []
    for k in range(3):
        value, expected = torch.tensor([k, k + 1, 3]).int(), torch.zeros(4).bfloat16()
        expected.fill_(float("nan"))
        expected[:3] = 2 * value
        made.append((value, expected))
    return made


def test_all_right():
    graph = Doubles()
    assert_every_replay_is_right(graph, graph.argument, draws(), graph.outs)
    assert graph.replays == REPLAYS


@pytest.mark.parametrize("wrong_replay", [0, 500, REPLAYS - 1])
def test_one_wrong_value(wrong_replay):
    graph = Doubles(wrong_replay)
    with pytest.raises(AssertionError, match=f"1 wrong values in {REPLAYS} replays"):
        assert_every_replay_is_right(graph, graph.argument, draws(), graph.outs)
