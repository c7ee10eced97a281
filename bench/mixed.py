"""Time layers of experts in two precisions: `python -m bench.mixed --out mixed.jsonl`.

Each mixture beside the same layer with all experts in FP8 and in BF16, by the method of
`bench.run --op fused_moe`, in one run; then the bars. `--read` evaluates them from a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.appending import check_appendable
from bench.arguments import whole, wholes
from bench.cases import get_case
from bench.checks import sample_rows
from bench.files import refused_in_a_line
from bench.floors import LAUNCH_US, OPS_PER_US, READ_BYTES_PER_US
from bench.layer import LayerProblem, make_layer, make_layer_scales
from bench.measure import Environment, make_plans, make_pool, measure
from bench.mixed_rows import FEW, HALF, OP, MixedRow, bars, load_mixed_rows
from bench.ops import LAYER
from bench.problem import Plan
from bench.providers.base import Provider, Variant
from bench.providers.moe_ext_layer import MoeExtLayer
from bench.run import DRY_RUN_POLICY
from bench.timing import Call, TimingPolicy
from bench.verdicts import format_bar

SCALE = "block128"
TOKENS = {FEW: (1, 4, 16, 64, 128, 256, 8192), HALF: (16, 64, 128, 256)}
# A value of FP8 falls on the other side of a tie where sums are in another order.
MAX_MIXED_ERROR = 0.05
UNIFORM = {"fp8": Variant("fp8", SCALE, "promoted"), "bf16": Variant("bf16", "none", "fp32")}


@dataclass(frozen=True)
class Mixture:
    """Which experts are in BF16, and what a call then reads and multiplies."""

    name: str
    bf16: tuple[int, ...]
    share: float
    bytes_share: float
    floor_us: float


def make_mixture(name: str, plan: Plan) -> Mixture:
    """Spread the experts in BF16 over all, and look at the draws of a plan for uniform FP8."""
    num_experts = plan.cell.case.num_experts
    count = min(3, num_experts - 1) if name == FEW else num_experts // 2
    bf16 = tuple(int((i + 0.5) * num_experts / count) for i in range(count))
    counts = plan.counts[[call % len(plan.counts) for call in range(plan.calls)]]
    hit = (counts > 0).sum(axis=0) / len(counts)
    bytes_share = float(hit[list(bf16)].sum() / hit.sum())
    rows_share = float(counts[:, list(bf16)].sum() / counts.sum())
    work = plan.work
    bytes_us = work.weight_bytes * (1 + bytes_share) / READ_BYTES_PER_US
    rates = (1 - rows_share) / OPS_PER_US["fp8"] + rows_share / OPS_PER_US["bf16"]
    floor = max(bytes_us, work.operations * rates) + LAUNCH_US
    return Mixture(name, bf16, count / num_experts, bytes_share, floor)


class Mixed(Provider[LayerProblem]):
    """`fused_moe_mixed` over a bank for each copy of the weights, into given memory."""

    name = "moe_ext"
    needs = "the package moe_ext"

    def __init__(self, mixture: Mixture, fp8: LayerProblem, bf16: LayerProblem) -> None:
        """Make the banks of two problems that differ in the precision of the weights."""
        self.mixture = mixture
        # One set for all copies, as in the layers in one precision.
        scales = make_layer_scales(fp8, SCALE)
        others = torch.tensor(
            [e for e in range(fp8.plan.cell.case.num_experts) if e not in mixture.bf16]
        )
        assert scales.w13_scale is not None
        assert scales.w2_scale is not None
        others = others.to(scales.w13_scale.device)
        own = {
            "w13_fp8_scale": scales.w13_scale[others],
            "w2_fp8_scale": scales.w2_scale[others],
        }
        self.banks = [_bank(mixture, fp8, bf16, own, copy) for copy in range(fp8.plan.copies)]

    def available(self) -> bool:
        """Return whether it can run: this is not reached without the package."""
        return True

    def variants(self, *_: Any) -> list[Variant]:
        """Return the one way to run it."""
        return [UNIFORM["fp8"]]

    def prepare(self, problem: LayerProblem, variant: Variant) -> Call:
        """Allocate the workspace, so that nothing is allocated in the timed region."""
        del variant
        cell, out = problem.plan.cell, problem.out
        size = self.banks[0].workspace_size(cell.num_tokens, cell.case.top_k)
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)

        def call(index: int) -> list[Tensor]:
            hidden_states, _, _, weights, ids = problem.operands(index)
            bank = self.banks[index % len(self.banks)]
            bank(hidden_states, weights, ids, out=out, workspace=workspace)
            return [out]

        return call

    def config_name(self, problem: LayerProblem, variant: Variant) -> str:
        """Ask for the kernels as the op does."""
        from moe_ext._configs import all_configs
        from moe_ext.precision._mixed_kernels import choose_mixed_kernels
        from moe_ext.precision._mixed_layer import layer_of

        del variant
        if not problem.out.is_cuda:
            return "reference"
        sm_count = torch.cuda.get_device_properties(problem.out.device).multi_processor_count
        slots = problem.plan.cell.num_rows
        chosen = choose_mixed_kernels(layer_of(self.banks[0]), slots, sm_count)
        return "+".join(all_configs()[index].id for index in chosen)

    def judge(
        self, problem: LayerProblem, variant: Variant, outputs: Sequence[Tensor]
    ) -> tuple[float, float]:
        """Compare some tokens of call 0 with the layer out of smaller ops."""
        from moe_ext.precision._mixed_layer import layer_of
        from moe_ext.precision._mixed_stages import by_stages

        del variant
        hidden_states, _, _, weights, ids = problem.operands(0)
        (out,) = outputs
        tokens = torch.from_numpy(sample_rows(len(hidden_states))).to(out.device)
        some = (hidden_states[tokens], layer_of(self.banks[0]), weights[tokens], ids[tokens])
        expected = by_stages(*some).float()
        if not bool(out.sum(dtype=torch.float32).isfinite()):
            return float("inf"), MAX_MIXED_ERROR
        difference = (out[tokens].float() - expected).abs().amax(dim=1)
        return float((difference / expected.abs().amax(dim=1)).max()), MAX_MIXED_ERROR


def _bank(
    mixture: Mixture,
    fp8: LayerProblem,
    bf16: LayerProblem,
    scales: dict[str, Tensor],
    copy: int,
) -> Any:
    from moe_ext.precision import ExpertBank, LayerPlan

    case = fp8.plan.cell.case
    plan = LayerPlan(case.num_experts).with_bf16(experts=mixture.bf16)
    bank = ExpertBank(plan, case.hidden_size, case.intermediate_size, device="meta")
    chosen = torch.tensor(mixture.bf16)
    others = torch.tensor([e for e in range(case.num_experts) if e not in mixture.bf16])
    sources = {
        "w13_fp8": (fp8.w13[copy], others),
        "w2_fp8": (fp8.w2[copy], others),
        "w13_bf16": (bf16.w13[copy % bf16.plan.copies], chosen),
        "w2_bf16": (bf16.w2[copy % bf16.plan.copies], chosen),
    }
    # By bytes: PyTorch has no index of FP8 on every device.
    bank._set_tensors(
        {
            name: tensor.view(torch.uint8)[own.to(tensor.device)].view(tensor.dtype)
            for name, (tensor, own) in sources.items()
        }
        | scales
    )
    bank._set_maps(fp8.out.device)
    return bank


def time_tokens(
    case_name: str,
    num_tokens: int,
    names: Sequence[str],
    routing: str,
    policy: TimingPolicy,
    environment: Environment,
    shrink: bool,
) -> list[MixedRow]:
    """Time a layer in one precision, in the other, and as mixtures."""
    case = get_case(case_name).shrunk() if shrink else get_case(case_name)
    uniform, problems = {}, {}
    for dtype, variant in UNIFORM.items():
        plans = make_plans(LAYER, [case], [num_tokens], [dtype], [routing], policy)
        problems[dtype] = make_layer(plans[0], make_pool(plans, dtype, environment.device))
        uniform[dtype] = measure(MoeExtLayer(), variant, problems[dtype], policy, environment)
    rows = []
    for name in names:
        mixture = make_mixture(name, problems["fp8"].plan)
        provider = Mixed(mixture, problems["fp8"], problems["bf16"])
        row = measure(
            provider,
            UNIFORM["fp8"],
            problems["fp8"],
            policy,
            environment,
            judge=provider.judge,
        )
        columns = asdict(replace(row, op=OP, dtype="fp8+bf16", gbps=None))
        columns["floor_us"] = round(mixture.floor_us, 3)
        if row.median_us is not None:
            columns["ratio_to_floor"] = round(row.median_us / mixture.floor_us, 4)
        rows.append(
            MixedRow(
                **columns,
                mixture=name,
                bf16_share=round(mixture.share, 4),
                bf16_bytes_share=round(mixture.bytes_share, 4),
                uniform_fp8_us=uniform["fp8"].median_us,
                uniform_bf16_us=uniform["bf16"].median_us,
                uniform_fp8_ratio_to_floor=uniform["fp8"].ratio_to_floor,
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 where a result is wrong or a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.mixed", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("mixed.jsonl"), help="JSONL file, appended to")
    add("--read", type=Path, default=None, help="evaluate the bars of a file, time nothing")
    add("--case", default="qwen3-30b")
    add("--tokens", type=wholes(1), default=None, help="tokens, of those of each mixture")
    add("--mixture", choices=(FEW, HALF), default=None, help="one of the two alone")
    add("--routing", default="zipf0.6")
    add("--samples", type=whole(1), default=20, help="graph replays per measurement, at least")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="miniatures on the CPU, wall-clock times")
    args = parser.parse_args(arguments)
    if args.read is not None:
        with refused_in_a_line(parser):
            verdicts = bars(load_mixed_rows(args.read))
        print(*map(format_bar, verdicts), sep="\n")
        return 0 if all(bar.passed for bar in verdicts) else 1
    with refused_in_a_line(parser):
        check_appendable(args.out)
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("bench: a CUDA device must be there, got none; --dry-run runs on the CPU")
    torch.set_float32_matmul_precision("highest")
    environment = Environment.detect("cpu" if args.dry_run else "cuda", args.commit)
    policy = DRY_RUN_POLICY if args.dry_run else TimingPolicy(samples=args.samples)
    print(f"{environment.device_name}, torch {torch.__version__}, commit {environment.commit}")
    wanted = args.tokens or ([1, 16] if args.dry_run else sorted({*TOKENS[FEW], *TOKENS[HALF]}))
    rows = []
    for num_tokens in wanted:
        names = [
            name
            for name in ((args.mixture,) if args.mixture else TOKENS)
            if args.tokens or num_tokens in TOKENS[name]
        ]
        for row in time_tokens(
            args.case, num_tokens, names, args.routing, policy, environment, args.dry_run
        ):
            rows.append(row)
            with args.out.open("a") as file:
                file.write(row.to_json() + "\n")
            print(*map(format_bar, bars([row])), sep="\n")
    wrong = [row for row in rows if row.skipped_reason]
    for row in wrong:
        print(f"{row.mixture} T={row.num_tokens}: {row.skipped_reason}")
    passed = args.dry_run or all(bar.passed for bar in bars(rows))
    return 0 if passed and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
