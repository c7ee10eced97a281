"""Rows of whole models that tests make up."""

from __future__ import annotations

from bench.e2e_rows import DECODE, MODEL, TTFT, E2ERow


def make_e2e_row(
    implementation: str,
    metric: str,
    batch: int,
    prompt_tokens: int,
    call_ms: float,
    share: float = 0.5,
) -> E2ERow:
    return E2ERow(
        op="e2e_transformers",
        model=MODEL,
        dtype="bf16",
        implementation=implementation,
        metric=metric,
        batch=batch,
        prompt_tokens=prompt_tokens,
        value=call_ms if metric == TTFT else batch / call_ms * 1e3,
        call_ms=call_ms,
        experts_share=share,
        captured=metric == DECODE,
        num_samples=3,
        max_err=0.01,
        skipped_reason="",
        device="NVIDIA H200",
        torch="2.11",
        transformers="5.17",
        commit="abc",
    )
