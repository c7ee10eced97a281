"""`bench.e2e_transformers`: a miniature on the CPU, going on where a file ends, what it writes."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

from moe_ext.integrations.transformers import register
from support.bench_e2e_rows import make_e2e_row
from support.bench_rows import make_row, write_rows
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench import e2e_transformers
from bench.e2e_model import TINY, experts_error, make_model, register_stub, to_fp8
from bench.e2e_plot import plot
from bench.e2e_rows import DECODE, TTFT, load_e2e_rows
from bench.e2e_runner import Cell, Grid, Runner
from bench.e2e_time import POSITION, TooSlow, time_to_first_token
from bench.measure import Environment

# What Transformers warns of is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

BF16 = ("--dry-run", "--samples", "1", "--dtypes", "bf16", "--metrics", TTFT)


def run(out, *arguments):
    return e2e_transformers.main(["--out", str(out), *arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("e2e") / "rows.jsonl"
    arguments = ("--implementations", "moe_ext,grouped_mm,deepgemm", "--dry-run", "--samples", "1")
    assert run(out, *arguments) == 0
    return out


def test_rows_of_a_miniature(measured):
    rows = load_e2e_rows(measured)
    assert len(rows) == 2 * 3 * 4  # dtypes, implementations, cells
    assert {row.op for row in rows} == {"e2e_transformers"}
    for row in rows:
        if row.implementation == "moe_ext":
            assert row.value > 0, row
            assert 0 <= row.experts_share < 1
            assert row.max_err < 0.1
            per_second = row.batch / row.call_ms * 1e3
            expected = row.call_ms if row.metric == TTFT else per_second
            assert row.value == pytest.approx(expected, rel=0.01)
        if row.implementation == "deepgemm":
            assert row.value is None
            assert row.skipped_reason


def test_a_run_goes_on_where_its_file_ends(measured, tmp_path, capsys):
    lines = measured.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["dtype"] == "bf16"]
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(kept[:-1]))
    arguments = ("--implementations", "moe_ext,grouped_mm,deepgemm", "--dry-run", "--dtypes")
    assert run(out, *arguments, "bf16", "--samples", "1") == 0
    assert len(load_e2e_rows(out)) == len(kept)
    capsys.readouterr()
    assert run(out, *arguments, "bf16") == 0
    assert "model made" not in capsys.readouterr().out


def test_the_limit_of_seconds(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert run(out, *BF16, "--implementations", "grouped_mm", "--limit-seconds", "0") == 0
    assert len(load_e2e_rows(out)) == 1
    assert "run again to go on" in capsys.readouterr().out


def test_a_wrong_implementation_is_not_timed(tmp_path, monkeypatch):
    def wrong(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states * float("nan")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", wrong)
    out = tmp_path / "rows.jsonl"
    assert run(out, *BF16, "--implementations", "batched_mm") == 0
    assert {row.skipped_reason for row in load_e2e_rows(out)} == {"wrong: error nan, over 0.02"}


def test_a_slow_call_is_left_out():
    model = make_model(TINY, torch.device("cpu"))
    with pytest.raises(TooSlow, match=r"a call took .* s, over 0 s"):
        time_to_first_token(model, 1, 4, samples=1, max_seconds=0)


def test_fp8_experts_of_the_model():
    model = make_model(TINY, torch.device("cpu"))
    before = {name: p for name, p in model.named_parameters() if "experts" not in name}
    to_fp8(model, torch.device("cpu"))
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {p.dtype for name, p in after.items() if name.endswith("gate_up_proj")} == {
        torch.float8_e4m3fn
    }
    assert not any(p.is_meta for p in after.values())
    model.set_experts_implementation("moe_ext")
    assert 1e-4 < experts_error(model) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_miniature_on_the_gpu(dtype):
    register()
    register_stub()
    environment = Environment.detect("cuda", "none")
    model = make_model(TINY, environment.device)
    if dtype == "fp8":
        to_fp8(model, environment.device)
    cells = (Cell(DECODE, 2, POSITION), Cell(TTFT, 2, 16))
    runner = Runner(model, dtype, Grid(TINY, cells, 1, 60.0), environment)
    names = ("moe_ext", "grouped_mm", "eager") if dtype == "bf16" else ("moe_ext",)
    for name in names:
        step, prompt = runner.rows(name, cells)
        for measured_row in (step, prompt):
            assert measured_row.value, measured_row
        assert step.captured is (name != "eager")


def test_plot(measured, tmp_path):
    pytest.importorskip("matplotlib")
    plot(load_e2e_rows(measured), tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").stat().st_size > 1000


def test_report_of_a_file(measured, capsys):
    assert e2e_transformers.main(["--read", str(measured), "--check"]) == 0
    printed = capsys.readouterr().out
    assert "## First token, qwen3-tiny, BF16" in printed
    assert "## Bars" not in printed


MODEL_ROWS = [
    make_e2e_row("moe_ext", DECODE, 64, 512, 96.0, 0.15),
    make_e2e_row("grouped_mm", DECODE, 64, 512, 120.0),
]


def write_model(tmp_path):
    path = tmp_path / "model.jsonl"
    path.write_text("".join(row.to_json() + "\n" for row in MODEL_ROWS))
    return str(path)


@pytest.mark.parametrize(("layer_us", "code"), [(300.0, 0), (340.0, 1)])
def test_check_with_layers(layer_us, code, tmp_path, capsys):
    layer = make_row(op="fused_moe", case="qwen3-30b", num_tokens=64, median_us=layer_us)
    layers = str(write_rows(tmp_path / "layers.jsonl", [layer]))
    arguments = ["--read", write_model(tmp_path), "--check"]
    assert e2e_transformers.main(arguments) == 0
    assert "layers by themselves" not in capsys.readouterr().out
    assert e2e_transformers.main([*arguments, "--layers", layers]) == code
    printed = capsys.readouterr().out  # 96 ms * 0.15 over 48 layers
    assert f"300.0 us a layer over {layer_us:.1f}, commit abc123" in printed
    assert ("missed: experts' time of a decode step, batch 64, over" in printed) is bool(code)


def test_a_page_beside_its_plot(tmp_path):
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "docs" / "page.md", tmp_path / "plots" / "model.png"
    page.parent.mkdir()
    picture.parent.mkdir()
    arguments = ["--read", write_model(tmp_path), "--markdown", str(page)]
    assert e2e_transformers.main(arguments) == 0
    assert "![" not in page.read_text()
    assert e2e_transformers.main([*arguments, "--plot", str(picture)]) == 0
    assert "](../plots/model.png)" in page.read_text()
    assert picture.exists()


def test_readme_rewrites_only_its_section(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- e2e:begin -->\nold\n<!-- e2e:end -->\nafter\n")
    arguments = ["--read", write_model(tmp_path), "--readme", str(readme)]
    assert e2e_transformers.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- e2e:begin -->\nA whole model")
    assert text.endswith("|\n<!-- e2e:end -->\nafter\n")
    assert "old" not in text
    readme.write_text("no marks")
    with pytest.raises(SystemExit):
        e2e_transformers.main(arguments)
    assert "must hold <!-- e2e:begin --> and <!-- e2e:end -->" in capsys.readouterr().err
    assert readme.read_text() == "no marks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementations", "fast"], "'fast' must be one of moe_ext, grouped_mm"),
        (["--samples", "0", "--dry-run"], "--samples must be at least 1, got 0"),
        (["--read", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--layers", "missing.jsonl", "--dry-run"], "missing.jsonl"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        e2e_transformers.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
