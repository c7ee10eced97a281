"""The jobs of a conversion, run by a few threads that each hold one stage of one expert at most.

Every job knows where its bytes come from and where they go, so that no thread waits for another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Lock, local

import torch
from torch import Tensor

from moe_ext.nn._pieces import FP8
from moe_ext.precision._convert_layout import Copy, Job, Layout, Place, Quantize, Rewrite, View
from moe_ext.precision._quantize_weights import quantize_matrices
from moe_ext.precision._tensor_files import DTYPES, read_into, write_from

_CHUNK = 8 << 20
"""Bytes that are copied at a time."""
_SPARE = -1
"""The slot of what is written next."""


class _Memory(local):
    """Memory of one thread, which grows to what its largest job needs."""

    def __init__(self) -> None:
        self._buffers: dict[int, bytearray] = {}

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """Return so many bytes; the same ones for the same slot."""
        buffer = self._buffers.get(slot)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[slot] = bytearray(num_bytes)
        return memoryview(buffer)[:num_bytes]


class Runner:
    """Files that are open for the length of a conversion."""

    def __init__(self, layout: Layout, directory: Path, stack: ExitStack) -> None:
        """Open all files, and write the heads of the new ones."""
        self._layout = layout
        self._memory = _Memory()
        self._inputs = {
            path: stack.enter_context(path.open("rb", buffering=0)).fileno()
            for path in layout.inputs
        }
        self._outputs = []
        for output in layout.outputs:
            file = stack.enter_context((directory / output.name).open("xb", buffering=0))
            file.truncate(output.size)
            write_from(file.fileno(), 0, memoryview(output.head))
            self._outputs.append(file.fileno())

    def run(self, workers: int, advance: Callable[[int], None]) -> None:
        """Run all jobs; after a failure, none that had not begun."""
        jobs, lock, failed = iter(self._layout.jobs), Lock(), Event()

        def work() -> None:
            while not failed.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                try:
                    advance(self._run(job))
                except BaseException:
                    failed.set()
                    raise

        before = torch.get_num_threads()
        # What new threads begin with: else each would start as many again for every operation.
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(workers) as pool:
                futures = [pool.submit(work) for _ in range(workers)]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    failed.set()
                    raise
        finally:
            torch.set_num_threads(before)

    def _run(self, job: Job) -> int:
        """Run one job; return the bytes that it took in."""
        if isinstance(job, Copy):
            self._copy(job)
            return job.num_bytes
        if isinstance(job, Quantize):
            self._quantize(job)
            return sum(view.num_bytes for view in job.views)
        self._rewrite(job)
        return job.view.num_bytes

    def _copy(self, job: Copy) -> None:
        done = 0
        while done < job.num_bytes:
            view = self._memory.view(0, min(_CHUNK, job.num_bytes - done))
            read_into(self._inputs[job.path], job.path, job.begin + done, view)
            self._write(job.place, view, done)
            done += len(view)

    def _quantize(self, job: Quantize) -> None:
        weights = [self._read(slot, view).contiguous() for slot, view in enumerate(job.views)]
        buffers = [
            self._memory.view(len(weights) + slot, weight.numel())
            for slot, weight in enumerate(weights)
        ]
        out = [
            torch.frombuffer(buffer, dtype=FP8).view(weight.shape)
            for buffer, weight in zip(buffers, weights, strict=True)
        ]
        scales = quantize_matrices(weights, job.layout, out)
        for place, buffer in zip(job.places, buffers, strict=True):
            self._write(place, buffer)
        for place, scale in zip(job.scales, scales, strict=True):
            self._write_tensor(place, scale)

    def _rewrite(self, job: Rewrite) -> None:
        self._write_tensor(job.place, self._read(0, job.view).to(DTYPES[job.dtype]))

    def _write_tensor(self, place: Place, tensor: Tensor) -> None:
        memory = self._memory.view(_SPARE, tensor.nbytes)
        torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        self._write(place, memory)

    def _read(self, slot: int, view: View) -> Tensor:
        """Read what a view spans; the result is valid until the slot is used again."""
        memory = self._memory.view(slot, view.num_elements * view.item_bytes)
        path = view.entry.path
        read_into(self._inputs[path], path, view.begin, memory)
        flat = torch.frombuffer(memory, dtype=DTYPES[view.entry.dtype])
        return flat.as_strided(view.shape, view.stride)

    def _write(self, place: Place, view: memoryview, behind: int = 0) -> None:
        begin = self._layout.outputs[place.file].places[place.name] + behind
        write_from(self._outputs[place.file], begin, view)

    def flush(self) -> None:
        """Wait until the files are on the disk, so that no index is there before its data."""
        for descriptor in self._outputs:
            os.fsync(descriptor)
