"""The measured choices: the compiled kernel for each range of sizes. First match wins.

What is compiled (csrc/grouped_gemm/configs.def) and what is chosen (here) are two lists on
purpose. Each row says what it was measured with; where no row matches, the cost model of
`_dispatch` decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Row(NamedTuple):
    """A choice for the problems within all of its limits; a limit not given does not limit.

    `rows_per_group` is num_rows / num_groups, an average: the host knows no more than that.
    """

    dtype: str
    accumulate: str
    config: str
    measurement: str
    max_rows_per_group: float = math.inf
    max_num_rows: float = math.inf
    min_n: int = 0
    max_n: float = math.inf
    min_k: int = 0
    max_k: float = math.inf
    sm_count: int = 132

    def matches(self, num_rows: int, num_groups: int, n: int, k: int, sm_count: int) -> bool:
        """Whether a problem lies within the row's limits."""
        return (
            num_rows <= self.max_rows_per_group * num_groups
            and num_rows <= self.max_num_rows
            and self.min_n <= n <= self.max_n
            and self.min_k <= k <= self.max_k
            and sm_count == self.sm_count
        )


TABLE: tuple[Row, ...] = ()

# Compiled, chosen by no row and by the cost model for no usual shape; the tuner tries them all the
# same.
KEPT_FOR_TUNING: frozenset[str] = frozenset()
