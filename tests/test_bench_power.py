"""The benchmark's regimes of the power limit: which replays are timed, and their rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.bench_rows import make_row

from bench import run
from bench.cases import get_case
from bench.floors import is_compute_heavy, work_of
from bench.power import BURST, SUSTAINED, PowerPolicy, Schedule
from bench.rows import MIXED, in_regime, latest, load_rows

PAIR = ("gate_up", "down")


@pytest.mark.parametrize(
    ("replay_us", "bursts", "timed"),
    [(2000.0, 2, 10), (1000.0, 1, 20), (8000.0, 7, 3), (18000.0, 20, 1), (60000.0, 20, 1)],
)
def test_bursts_hold_about_thirty_milliseconds(replay_us: float, bursts: int, timed: int) -> None:
    schedule = PowerPolicy().schedule(20, replay_us, compute_heavy=True)
    assert schedule == Schedule(bursts, 1, timed, 0.1)
    assert schedule.bursts * schedule.timed >= 20
    assert timed == 1 or (1 + timed) * replay_us <= 32e3


def test_memory_bound_work_is_not_paused() -> None:
    assert PowerPolicy().schedule(20, 2000.0, compute_heavy=False) == Schedule(1, 0, 20, 0.0)


@pytest.mark.parametrize("compute_heavy", [True, False])
def test_sustained_samples_follow_the_same_work(compute_heavy: bool) -> None:
    schedule = PowerPolicy(SUSTAINED).schedule(20, 2100.0, compute_heavy=compute_heavy)
    assert schedule == Schedule(1, 143, 20, 0.0)
    assert schedule.discarded * 2100.0 >= 300e3


def test_first_replay_of_a_burst_is_not_a_sample() -> None:
    done: list[str] = []

    def replay(count: int) -> list[float]:
        done.append(f"replay {count}")
        return [99.0, *(float(i) for i in range(1, count))]

    samples = Schedule(2, 1, 3, 0.1).collect(replay, lambda seconds: done.append(f"{seconds}"))
    assert samples == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    assert done == ["0.1", "replay 4", "0.1", "replay 4"]


def test_seconds_of_a_schedule() -> None:
    assert Schedule(2, 1, 10, 0.1).seconds(2000.0) == pytest.approx(0.244)


def test_giving_up_allows_for_a_throttled_warm_up() -> None:
    assert PowerPolicy().give_up_factor(compute_heavy=True) > 1.32
    assert PowerPolicy().give_up_factor(compute_heavy=False) == 1.0
    assert PowerPolicy(SUSTAINED).give_up_factor(compute_heavy=True) == 1.0


@pytest.mark.parametrize(
    ("case", "tokens", "active", "heavy"),
    [("mixtral", 64, 8.0, False), ("mixtral", 256, 8.0, True), ("qwen3-30b", 256, 128.0, False)],
)
def test_heavy_cells_are_known_by_their_work(
    case: str, tokens: int, active: float, heavy: bool
) -> None:
    assert is_compute_heavy(work_of(get_case(case), PAIR, "fp8", tokens, active), "fp8") is heavy


def test_row_of_an_older_file_has_no_regime(tmp_path: Path) -> None:
    columns = asdict(make_row())
    del columns["power"]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    assert [row.power for row in load_rows(path)] == [MIXED]


def test_regimes_are_different_measurements() -> None:
    burst, sustained = make_row(power=BURST), make_row(power=SUSTAINED)
    assert latest([burst, sustained]) == [burst, sustained]
    assert in_regime([burst, sustained]) == [burst]
    assert in_regime([burst, sustained], SUSTAINED) == [sustained]


def test_older_rows_stand_in_for_bursts_that_are_missing() -> None:
    older, burst = make_row(power=MIXED, median_us=1.0), make_row(power=BURST, median_us=2.0)
    assert [row.median_us for row in in_regime([burst, older])] == [2.0]
    assert in_regime([older]) == [older]
    assert in_regime([older], SUSTAINED) == []


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_run_writes_the_regime(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--dry-run", "--cases", "mixtral", "--tokens", "1", "--out", str(out)]
    assert run.main([*command, "--power", SUSTAINED]) == 0
    assert run.main([*command, "--providers", "moe_ext"]) == 0
    assert {row.power for row in load_rows(out)} == {BURST, SUSTAINED}
