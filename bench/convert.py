"""Time the conversion of a checkpoint to a plan, and the memory that it takes.

    python -m bench.convert --dir /somewhere/on/a/disk --out convert.jsonl
    python -m bench.convert --read convert.jsonl --check --markdown docs/cli.md

Writes a checkpoint of random experts in BF16, in two files, and converts it several times, in a
fresh process each. Needs no GPU, but 5 GB of disk for two layers of qwen3-30b.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from moe_ext.precision import PrecisionPlan, convert_checkpoint

from bench.appending import check_appendable, open_to_append
from bench.cases import Case, case_names, get_case
from bench.convert_rows import (
    CONVERT_BEGIN,
    CONVERT_END,
    OP,
    ConvertRow,
    load_convert_rows,
    misses,
    section,
)
from bench.files import refused_in_a_line
from bench.measure import Environment
from bench.tables import replace_section

PREFIX = "model.layers.{}.mlp.experts"
BF16_EXPERTS = 3
"""In BF16 in each layer, as many as a plan finds among 128."""
FILES = 2


def write_input(directory: Path, case: Case, num_layers: int) -> None:
    """Write a checkpoint of random experts and what is beside them in a layer."""
    from safetensors.torch import save_file

    directory.mkdir()
    hidden, intermediate = case.hidden_size, case.intermediate_size
    shapes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    shapes["down_proj"] = (hidden, intermediate)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    for file in range(FILES):
        tensors = {}
        for layer in range(file, num_layers, FILES):
            tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(
                case.num_experts, hidden, generator=generator
            ).bfloat16()
            for expert in range(case.num_experts):
                for name, shape in shapes.items():
                    values = torch.randn(shape, generator=generator).bfloat16()
                    tensors[f"{PREFIX.format(layer)}.{expert}.{name}.weight"] = values
        if tensors:
            name = f"model-{file + 1:05d}-of-{FILES:05d}.safetensors"
            save_file(tensors, directory / name, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)
    (directory / "config.json").write_text("{}")


def plan_for(case: Case, num_layers: int, scales: str) -> PrecisionPlan:
    """Return a plan with a few experts in BF16."""
    layers = {PREFIX.format(layer): case.num_experts for layer in range(num_layers)}
    chosen = range(min(BF16_EXPERTS, case.num_experts - 1))
    return PrecisionPlan.uniform(layers, scales=scales).with_bf16(experts=chosen)


def convert_here(source: Path, plan: Path, out: Path, workers: int) -> dict[str, float]:
    """Convert in this process: seconds, bytes, and the memory beyond what there was before."""
    loaded = PrecisionPlan.load(plan)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing torch
    before = _memory_kib("VmRSS")
    begin = time.perf_counter()
    done = convert_checkpoint(source, loaded, out, workers=workers)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "peak_mib": (_memory_kib("VmHWM") - before) / 1024,
        "input_bytes": done.input_bytes,
        "output_bytes": done.num_bytes,
    }


def _memory_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status must have {name}, got none")


def in_a_process(source: Path, plan: Path, out: Path, workers: int) -> dict[str, float]:
    """Convert in a fresh process, and remove what it wrote."""
    command = [sys.executable, "-m", "bench.convert", "--child", str(source), str(plan), str(out)]
    command += ["--workers", str(workers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(
    directory: Path,
    case: Case,
    num_layers: int,
    scales: str,
    workers: int,
    runs: int,
    environment: Environment,
) -> ConvertRow:
    """Return the row of one setup; the checkpoint is made where it is not there."""
    source, plan = directory / "in", directory / "plan.json"
    if not source.exists():
        write_input(source, case, num_layers)
    made = plan_for(case, num_layers, scales)
    made.save(plan)
    load = os.getloadavg()[0]
    found = [in_a_process(source, plan, directory / "out", workers) for _ in range(runs)]
    seconds = tuple(round(own["seconds"], 3) for own in found)
    stages = 2 * num_layers * case.num_experts
    return ConvertRow(
        op=OP,
        case=case.name,
        num_layers=num_layers,
        num_experts=case.num_experts,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        scales=scales,
        bf16_share=round(sum(1 for _ in made.bf16()) / stages, 4),
        workers=workers,
        cpus=len(os.sched_getaffinity(0)),
        input_bytes=int(found[0]["input_bytes"]),
        output_bytes=int(found[0]["output_bytes"]),
        layer_bytes=int(found[0]["input_bytes"]) // num_layers,
        seconds=seconds,
        mb_per_s=round(found[0]["input_bytes"] / min(seconds) / 1e6, 1),
        peak_mib=round(max(own["peak_mib"] for own in found), 1),
        load=round(load, 2),
        where=_filesystem(directory),
        device=environment.device_name,
        torch=torch.__version__,
        commit=environment.commit,
    )


def _filesystem(directory: Path) -> str:
    """Return the kind of file system that a folder is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, own, *_ = line.split()
        if str(directory.resolve()).startswith(point) and len(point) > len(best):
            best, kind = point, own
    return kind


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.convert`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--case", default="qwen3-30b", help=f"of {', '.join(case_names())}")
    add("--layers", type=int, default=2, help="how many")
    add("--scales", default="block", help="block, channel or tensor, or several with ,")
    add("--workers", type=int, default=2, help="threads of a conversion")
    add("--runs", type=int, default=5, help="of which the fastest counts; memory: the largest")
    add("--dir", type=Path, help="a folder for the files; a temporary one by default")
    add("--out", type=Path, default=Path("convert.jsonl"), help="JSONL file, appended to")
    add("--read", type=Path, nargs="+", help="read these files and measure nothing")
    add("--markdown", type=Path, help="put the table between the marks of this page")
    add("--check", action="store_true", help="fail if a bar is missed")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="a miniature")
    add("--child", type=Path, nargs=3, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, and check the bars where that is asked for."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.child is not None:
        source, plan, out = args.child
        print(json.dumps(convert_here(source, plan, out, args.workers)))
        return 0
    with refused_in_a_line(parser):
        if args.read is not None:
            rows = [row for path in args.read for row in load_convert_rows(path)]
        else:
            rows = _measure_into(args)
    if args.markdown is not None:
        page = replace_section(args.markdown.read_text(), section(rows), CONVERT_BEGIN, CONVERT_END)
        args.markdown.write_text(page)
    found = misses(rows)
    if args.check:
        print(*found, f"{len(rows)} rows, {len(found)} bars missed", sep="\n")
    return bool(args.check and found)


def _measure_into(args: argparse.Namespace) -> list[ConvertRow]:
    check_appendable(args.out)
    environment = Environment.detect("cpu", args.commit)
    case = get_case(args.case)
    if args.dry_run:
        case = case.shrunk()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.dir) as name, open_to_append(args.out) as file:
        for scales in args.scales.split(","):
            row = measure(
                Path(name), case, args.layers, scales, args.workers, args.runs, environment
            )
            rows.append(row)
            file.write(row.to_json() + "\n")
            file.flush()
            print(
                f"{row.case} {row.scales}: {row.mb_per_s:.0f} MB/s, {row.peak_mib:.0f} MiB beyond "
                f"the interpreter's; {row.seconds} s, load {row.load} before",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
