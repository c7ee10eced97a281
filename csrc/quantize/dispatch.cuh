// From a dtype and addresses to a kernel's template arguments.
#pragma once

#include <cstdint>

#include "quantize/params.hpp"
#include "quantize/vectors.cuh"

namespace moe_ext::quantize {

template <class T>
Access access_of(Params const& params) {
  constexpr int kElems = Vector<T>::kElems;
  bool const x_aligned = reinterpret_cast<std::uintptr_t>(params.x) % sizeof(uint4) == 0 &&
                         params.x_row_stride % kElems == 0 && params.x_group_stride % kElems == 0;
  bool const q_aligned = reinterpret_cast<std::uintptr_t>(params.q) % kElems == 0 &&
                         params.q_row_stride % kElems == 0 && params.q_group_stride % kElems == 0;
  return x_aligned && q_aligned && params.k % kElems == 0 ? Access::Vector : Access::Element;
}

/// Calls `function.template operator()<T, kAccess>()` for the type of x.
template <class Function>
void dispatch(Params const& params, Function const& function) {
  auto const with_type = [&]<class T>() {
    if (access_of<T>(params) == Access::Vector) {
      function.template operator()<T, Access::Vector>();
    } else {
      function.template operator()<T, Access::Element>();
    }
  };
  switch (params.type) {
    case InputType::BF16:
      return with_type.template operator()<__nv_bfloat16>();
    case InputType::FP16:
      return with_type.template operator()<__half>();
    case InputType::FP32:
      return with_type.template operator()<float>();
  }
}

}  // namespace moe_ext::quantize
