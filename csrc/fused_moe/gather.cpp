// Which kernel gathers in which format.
#include "fused_moe/gather.hpp"

#include "fused_moe/gather_launch.hpp"

namespace moe_ext::fused_moe {
namespace {

void by_token(GatherParams const& params, cudaStream_t stream) {
  switch (params.format) {
    case GatherFormat::BF16:
    case GatherFormat::StaticScale:
      return gather::tokens_plainly(params, stream);
    case GatherFormat::RowScale:
      return gather::tokens_by_rows(params, stream);
    case GatherFormat::RowBlocks:
      return gather::tokens_by_row_blocks(params, stream);
  }
}

}  // namespace

void gather_quantize(GatherParams const& params, cudaStream_t stream) {
  if (params.max_rows == 0 || params.num_tokens == 0) {
    return;
  }
  if (params.out == params.x) {
    return gather::in_place(params, stream);
  }
  // Weights make the values of each slot others.
  if (params.slot_row != nullptr && params.weights == nullptr) {
    return by_token(params, stream);
  }
  switch (params.format) {
    case GatherFormat::BF16:
    case GatherFormat::StaticScale:
      return gather::plainly(params, stream);
    case GatherFormat::RowScale:
      return gather::by_rows(params, stream);
    case GatherFormat::RowBlocks:
      return gather::by_row_blocks(params, stream);
  }
}

}  // namespace moe_ext::fused_moe
