"""`convert_checkpoint`: a checkpoint in BF16 becomes one under a plan, in FP8 and BF16."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ext._activations import GATE_UP_LAYOUTS
from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import quoted
from moe_ext.precision._checkpoint import CONFIG, INDEX, Checkpoint
from moe_ext.precision._convert_layout import Layout
from moe_ext.precision._convert_run import Runner
from moe_ext.precision._routers import gate_up_layout_of
from moe_ext.precision.plan import PrecisionPlan

_OP = "convert_checkpoint"
PLAN_FILE = "precision_plan.json"
"""The plan, in a converted checkpoint."""
METHOD = "moe_ext"
VERSION = 1
"""Of what is written; a checkpoint whose config.json says none is of the first."""
# Weights of other forms, which would be out of date beside the converted ones.
_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
)


@dataclass(frozen=True)
class Converted:
    """What `convert_checkpoint` made.

    Attributes:
        directory: of the new checkpoint.
        input_bytes: of all tensors that it was made of.
        num_bytes: of the files with its tensors.
        num_files: how many of these.
        num_fp8: stages of experts that were quantised.
        unplanned: layers with experts that the plan does not name, which were copied.
    """

    directory: Path
    input_bytes: int
    num_bytes: int
    num_files: int
    num_fp8: int
    unplanned: tuple[str, ...]


def convert_checkpoint(
    source: str | Path,
    plan: PrecisionPlan,
    out: str | Path,
    *,
    gate_up_layout: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Quantise the experts that a plan has in FP8, and copy everything else.

    Args:
        source: a folder with a safetensors checkpoint: `model.safetensors.index.json` and its
            files, or files without an index, and `config.json`. Experts by name or packed, in
            bfloat16, float16 or float32, as `Experts.from_state_dict` takes them.
        plan: its layers' names are the prefixes of experts, "model.layers.3.mlp.experts". Layers
            that it does not name are copied.
        out: the folder to make, outside of the source; its parent must be there. May be there if
            it is empty.
        gate_up_layout: of packed gate and up, "concatenated" or "interleaved"; None is what models
            of config.json's `model_type` have (gpt-oss the second).
        workers: threads; None is the CPUs that this process may use, 4 at most.
        progress: called with the bytes done by a step and all there are, from any thread.

    Returns:
        What was made. Experts of the plan's layers are by name, as in the source, and packed ones
        taken apart (`{prefix}.{expert}.gate_proj.weight`, ...); in FP8 with a `weight_scale_inv`
        (scales per block) or `weight_scale` beside them, or in BF16. All other tensors are the
        source's bytes. Beside them are an index, the plan as `precision_plan.json`, and the
        source's other files; `config.json` gets a `quantization_config` that names the method, by
        which other readers can tell that FP8 values are no weights without their scales.

    Raises:
        ValueError: an argument differs from the above, or plan and checkpoint do not fit.
        OSError: a file cannot be read or written, or the disk is full.

    Notes:
        Holds one stage of one expert a worker, whatever the size of the files. Written as
        `{out}.incomplete`, the index last, and renamed when everything is on the disk; removed
        after an error. What a killed process leaves is refused by the next run, and never removed.
        Values and scales are those of `quantize_fp8`, bit for bit.
    """
    if not isinstance(plan, PrecisionPlan):
        raise ValueError(f"{_OP}: `plan` must be a PrecisionPlan, got {shown(plan)}")
    if gate_up_layout not in (None, *GATE_UP_LAYOUTS):
        raise ValueError(
            f"{_OP}: `gate_up_layout` must be None or one of "
            f"{', '.join(map(quoted, GATE_UP_LAYOUTS))}, got {shown(gate_up_layout)}"
        )
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 4)
    if not is_int(workers) or workers < 1:
        raise ValueError(
            f"{_OP}: `workers` must be None or an int of at least 1, got {shown(workers)}"
        )
    target = Path(os.path.abspath(out))
    _check_target(target)
    checkpoint = Checkpoint(_OP, source)
    _check_apart(checkpoint.directory, target)
    if not (checkpoint.directory / CONFIG).is_file():
        raise ValueError(
            f"{_OP}: {checkpoint.directory} must hold {CONFIG}, which is to say that experts are "
            "in FP8, got none"
        )
    config = checkpoint.config(_OP)
    if "quantization_config" in config:
        raise ValueError(
            f"{_OP}: {checkpoint.directory / CONFIG} must have no quantization_config, got "
            f"{shown(config['quantization_config'])}: the checkpoint is quantised already"
        )
    layout = Layout(_OP, checkpoint, plan, gate_up_layout or gate_up_layout_of(config))
    free = shutil.disk_usage(target.absolute().parent).free
    if free < layout.num_bytes:
        raise OSError(
            f"{_OP}: the disk of {target} must have {layout.num_bytes} bytes free, got {free}"
        )
    total = layout.input_bytes
    temporary = _begin(target)
    try:
        with ExitStack() as stack:
            runner = Runner(layout, temporary, stack)
            runner.run(workers, lambda count: progress(count, total) if progress else None)
            runner.flush()
        _copy_others(checkpoint, config, temporary)
        plan.save(temporary / PLAN_FILE)
        _write_index(layout, temporary / INDEX)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Converted(
        directory=target,
        input_bytes=total,
        num_bytes=layout.num_bytes,
        num_files=len(layout.outputs),
        num_fp8=layout.num_fp8,
        unplanned=layout.unplanned,
    )


def _check_target(target: Path) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        got = "a file" if target.is_file() else "a folder with files"
        raise ValueError(f"{_OP}: `out` must be a new or empty folder, got {got}: {target}")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{_OP}: `out` must be in a folder that is there, got {target}")


def _check_apart(source: Path, target: Path) -> None:
    folder, own = source.resolve(), target.resolve()
    if own == folder or folder in own.parents:
        raise ValueError(f"{_OP}: `out` must be outside of {source}, got {target}")


def _begin(target: Path) -> Path:
    temporary = target.with_name(f"{target.name}.incomplete")
    try:
        temporary.mkdir()
    except FileExistsError:
        raise ValueError(
            f"{_OP}: {temporary} must not be there, got what a run has left or is writing: remove "
            "it if none is"
        ) from None
    return temporary


def _copy_others(checkpoint: Checkpoint, config: dict[str, Any], directory: Path) -> None:
    """Copy tokenizer, generation settings and what else there is beside weights."""
    for path in sorted(checkpoint.directory.iterdir()):
        is_weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, directory / path.name)
    method = {"quant_method": METHOD, "version": VERSION, "plan": PLAN_FILE}
    text = json.dumps({**config, "quantization_config": method}, indent=2, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n")


def _write_index(layout: Layout, path: Path) -> None:
    names = {name: output.name for output in layout.outputs for name in output.tensors}
    size = sum(count for output in layout.outputs for _, _, count in output.tensors.values())
    value = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    temporary = path.with_name(f".{path.name}.incomplete")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.rename(path)
