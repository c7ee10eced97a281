"""`moe-ext calibrate`, `plan`, `convert` and `report`, one after the other on a tiny model."""

from __future__ import annotations

import re

import pytest
import torch
from moe_ext.nn import Experts
from moe_ext.precision import (
    ExpertBank,
    PrecisionPlan,
    PrecisionStats,
    calibrate_checkpoint,
    plan_precision,
)
from moe_ext.precision.planning import fp8_bytes_of

pytest.importorskip("typer")
pytest.importorskip("safetensors")
from safetensors.torch import load_file
from support.cli import EXPERTS, NUMBERS, Shell, prefix_of, write_model
from support.precision import layer_stats
from support.tolerance import assert_same_bits


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@pytest.fixture
def paths(tmp_path):
    """Where the files of a model are, and where those of commands go."""
    names = ("data", "stats")
    found = {name: tmp_path / f"{name}.safetensors" for name in names}
    found |= {"model": tmp_path / "model", "plan": tmp_path / "plan.json", "out": tmp_path / "out"}
    return found | {"png": tmp_path / "report.png"}


def calibrated(shell, paths):
    layers = write_model(paths["model"].parent)
    said = shell("calibrate", paths["model"], paths["data"], "--out", paths["stats"])
    return layers, said


def test_from_a_checkpoint_to_banks(shell, paths):
    layers, said = calibrated(shell, paths)
    assert said.startswith(f"2 layers, {2 * EXPERTS} experts, ")
    stats = PrecisionStats.load(paths["stats"])
    assert list(stats.layers) == [prefix_of(number) for number in NUMBERS]

    said = shell("plan", paths["stats"], "--budget", "8%", "--out", paths["plan"])
    planned = plan_precision(stats, byte_budget=0.08)
    assert PrecisionPlan.load(paths["plan"]) == planned.plan
    assert said.startswith(f"{len(planned.choices)} of {4 * EXPERTS} stages of experts in BF16")
    assert f"at most {planned.gap:.2%} of FP8's error energy above the best one" in said
    chosen = set(planned.plan.bf16())
    for number, layer in layers.items():
        (super_expert,) = layer.super_experts
        assert (prefix_of(number), super_expert, "down") in chosen

    said = shell("convert", paths["model"], "--plan", paths["plan"], "--out", paths["out"])
    assert said.startswith(f"{4 * EXPERTS - len(planned.choices)} stages of experts in FP8; ")
    for number, layer in layers.items():
        own = planned.plan.layer(prefix_of(number))
        bank = ExpertBank.from_checkpoint(paths["out"], prefix_of(number))
        wanted = ExpertBank.from_experts(own, bf16=layer.experts())
        tokens = layer.tokens(20, seed=9)
        assert_same_bits(bank(*tokens), wanted(*tokens))
    before, after = (load_file(next(paths[p].glob("*.safetensors"))) for p in ("model", "out"))
    for number in NUMBERS:
        name = f"model.layers.{number}.mlp.gate.weight"
        assert torch.equal(before[name], after[name])

    said = shell("report", paths["stats"], "--plan", paths["plan"], "--top", 3)
    assert prefix_of(0) in said
    assert f"{planned.extra_bytes / planned.fp8_bytes:.2%}" in said
    assert "the 3 stages with the largest errors" in said
    # The mean over layers of relative energies, as the planner has it.
    assert f"{planned.fp8_error:.3%}" in said
    assert f"{planned.error:.3%}" in said


def test_statistics_are_those_of_the_function(shell, paths):
    calibrated(shell, paths)
    shell(
        *("calibrate", paths["model"], paths["data"], "--out", paths["stats"]),
        *("--scales", "channel", "--min-rows", 40),
    )
    own = PrecisionStats.load(paths["stats"])
    wanted = calibrate_checkpoint(paths["model"], paths["data"], scales="channel", min_rows=40)
    for name, layer in wanted.stats.layers.items():
        assert torch.equal(own.layers[name].error, layer.error)
        assert own.layers[name].min_rows == 40
        assert own.layers[name].down_scales == "channel"


def test_names_with_brackets_are_printed_as_they_are(shell, tmp_path):
    name, path = "a[bold].layers.0.:smile:[/x]", tmp_path / "s[red].safetensors"
    PrecisionStats({name: layer_stats([(1.0, 2.0)])}).save(path)
    assert name in shell("report", path)
    said = shell("plan", path, "--budget", "1%", "--out", tmp_path / "p[i].json")
    assert (tmp_path / "p[i].json").is_file()
    assert said.startswith("0 of 2 stages")


