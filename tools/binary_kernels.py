"""What moe_ext_cuda.so's kernels must look like, by their machine code and the build's logs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

MMA_OF_DTYPE = {"BF16": "HGMMA", "FP8": "QGMMA"}
PDL = ("ACQBULK", "PREEXIT")
# Kernels without a row that are launched programmatically, by template.
PROGRAMMATIC = re.compile(r"(topk_kernel)ILi(\d+)E")
WATCHED = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(HGMMA|QGMMA|LDL|STL|ACQBULK|PREEXIT)\b"
)
# Registers are in two banks by parity; additions of two from one bank slow promotion down.
ADDITION = re.compile(r"\bFADD R\d+, R(\d+), R(\d+) ;")
MAX_CLASHES = 0.1
FUNCTION = re.compile(r"^\s*Function : (\S+)")


def find_cuda_tool(name: str) -> str:
    """A tool of the CUDA toolkit: from PyPI's package in this environment, or from PATH."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin", name)
    for candidate in (str(packaged), shutil.which(name), f"/usr/local/cuda/bin/{name}"):
        if candidate and Path(candidate).is_file():
            return candidate
    raise SystemExit(
        f"check_binary: {name} is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    )


def config_of(function: str) -> str | None:
    """The row of configs.def that a kernel's mangled name carries as its tag type."""
    tag = re.search(r"7configs(\d+)(\w+)", function)
    return tag[2][: int(tag[1])] if tag else None


def programmatic_of(function: str) -> str | None:
    """A kernel without a row that needs the wait and the trigger, as C++ names it."""
    kernel = PROGRAMMATIC.search(function)
    return f"{kernel[1]}<{kernel[2]}>" if kernel else None


def count_instructions(library: Path) -> dict[str, Counter[str]]:
    """Tensor-core, local-memory and waiting instructions of kernels, FADDs and their clashes."""
    cuobjdump, nvdisasm = find_cuda_tool("cuobjdump"), find_cuda_tool("nvdisasm")
    env = {**os.environ, "PATH": f"{Path(nvdisasm).parent}:{os.environ['PATH']}"}
    counts: dict[str, Counter[str]] = {}
    config = None
    with subprocess.Popen(
        [cuobjdump, "-sass", str(library)], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        for line in process.stdout or ():
            if function := FUNCTION.match(line):
                config = config_of(function[1]) or programmatic_of(function[1])
                if config is not None:
                    counts.setdefault(config, Counter())
            elif config is not None and (instruction := WATCHED.match(line)):
                counts[config][instruction[1]] += 1
            elif config is not None and (addition := ADDITION.search(line)):
                counts[config]["FADD"] += 1
                counts[config]["clash"] += int(addition[1]) % 2 == int(addition[2]) % 2
    if process.returncode != 0:
        raise SystemExit(f"check_binary: {cuobjdump} failed with {process.returncode}")
    return counts


def missing_pdl(kernel: str, count: Counter[str]) -> list[str]:
    """The wait and the trigger of programmatic dependent launch: without them dependents race."""
    return [f"{kernel} holds no {name}" for name in PDL if count[name] == 0]


def local_memory(kernel: str, count: Counter[str]) -> list[str]:
    """Registers that were spilled, or indexed at run time."""
    if not count["LDL"] and not count["STL"]:
        return []
    return [f"{kernel} uses local memory: {count['LDL']} loads, {count['STL']} stores"]


def find_problems(library: Path, dtype_of_config: dict[str, str]) -> list[str]:
    """Rows without a kernel, kernels without a row, missing tensor-core work, local memory."""
    problems = []
    counts = count_instructions(library)
    others = {name: counts.pop(name) for name in list(counts) if "<" in name}
    if not others:
        problems.append("no topk_kernel is in the library")
    for name, count in others.items():
        problems += missing_pdl(name, count) + local_memory(name, count)
    problems += [
        f"kernel {config} has no row in configs.def"
        for config in counts
        if config not in dtype_of_config
    ]
    for config, dtype in dtype_of_config.items():
        if config not in counts:
            problems.append(f"{config} has no kernel in the library")
            continue
        count = counts[config]
        mma = MMA_OF_DTYPE[dtype]
        print(f"{config:32} {mma} {count[mma]:5}  LDL {count['LDL']}  STL {count['STL']}")
        if count[mma] == 0:
            problems.append(f"{config} holds no {mma}")
        problems += missing_pdl(config, count) + local_memory(config, count)
        # Promotion, of FP8, adds 64 or more sums a step, beside WGMMA (docs/notes/promotion.md).
        if mma == "QGMMA" and count["FADD"] >= 64 and count["clash"] > MAX_CLASHES * count["FADD"]:
            problems.append(
                f"{config} adds registers of one bank in {count['clash']} of {count['FADD']} FADDs"
            )
    return problems


def cpu_seconds(log: str) -> float:
    """User and system time of a compilation, from the line that log_compile.sh appends last."""
    times = re.findall(r"(\d+)m([\d.]+)s", log.rstrip().rpartition("\n")[2])
    return sum(60 * int(minutes) + float(seconds) for minutes, seconds in times)


def find_log_problems(directory: Path, max_cpu_seconds: float) -> list[str]:
    """Spills, serialised WGMMA, too long a compilation."""
    logs = {path: path.read_text() for path in sorted(directory.rglob("*.cu.o.log"))}
    if not logs:
        return [f"no *.cu.o.log below {directory}: the CUDA library was not built there"]
    problems = []
    for path, log in logs.items():
        report = re.findall(
            r"Compiling entry function '(\S+)'.*?"
            r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) reg",
            log,
            re.S,
        )
        for function, stores, loads, registers in report:
            name = config_of(function) or function
            print(f"{name:32} {registers} registers, {stores} + {loads} bytes spilled")
            if int(stores) or int(loads):
                problems.append(f"{path.name}: {function} spills {stores} + {loads} bytes")
        problems += [
            f"{path.name}: {line.strip()}"
            for line in log.splitlines()
            if re.search(r"C75\d\d|serialized", line)
        ]
    total = sum(map(cpu_seconds, logs.values()))
    print(f"kernels compiled in {total:.0f} CPU-seconds, {len(logs)} files")
    if total > max_cpu_seconds:
        problems.append(
            f"the kernels took {total:.0f} CPU-seconds to compile, over {max_cpu_seconds:.0f}"
        )
    return problems
