"""Errors of the functions behind the commands, in words of the command line.

Functions name their arguments, and ops their tensors; a user of a command typed options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

GEMM = {
    "num_rows": "--rows",
    "num_groups": "--groups",
    "n": "-n",
    "k": "-k",
    "sm_count": "--sm-count",
    "measure_on": "--measure-on",
}
"""Options of `explain gemm` by the arguments of `moe_ext.explain`."""
LAYER = {
    "num_tokens": "--tokens",
    "top_k": "--top-k",
    "num_experts": "--experts",
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "sm_count": "--sm-count",
    "measure_on": "--measure-on",
}
"""Options of `explain layer` by the arguments of `moe_ext.explain_fused_moe`."""
_TENSORS = (
    (r"`topk_ids` must have (.*) columns, ", r"--top-k must be \1, "),
    (
        r"`topk_ids` must have (.*) elements, got (\d+) .*",
        r"--tokens times --top-k must be \1, got \2",
    ),
    (r"`w13` must have (.*) experts, ", r"--experts must be \1, "),
    (r"`hidden_states` must have a positive hidden size that is", "--hidden must be positive and"),
    (r"`hidden_states` must have hidden size", "--hidden must be"),
    (r"`w2` must have a positive intermediate size that is", "--intermediate must be positive and"),
    (r"`w2` must have intermediate size", "--intermediate must be"),
    (
        r"`w13` must have a contiguous .* multiples of (\d+) .* shape \(.*, (\d+)\).*",
        r"--hidden must be a multiple of \1 for these weights, got \2",
    ),
    (
        r"`w2` must have a contiguous .* multiples of (\d+) .* shape \(.*, (\d+)\).*",
        r"--intermediate must be a multiple of \1 for these weights, got \2",
    ),
)
"""What `fused_moe` says of tensors whose sizes were typed, and how that is said of them."""


@contextmanager
def named(options: Mapping[str, str]) -> Iterator[None]:
    """Have a ValueError name options where it names arguments.

    Args:
        options: by the names of arguments.
    """
    try:
        yield
    except ValueError as error:
        text = _in_options(str(error), options)
        if text == str(error):
            raise
        raise ValueError(text) from error


def _in_options(text: str, options: Mapping[str, str]) -> str:
    for pattern, said in _TENSORS:
        text = re.sub(rf"^fused_moe: {pattern}", said, text)
    for argument, option in options.items():
        # Whose argument it is at the beginning says nothing to those who typed an option.
        text = re.sub(rf"(^\w+: )?`{argument}`", option, text)
    return text
