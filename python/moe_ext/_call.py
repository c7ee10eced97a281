"""From a public function to its op, or straight to what the op would run.

Between the two stand torch's reading of every argument, its dispatcher and a kernel for autograd in
Python. Where none of them would do anything, as in eager serving, they are left out, which saves a
layer's host 3.4 of 43 us (docs/notes/host-time.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from moe_ext._autograd import count_write
from moe_ext._words import check_kinds

_PLAIN_TYPES = frozenset((Tensor, Parameter))  # not fake ones, nor any other whose class has a say
_INT = frozenset((int,))
_INT64 = range(-(2**63), 2**63)
_TYPES = {
    "Tensor": _PLAIN_TYPES,
    "int": _INT,
    "float": frozenset((float,)),  # an int torch makes one, or refuses
    "bool": frozenset((bool,)),
    "str": frozenset((str,)),
    "ScalarType": frozenset((torch.dtype,)),
}
"""By torch's names for the kinds of arguments that the ops have; no others go past it."""
_NO_TYPE = frozenset[type]()
_NONE = frozenset((type(None),))
_BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
# What the dispatcher looks at besides a call's tensors where nothing is traced, faked, transformed
# or otherwise watched; the second key is missing in inference mode.
_EAGER_KEYS = frozenset(
    keys.raw_repr()
    for keys in (
        _BACKEND_SELECT,
        _BACKEND_SELECT | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView),
    )
)


def goes_straight(op: Any, operands: Sequence[object], options: Mapping[str, object]) -> bool:
    """Whether nobody but an op's implementation has to know of a call.

    So it is without gradients (grad mode is off), in eager mode, in no mode of torch's and under no
    profiler, with plain tensors and other arguments that torch would hand on as they are.
    """
    return (
        not torch.compiler.is_compiling()  # first: the compiler looks no further
        and not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._autograd._profiler_enabled()
        and torch._C._dispatch_tls_local_include_set().raw_repr() in _EAGER_KEYS
        and _are_plain(op, operands, options)
    )


@functools.cache
def _kinds(op: Any) -> dict[str, frozenset[type]]:
    """Return the types of an op's arguments for which torch would have nothing to say or change."""
    kinds = {}
    for argument in op._schema.arguments:
        declared = str(argument.real_type)
        types = _TYPES.get(declared.removeprefix("Optional[").removesuffix("]"), _NO_TYPE)
        kinds[argument.name] = types | _NONE if declared.startswith("Optional") else types
    return kinds


def _are_plain(op: Any, operands: Sequence[object], options: Mapping[str, object]) -> bool:
    kinds = _kinds(op)
    for value, types in zip(operands, kinds.values(), strict=False):  # options follow
        if type(value) not in types or (types is _INT and value not in _INT64):
            return False
    for name, value in options.items():
        types = kinds.get(name, _NO_TYPE)
        if type(value) not in types or (types is _INT and value not in _INT64):
            return False
    return True


def call(op: Callable[..., Any], operands: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call an op; raise a ValueError for an argument that torch refuses for its kind."""
    try:
        return op(*operands, **options)
    except RuntimeError as error:
        check_kinds(op, error)
        raise


def call_straight(
    op: Callable[..., Any],
    run: Callable[..., Any],
    operands: Sequence[Any],
    options: Mapping[str, Any],
    *,
    written: Sequence[Tensor | None] = (),
) -> Any:
    """Call an op, or what it would run where that is the same.

    Args:
        op: takes operands and options.
        run: its implementation, which takes them too.
        operands: of the call.
        options: of the call, by name.
        written: tensors that the call writes.
    """
    if goes_straight(op, operands, options):
        try:
            result = run(*operands, **options)
        except (OverflowError, RuntimeError, TypeError):
            pass  # again, by the op, which says what is wrong in torch's words
        else:
            for tensor in written:
                count_write(tensor)
            return result
    return call(op, operands, options)
