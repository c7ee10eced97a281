// The epilogue of a kernel, by what it makes of its sums.
#pragma once

#include "grouped_gemm/sm90/epilogue.cuh"
#include "grouped_gemm/sm90/gated_epilogue.cuh"

namespace moe_ext::grouped_gemm {

/// Rows or features, as the launch asks, in the same shared memory.
template <class ConfigTag>
struct EitherEpilogue {
  using Rows = Epilogue<ConfigTag>;
  using Gated = GatedEpilogue<ConfigTag>;

  union SharedStorage {
    typename Rows::SharedStorage rows;
    typename Gated::SharedStorage gated;
  };

  EpilogueParams const& params;
  CUtensorMap const& out_map;
  SharedStorage& storage;
  int warp_group;
  int thread;  // within the warp group

  __device__ void store(Accumulators<ConfigTag> const& acc,
                        Tile const& tile,
                        RowFactors<ConfigTag> const& rows) {
    if (params.gating.joins) {
      Gated{params, out_map, storage.gated, warp_group, thread}.store(acc, tile, rows);
    } else {
      of_rows().store(acc, tile, rows);
    }
  }

  /// As Epilogue::share.
  template <int kShare>
  __device__ float const* share(float const (&values)[kShare]) const {
    return of_rows().share(values);
  }

  __device__ void finish() const {
    of_rows().finish();
  }

 private:
  __device__ Rows of_rows() const {
    return {params, out_map, storage.rows, warp_group, thread};
  }
};

template <class ConfigTag, Output kOutput = ConfigTag::value.output>
struct EpilogueChoice {
  using type = Epilogue<ConfigTag>;
};

template <class ConfigTag>
struct EpilogueChoice<ConfigTag, Output::Gated> {
  using type = GatedEpilogue<ConfigTag>;
};

template <class ConfigTag>
struct EpilogueChoice<ConfigTag, Output::Either> {
  using type = EitherEpilogue<ConfigTag>;
};

template <class ConfigTag>
using EpilogueOf = typename EpilogueChoice<ConfigTag>::type;

}  // namespace moe_ext::grouped_gemm
