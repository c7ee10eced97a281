"""Registration of an op with torch: schema, implementation, autograd, fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_ext._autograd import autograd_kernel

OPTIONS = (
    "Tensor? scale_a=None, Tensor? scale_b=None, int[] scale_b_offset=[0,0], int n_segments=1, "
    "Tensor? bias=None, ScalarType? out_dtype=None, str accumulate='promoted', bool "
    "offs_ready=False, str? config=None"
)
_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    scratch: tuple[str, ...] = (),
) -> Any:
    """Define `moe_ext::name` and return it.

    Args:
        name: of the op, with that of its overload after a dot where it is not the default.
        schema: its arguments and result, as after the name in torch's schema language.
        implementation: for CPU and CUDA; the dispatcher runs inside it, so that compiled graphs
            hold one node whatever the sizes.
        fake: shapes and errors without memory.
        scratch: arguments that are written, may be None, and hold no result.
    """
    _LIBRARY.define(name + schema, tags=_TAGS)
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.moe_ext, packet), overload or "default")
    _LIBRARY.impl(name, implementation, "CPU")
    _LIBRARY.impl(name, implementation, "CUDA")
    kernel = autograd_kernel(op, implementation, scratch=scratch)
    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
    torch.library.register_fake(f"moe_ext::{name}", fake, lib=_LIBRARY)
    return op
