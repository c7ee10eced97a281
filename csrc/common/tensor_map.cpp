// TMA descriptors: the driver's encoder is looked up at run time, so that the library does not need libcuda to load.
#include "common/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "common/check.hpp"

namespace moe_ext {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check_cuda(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "looking up cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(
        "moe_ext: the CUDA driver has no cuTensorMapEncodeTiled; it must support CUDA 13.0");
  }
  return reinterpret_cast<EncodeTiled>(function);
}

EncodeTiled encoder() {
  static EncodeTiled const function = find_encoder();
  return function;
}

}  // namespace

template <int kRank>
CUtensorMap make_tensor_map(CUtensorMapDataType type,
                            void const* base,
                            TensorMapDim const (&dims)[kRank],
                            L2Fetch l2_fetch,
                            Swizzle swizzle) {
  cuuint64_t sizes[kRank];
  cuuint64_t strides[kRank];
  cuuint32_t box[kRank];
  cuuint32_t element_strides[kRank];
  for (int i = 0; i < kRank; ++i) {
    sizes[i] = dims[i].size;
    strides[i] = dims[i].stride_bytes;
    box[i] = dims[i].box;
    element_strides[i] = 1;
  }
  CUtensorMap map;
  CUresult const status = encoder()(
      &map,
      type,
      kRank,
      const_cast<void*>(base),
      sizes,
      strides + 1,
      box,
      element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == Swizzle::None ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
      l2_fetch == L2Fetch::Bytes128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(concat("moe_ext: cuTensorMapEncodeTiled failed with CUresult ",
                                    static_cast<int>(status),
                                    "; please report the shapes and strides of this call"));
  }
  return map;
}

template CUtensorMap make_tensor_map<2>(
    CUtensorMapDataType, void const*, TensorMapDim const (&)[2], L2Fetch, Swizzle);
template CUtensorMap make_tensor_map<3>(
    CUtensorMapDataType, void const*, TensorMapDim const (&)[3], L2Fetch, Swizzle);
template CUtensorMap make_tensor_map<5>(
    CUtensorMapDataType, void const*, TensorMapDim const (&)[5], L2Fetch, Swizzle);

}  // namespace moe_ext
