"""The hidden states that reach a model's layers of experts, of token ids, by Transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def hidden_states_of(
    op: str, directory: Path, input_ids: Tensor, device: torch.device | str
) -> dict[int, Tensor]:
    """Run a model over sequences.

    Args:
        op: in messages.
        directory: of the checkpoint, with its config.
        input_ids: (sequences, length), of whole numbers; one sequence is run at a time.
        device: of the model.

    Returns:
        (sequences * length, hidden_size), bfloat16, on the CPU, by the number of the layer.

    Raises:
        ModuleNotFoundError: Transformers is not installed.
        ValueError: the model has no layers of experts.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{op}: the package `transformers` must be installed for data with input_ids: "
            "pip install transformers; or give hidden_states"
        ) from None
    with _quiet(logging):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, local_files_only=True
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    if input_ids.numel() and not (int(input_ids.min()) >= 0 and int(input_ids.max()) < vocabulary):
        raise ValueError(
            f"{op}: input_ids must be from 0 to {vocabulary - 1}, the model's vocabulary, got "
            f"{int(input_ids.min())} to {int(input_ids.max())}"
        )
    model = model.to(device).eval()
    found: dict[int, list[Tensor]] = {}
    for name, module in model.named_modules():
        number = re.search(r"(?:^|\.)layers\.(\d+)\.", f"{name}.")
        if number and isinstance(getattr(module, "experts", None), nn.Module):
            hook = _keep_in(found.setdefault(int(number[1]), []))
            module.register_forward_pre_hook(hook, with_kwargs=True)
    if not found:
        raise ValueError(
            f"{op}: the model of {directory} must have layers with `experts`, got "
            f"{type(model).__name__} without"
        )
    for sequence in input_ids.long():
        model(input_ids=sequence[None].to(device), use_cache=False)
    return {number: torch.cat(parts) for number, parts in found.items() if parts}


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep Transformers' progress bars out of pipes."""
    shown = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _keep_in(parts: list[Tensor]) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = args[0] if args else options["hidden_states"]
        parts.append(hidden.detach().flatten(0, -2).to("cpu", torch.bfloat16))

    return keep
