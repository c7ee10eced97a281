"""What `bench.stability` measures in fresh processes: the first call, and what is loaded late.

    python -m bench.stability_child first_call|late_loads SETTING

SETTING is a `Setting` as JSON; the last line of the output is the result as JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.measure import REPOSITORY, Environment
from bench.stability_layer import Calls, make_calls
from bench.stability_plan import Setting, plan_calls
from bench.stability_time import count_late_loads
from bench.timing import TimingPolicy


def policy_of(setting: Setting) -> TimingPolicy:
    """Return how many copies of the weights there are."""
    return TimingPolicy(l2_bytes=1.0) if setting.dry_run else TimingPolicy()


def run_child(what: str, setting: Setting) -> dict[str, Any]:
    """Measure in a fresh process; raises RuntimeError with its last line of stderr if it fails."""
    command = [sys.executable, "-m", "bench.stability_child", what, setting.to_json()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{what} in a fresh process failed: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def first_call(setting: Setting, calls: Calls, environment: Environment) -> dict[str, Any]:
    """Time the process's first call, behind one output-sized allocation, and those after it."""
    calls.warm_allocator(calls.out_bytes)
    result: dict[str, Any] = _preload(environment) if setting.preload else {}
    times = []
    for index in range(len(calls.planned)):
        environment.synchronize()
        start = time.perf_counter()
        calls.run(index, index)
        environment.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return result | {"first_call_ms": times[0], "median_ms": statistics.median(times[1:])}


def _preload(environment: Environment) -> dict[str, Any]:
    """Preload, timed with the opening of the library, which the report leaves out."""
    from moe_ext import preload

    environment.synchronize()
    start = time.perf_counter()
    report = preload(environment.device)
    return {
        "preload_ms": 1e3 * (time.perf_counter() - start),
        "preload_bytes": report.device_bytes,
        "num_kernels": report.num_kernels,
    }


def main(arguments: Sequence[str]) -> int:
    """Run one measurement and print its result."""
    what, text = arguments
    setting = Setting.from_json(text)
    environment = Environment.detect("cpu" if setting.dry_run else "cuda", "child")
    calls = make_calls(setting, plan_calls(setting), environment.device, policy_of(setting))
    if what == "first_call":
        print(json.dumps(first_call(setting, calls, environment)))
        return 0
    if setting.preload:
        _preload(environment)
    calls.warm_allocator(calls.scratch_bytes)
    print(json.dumps({"modules_loaded_late": count_late_loads(calls, environment)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
