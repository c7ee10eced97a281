"""Arithmetic that several modules need."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-dividend // divisor)
