"""Checks a built moe_ext_cuda.so and fails with a list of what is wrong.

    python tools/check_binary.py python/moe_ext/moe_ext_cuda.so --logs build

Linkage: symbols of LibTorch's stable ABI up to the target version alone, no Python, the expected
needed libraries, no paths to the build machine. Kernels: every row of configs.def is there with its
tensor-core instruction, without local memory. Build logs: no spills, no serialised WGMMA; registers
and CPU time are printed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import binary_kernels
import binary_linkage

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the checks and print one line for each problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument(
        "--logs", type=Path, help="directory with the *.cu.o.log files of the build"
    )
    parser.add_argument(
        "--max-cpu-seconds", type=float, default=900.0, help="limit for the kernels' compilation"
    )
    parser.add_argument(
        "--linkage-only", action="store_true", help="leave the kernels out (needs no CUDA tools)"
    )
    arguments = parser.parse_args()

    problems = binary_linkage.find_problems(arguments.library)
    if not arguments.linkage_only:
        table = (ROOT / "csrc/grouped_gemm/configs.def").read_text()
        rows = re.findall(r"^MOE_EXT_CONFIG\(\s*(\w+)\s*,\s*\w+\s*,\s*(\w+)", table, re.MULTILINE)
        if not rows:
            problems.append("configs.def holds no rows")
        problems += binary_kernels.find_problems(arguments.library, dict(rows))
    if arguments.logs is not None:
        problems += binary_kernels.find_log_problems(arguments.logs, arguments.max_cpu_seconds)
    for problem in problems:
        print(f"check_binary: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"check_binary: {arguments.library} is fine")


if __name__ == "__main__":
    main()