def test_budgets_in_bytes_and_errors(shell, paths):
    calibrated(shell, paths)
    stats = PrecisionStats.load(paths["stats"])
    whole = plan_precision(stats, byte_budget=0.1)
    # Exactly what that plan takes is enough, and a byte less is not.
    for less, count in ((0, len(whole.choices)), (1, len(whole.choices) - 1)):
        budget = f"{whole.extra_bytes - less}B"
        shell("plan", paths["stats"], "--budget", budget, "--out", paths["plan"])
        assert sum(1 for _ in PrecisionPlan.load(paths["plan"]).bf16()) == count
    kib = f"{fp8_bytes_of(stats) / 10 / 1024:.3f}KiB"
    shell("plan", paths["stats"], "--budget", kib, "--out", paths["plan"])
    assert PrecisionPlan.load(paths["plan"]) == whole.plan
    for budget, error in (("40dB", 0.01), ("1%", 0.01)):
        said = shell("plan", paths["stats"], "--error-budget", budget, "--out", paths["plan"])
        wanted = plan_precision(stats, error_budget=error)
        assert PrecisionPlan.load(paths["plan"]) == wanted.plan
        assert f"at most {wanted.gap:.2%} of FP8's bytes above the best one" in said


def test_layers_without_tokens_are_named(shell, paths):
    write_model(paths["model"].parent)
    from safetensors.torch import save_file

    data = load_file(paths["data"])
    save_file({name: t for name, t in data.items() if ".0." in name}, paths["data"])
    said = shell("calibrate", paths["model"], paths["data"], "--out", paths["stats"])
    assert f"no tokens for {prefix_of(1)}" in said
    said = shell("report", paths["stats"], "--top", 4)
    assert "weights" in said


def test_convert_says_what_it_copied(shell, paths):
    write_model(paths["model"].parent)
    PrecisionPlan.uniform({prefix_of(1): EXPERTS}).save(paths["plan"])
    said = shell("convert", paths["model"], "--plan", paths["plan"], "--out", paths["out"])
    assert f"copied, as the plan does not name them: {prefix_of(0)}" in said
    fp8 = Experts.from_state_dict(
        load_file(paths["model"] / "model.safetensors"), prefix=prefix_of(1), quantize="block"
    )
    assert_same_bits(ExpertBank.from_checkpoint(paths["out"], prefix_of(1)).w2_fp8, fp8.w2)


def test_bytes_are_in_units_of_their_size(shell, paths):
    calibrated(shell, paths)
    said = shell("plan", paths["stats"], "--budget", "20KiB", "--out", paths["plan"])
    planned = plan_precision(
        PrecisionStats.load(paths["stats"]),
        byte_budget=20.5 * 1024 / fp8_bytes_of(PrecisionStats.load(paths["stats"])),
    )
    assert planned.extra_bytes > 1024
    assert f"bytes: {planned.fp8_bytes / 1024:.4g} KiB in FP8, " in said
    said = shell("convert", paths["model"], "--plan", paths["plan"], "--out", paths["out"])
    assert re.search(r"; 1\.\d+ MiB became \d{3}(\.\d)? KiB in 1 files", said)
    said = shell("plan", paths["stats"], "--budget", "0%", "--out", paths["plan"])
    assert " KiB in FP8, 0 B more (0.00%)" in said


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (5 * 2**19, "2.5 MiB"), (57e9, "53.09 GiB")],
)
def test_sizes(count, said):
    from moe_ext.cli._console import size

    assert size(count) == said


@pytest.mark.parametrize("planned", [False, True])
def test_a_picture(shell, paths, planned):
    pytest.importorskip("matplotlib")
    calibrated(shell, paths)
    arguments = ["report", paths["stats"], "--png", paths["png"]]
    if planned:
        shell("plan", paths["stats"], "--budget", "8%", "--out", paths["plan"])
        arguments += ["--plan", paths["plan"]]
    said = shell(*arguments)
    assert f"{paths['png']} written" in said
    data = paths["png"].read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    assert not list(paths["png"].parent.glob(".*"))


def test_times_are_those_of_the_bytes_that_are_hit(paths, shell):
    from moe_ext._dispatch import LAUNCH_US, READ_BYTES_PER_US
    from moe_ext.cli._report_data import layer_reports

    calibrated(shell, paths)
    stats = PrecisionStats.load(paths["stats"])
    plan = PrecisionPlan.uniform(dict.fromkeys(stats.layers, EXPERTS)).with_bf16(experts=2)
    # So many tokens hit every expert that is ever hit: all of its bytes are read.
    for own in layer_reports(stats, plan, 10**9):
        assert bool((own.stats.rows > 0).all())
        assert own.fp8_us == pytest.approx(own.fp8_bytes / READ_BYTES_PER_US + LAUNCH_US)
        assert own.plan_us == pytest.approx(own.plan_bytes / READ_BYTES_PER_US + LAUNCH_US)
        assert own.plan_bytes > own.fp8_bytes
        assert float(own.after[2].sum()) == 0 < float(own.before[2].sum())
    one = layer_reports(stats, None, 1)[0]
    chance = one.stats.rows.double() / one.stats.num_tokens
    wanted = float(chance.sum()) * one.fp8_bytes / EXPERTS / READ_BYTES_PER_US + LAUNCH_US
    assert one.fp8_us == pytest.approx(wanted)
    assert one.plan_us == one.fp8_us
