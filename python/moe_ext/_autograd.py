"""Gradients: there are none yet, so inputs that require grad are accepted and backward raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")
_LIBRARY.define(
    "_raise_inference_only(Tensor grad, Tensor like) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_RAISE_INFERENCE_ONLY = torch.ops.moe_ext._raise_inference_only.default

# What the dispatcher looks at after the autograd kernel.
_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_BACKENDS = (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU)


@functools.lru_cache(maxsize=256)
def _comes_to_backend(keyset: int) -> bool:
    """Whether nothing stands between autograd and the backend: no fake tensors, no tracing."""
    below = torch._C.DispatchKeySet.from_raw_repr(keyset) & _BELOW_AUTOGRAD
    return below.highestPriorityTypeId() in _BACKENDS


def autograd_kernel(op: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Make the Autograd kernel of `op`, a grouped GEMM."""

    def kernel(keyset: Any, a: Tensor, b: Tensor, offs: Tensor, **options: Any) -> Any:
        # The dispatcher would only come to the implementation: going there directly saves 2 us.
        direct = _comes_to_backend(keyset.raw_repr())
        if not direct or forward_ad._current_level >= 0 or torch.is_grad_enabled():

            def redispatch() -> Any:
                with torch._C._AutoDispatchBelowAutograd():
                    return op.redispatch(keyset & _BELOW_AUTOGRAD, a, b, offs, **options)

            inputs = (a, b, options.get("scale_a"), options.get("scale_b"), options.get("bias"))
            out = options.get("out")
            if _needs_gradients(inputs, out):
                result = _InferenceOnly.apply(  # type: ignore[no-untyped-call]
                    redispatch, out, *inputs
                )
                return result if out is None else None
            if not direct:
                return _wrote(options, redispatch())
        return _wrote(options, implementation(a, b, offs, **options))

    return kernel


def _wrote(options: dict[str, Any], result: Any) -> Any:
    """Count the write into `out`, if there is one, for autograd."""
    if "out" in options and not options["out"].is_inference():
        torch.autograd.graph.increment_version(options["out"])
    return result


def _needs_gradients(inputs: tuple[Tensor | None, ...], out: Tensor | None) -> bool:
    """Whether autograd has to know of the call; raises under forward-mode differentiation."""
    tensors = [tensor for tensor in (*inputs, out) if tensor is not None]
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise RuntimeError(
            "grouped_gemm: inputs must have no tangent, since moe_ext is inference only, got a "
            "call under forward-mode differentiation"
        )
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _has_tangent(tensor: Tensor) -> bool:
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


class _InferenceOnly(torch.autograd.Function):
    """Ties the result to the inputs, so that backward raises, not silently leaves them out."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[], Tensor | None], out: Tensor | None, *inputs: Tensor | None
    ) -> Tensor | None:
        ctx.save_for_backward(*inputs)
        result = run()
        if out is not None:
            ctx.mark_dirty(out)
            return out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # An op, so that it raises when backward runs, not when torch.compile traces it ahead of
        # time.
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        gradients = [
            _RAISE_INFERENCE_ONLY(grads[0], tensor) if needed else None for tensor, needed in wanted
        ]
        return None, None, *gradients


def _raise_inference_only(grad: Tensor, like: Tensor) -> Tensor:
    raise RuntimeError(
        "grouped_gemm: backward must not be called, since moe_ext is inference only, got a "
        f"gradient of shape {tuple(grad.shape)}; run the model under torch.no_grad() or "
        "torch.inference_mode()"
    )


def _raise_inference_only_fake(grad: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like)


_LIBRARY.impl("_raise_inference_only", _raise_inference_only, "CPU")
_LIBRARY.impl("_raise_inference_only", _raise_inference_only, "CUDA")
torch.library.register_fake(
    "moe_ext::_raise_inference_only", _raise_inference_only_fake, lib=_LIBRARY
)
