"""Times of single eager calls, and what of CUDA is loaded while they run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.measure import Environment
from bench.stability_layer import Calls

# The device waits this long before the second run of a call, so that all of it is enqueued by then:
# at 1.2 to 2 GHz between 150 and 250 us.
_WAIT_CYCLES = 300_000
# As CUPTI names what the driver and the runtime do for the first use of a kernel or of its module.
_LOADS = ("Lazy Function Loading", "Runtime Triggered Module Loading")


@dataclass(frozen=True)
class TimedCall:
    """One call, never made before in the process; microseconds."""

    num_tokens: int
    wall_us: float  # from the call to the end of the device's work, an empty queue before it
    device_us: float  # the same call again, its kernels alone
    floor_us: float


@dataclass(frozen=True)
class Pass:
    """All calls, and by how many bytes the device memory that is not torch's grew after the first:
    code and local memory of kernels that were loaded late."""

    calls: list[TimedCall]
    late_bytes: int


def time_calls(calls: Calls, environment: Environment, tick: Callable[[], None]) -> Pass:
    """Time every call by itself; `tick` is called between two.

    Python's collector runs as it does in a server, but does not look at what is there already.
    """
    device = environment.device
    gc.collect()
    gc.freeze()
    timed = []
    bytes_after_first = 0
    for index, planned in enumerate(calls.planned):
        environment.synchronize()
        start = time.perf_counter()
        calls.run(index, 2 * index)
        environment.synchronize()
        wall_us = 1e6 * (time.perf_counter() - start)
        device_us = _device_us(calls, index) if device.type == "cuda" else wall_us
        timed.append(TimedCall(planned.num_tokens, wall_us, device_us, planned.floor_us))
        if index == 0:
            bytes_after_first = _bytes_not_torch_s(device)
        tick()
    gc.unfreeze()
    return Pass(timed, _bytes_not_torch_s(device) - bytes_after_first)


def _device_us(calls: Calls, index: int) -> float:
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    calls.run(index, 2 * index + 1)
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))


def _bytes_not_torch_s(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def count_late_loads(calls: Calls, environment: Environment) -> int | None:
    """Return how many kernels and modules CUDA loads after the first call.

    torch's profiler asks CUPTI, which tells of each. It slows calls down, so that none is timed
    here, and a process that has made the calls before has nothing to load any more: a pass and a
    process of their own. None where the profiler saw no kernel, and so may have missed loads too.
    What a JIT compiler loads by itself is not in it; `compilations` is.
    """
    calls.run(0, 0)
    environment.synchronize()
    if environment.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for index in range(1, len(calls.planned)):
            calls.run(index, index)
        environment.synchronize()
    events = profile.events() or []
    if not any(str(event.device_type).endswith("CUDA") for event in events):
        return None
    return sum(event.name in _LOADS for event in events)
