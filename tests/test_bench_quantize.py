"""The benchmark of `quantize_fp8`, in miniature on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import quantize


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_dry_run_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert quantize.main(["--dry-run", "--commit", "abc123", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["granularity"] for row in rows} == set(quantize.VARIANTS)
    assert {len(row["shape"]) for row in rows} == {2, 3}
    assert all(row["commit"] == "abc123" and row["median_us"] > 0 for row in rows)
    table = capsys.readouterr().out
    assert all(variant in table for variant in quantize.VARIANTS)


@pytest.mark.parametrize("variant", quantize.VARIANTS)
def test_a_wrong_result_is_not_timed(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = quantize.make_buffers(variant, (3, 40), torch.device("cpu"))
    quantize.check(variant, buffers)
    monkeypatch.setattr(quantize, "quantize_fp8_out", lambda *_, **__: buffers.q.fill_(1))
    with pytest.raises(RuntimeError, match="must equal the reference"):
        quantize.check(variant, buffers)
