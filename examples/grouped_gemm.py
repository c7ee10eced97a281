"""Ten lines: 300 rows sorted by group, each group times its own matrix."""

import moe_ext
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
a = torch.randn(300, 2048, device=device).bfloat16()
b = torch.randn(4, 768, 2048, device=device).bfloat16()
offs = torch.tensor([100, 100, 220, 300], dtype=torch.int32, device=device)
out = moe_ext.grouped_gemm(a, b, offs)  # or torch.ops.moe_ext.grouped_gemm(a, b, offs)
print(out.shape, out.dtype, out.device)
print(moe_ext.explain(dtype=a.dtype, num_rows=300, num_groups=4, n=768, k=2048, offs=offs.tolist()))
