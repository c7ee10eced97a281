"""Layouts of the activations: groups one behind the other, or a buffer of fixed size for each."""

from __future__ import annotations

CONTIGUOUS, MASKED = "contiguous", "masked"
LAYOUTS = (CONTIGUOUS, MASKED)
# Rows of a masked buffer are the largest group's, rounded up to a multiple of this.
BUFFER_STEP = 64
# A skewed draw over hundreds of experts would ask for buffers larger than the card.
MAX_BUFFER_BYTES = 24 * 2**30
