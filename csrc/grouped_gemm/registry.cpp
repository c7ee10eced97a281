// Config index -> launch and prepare functions; a row without its instance is a link error.
#include "grouped_gemm/registry.hpp"

#include "grouped_gemm/config_list.hpp"

namespace moe_ext::grouped_gemm {

std::vector<RegisteredKernel> const& registered_kernels() {
  static std::vector<RegisteredKernel> const kernels = {
#define MOE_EXT_CONFIG(id_, ...) {configs::id_::value, &launch<configs::id_>, &prepare<configs::id_>},
#include "grouped_gemm/configs.def"
#undef MOE_EXT_CONFIG
  };
  return kernels;
}

}  // namespace moe_ext::grouped_gemm
