// The floating types that kernels read, without torch.
#pragma once

namespace moe_ext {

enum class InputType { BF16, FP16, FP32 };

}  // namespace moe_ext
