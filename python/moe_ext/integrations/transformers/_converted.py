"""Checkpoints of `moe-ext convert`, which Transformers would load with wrong weights: refused."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

_METHOD = "moe_ext"


class _ConvertedCheckpoint:
    """What stands for the quantisation of such a checkpoint in Transformers' list of methods."""

    @classmethod
    def from_dict(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse the checkpoint: called when a model is about to be made of it."""
        raise ValueError(
            "moe_ext: a checkpoint that `moe-ext convert` wrote must be read layer by layer, by "
            "moe_ext.ExpertBank.from_checkpoint, got one for a model of Transformers"
        )


def refuse_converted() -> None:
    """Have Transformers refuse such checkpoints, where else it warns and takes scaled weights."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(_METHOD, _ConvertedCheckpoint)
