"""Where weights come from: named tensors that can be let go one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping

from torch import Tensor, nn

from moe_ext.scales import scales_to_float32

_SHOWN_KEYS = 4


class Source:
    """Named tensors of a state dict.

    With `consume`, `release` removes them from it, so that their memory is free once no one else
    holds it.
    """

    argument = "state_dict"

    def __init__(self, op: str, tensors: Mapping[str, Tensor], consume: bool) -> None:
        if not isinstance(tensors, Mapping):
            raise ValueError(
                f"{op}: `state_dict` must be a mapping of names to tensors, got "
                f"{type(tensors).__name__}"
            )
        if consume and not isinstance(tensors, MutableMapping):
            raise ValueError(
                f"{op}: `state_dict` must be mutable where `consume` is true, got "
                f"{type(tensors).__name__}"
            )
        self.op = op
        self._tensors = tensors
        self._consume = consume

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f'{self.op}: `{self.argument}` must have "{name}", got {self.shown()}')
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{self.op}: `{name}` must be a tensor, got {type(tensor).__name__}")
        return tensor.detach()

    def optional(self, name: str) -> Tensor | None:
        """Return a tensor, None where there is none."""
        if name not in self:
            return None
        return self[name]

    def first_of(self, names: Iterable[str]) -> tuple[str, Tensor | None]:
        """Return the first that is there as float32, with its name; else None."""
        last = ""
        for name in names:
            last = name
            if name in self:
                return name, scales_to_float32(self[name])
        return last, None

    def shown(self) -> str:
        """Return the names that are there, or the first few of them."""
        names = sorted(self)
        more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
        return ", ".join(f'"{name}"' for name in names[:_SHOWN_KEYS]) + more or "no names"

    def release(self, names: Iterable[str]) -> None:
        """Let go of tensors, where the source is to be consumed."""
        if self._consume and isinstance(self._tensors, MutableMapping):
            for name in names:
                self._tensors.pop(name, None)


class LinearsSource(Source):
    """Weights and biases of linear layers, one `nn.Module` of them for each expert.

    With `consume`, `release` takes the parameters from their linears.
    """

    argument = "experts"

    def __init__(self, op: str, experts: Iterable[nn.Module], consume: bool) -> None:
        self._owners: dict[str, tuple[nn.Linear, str]] = {}
        tensors: dict[str, Tensor] = {}
        if not isinstance(experts, Iterable):
            raise ValueError(
                f"{op}: `experts` must be an iterable of modules, got {type(experts).__name__}"
            )
        for index, expert in enumerate(experts):
            if not isinstance(expert, nn.Module):
                raise ValueError(
                    f"{op}: `experts` must hold modules, got {type(expert).__name__} at {index}"
                )
            for child, linear in expert.named_children():
                if not isinstance(linear, nn.Linear):
                    continue
                for part in ("weight", "bias"):
                    tensor = getattr(linear, part)
                    if tensor is not None:
                        tensors[f"{index}.{child}.{part}"] = tensor
                        self._owners[f"{index}.{child}.{part}"] = (linear, part)
        super().__init__(op, tensors, consume)

    def release(self, names: Iterable[str]) -> None:
        """Let go of parameters, where the linears are to be consumed."""
        names = list(names)
        super().release(names)
        for name in names if self._consume else ():
            if name in self._owners:
                linear, part = self._owners.pop(name)
                setattr(linear, part, None)
