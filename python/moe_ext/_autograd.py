"""Gradients: there are none, so inputs that require grad are accepted and backward raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")
_LIBRARY.define(
    "_raise_inference_only(Tensor grad, Tensor like, str op) -> Tensor",
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


def autograd_kernel(
    op: Any,
    implementation: Callable[..., Any],
    outputs: tuple[str, ...] = ("out",),
    scratch: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Make the Autograd kernel of `op`, whose arguments `outputs`, if it has them, are written.

    Arguments `scratch`, which may be None, are written too, but hold no result.
    """
    name = op._schema.name.partition("::")[2]
    written = tuple(argument.name for argument in op._schema.arguments if argument.name in outputs)
    counted = written + scratch

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        if (
            torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or not _comes_to_backend(keyset.raw_repr())
        ):
            return with_gradients(keyset, args, options)
        # The dispatcher would only come to the implementation: going there directly saves 2 us.
        result = implementation(*args, **options)
        return _wrote(counted, options, result) if counted else result

    def with_gradients(keyset: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        def redispatch() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & _BELOW_AUTOGRAD, *args, **options)

        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        if _needs_gradients(name, tensors):
            outs = [options[output] for output in written]
            if torch.is_grad_enabled():
                _check_outputs(name, written, outs)
            inputs = [
                tensor
                for tensor in tensors
                if tensor.is_floating_point() and not any(tensor is out for out in outs)
            ]
            result = _InferenceOnly.apply(  # type: ignore[no-untyped-call]
                redispatch, name, len(outs), *outs, *inputs
            )
            return _wrote(scratch, options, None if outs else result)
        if _comes_to_backend(keyset.raw_repr()):
            return _wrote(counted, options, implementation(*args, **options))
        return _wrote(counted, options, redispatch())

    return kernel


def _check_outputs(op: str, names: tuple[str, ...], outs: list[Any]) -> None:
    """Raise a ValueError for an output that autograd lets nobody write, before it is written."""
    for name, out in zip(names, outs, strict=True):
        if out is None:  # the implementation says so
            continue
        leaf = out if out._base is None else out._base
        if leaf.requires_grad and leaf.is_leaf:
            raise ValueError(
                f"{op}: `{name}` must be neither a leaf that requires grad nor a view of one where "
                f"grad mode is enabled, got {'a leaf' if leaf is out else 'a view'}; call it under "
                "torch.no_grad()"
            )


def _wrote(written: tuple[str, ...], options: dict[str, Any], result: Any) -> Any:
    """Count the writes into the outputs, if there are any, for autograd."""
    for name in written:
        count_write(options.get(name))
    return result


def count_write(tensor: Tensor | None) -> None:
    """Count a write into a tensor, if there is one, for autograd."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _needs_gradients(op: str, tensors: list[Tensor]) -> bool:
    """Whether autograd has to know of the call; raises under forward-mode differentiation."""
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise RuntimeError(
            f"{op}: inputs must have no tangent, since moe_ext is inference only, got a "
            "call under forward-mode differentiation"
        )
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _has_tangent(tensor: Tensor) -> bool:
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


class _InferenceOnly(torch.autograd.Function):
    """Ties the result to the inputs, so that backward raises, not silently leaves them out."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], op: str, num_outs: int, *tensors: Tensor) -> Any:
        outs, inputs = tensors[:num_outs], tensors[num_outs:]
        ctx.op, ctx.num_outs = op, num_outs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        result = run()
        if outs:
            ctx.mark_dirty(*outs)
            return outs
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # An op, so that it raises when backward runs, not when torch.compile traces it ahead of
        # time.
        grad = next(grad for grad in grads if grad is not None)
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[3 + ctx.num_outs :], strict=True)
        gradients = [
            _RAISE_INFERENCE_ONLY(grad, tensor, ctx.op) if needed else None
            for tensor, needed in wanted
        ]
        return None, None, None, *(None,) * ctx.num_outs, *gradients


def _raise_inference_only(grad: Tensor, like: Tensor, op: str) -> Tensor:
    raise RuntimeError(
        f"{op}: backward must not be called, since moe_ext is inference only, got a "
        f"gradient of shape {tuple(grad.shape)}; run the model under torch.no_grad() or "
        "torch.inference_mode()"
    )


def _raise_inference_only_fake(grad: Tensor, like: Tensor, op: str) -> Tensor:
    return torch.empty_like(like)


_LIBRARY.impl("_raise_inference_only", _raise_inference_only, "CPU")
_LIBRARY.impl("_raise_inference_only", _raise_inference_only, "CUDA")
torch.library.register_fake(
    "moe_ext::_raise_inference_only", _raise_inference_only_fake, lib=_LIBRARY
)
