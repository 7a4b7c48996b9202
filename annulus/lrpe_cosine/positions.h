// Where tokens stand: what the options of both forms say about it, as one type. The options themselves have the same
// fields rather than this one inside, so that a caller names them all in one initialiser.
#pragma once

#include <cstdint>

#include "annulus/core/tensor.h"
#include "annulus/lrpe_cosine/lrpe_cosine.h"

namespace annulus {

struct LrpePositions {
  LrpeGrid shape = {};
  std::int64_t prefix = 0;
  std::int64_t offset = 0;
  TensorView offsets = {};
  TensorView position_ids = {};
};

template <class Options>
LrpePositions positions_of(const Options& o) {
  return {o.shape, o.prefix, o.offset, o.offsets, o.position_ids};
}
inline LrpeCosineOptions cosine_options(const LrpePositions& p,
                                        LrpeActivation activation = LrpeActivation::kNone) {
  return {p.shape, p.prefix, p.offset, p.offsets, p.position_ids, activation};
}
inline LrpeRotateOptions rotate_options(const LrpePositions& p, bool interleaved = false) {
  return {p.shape, p.prefix, p.offset, p.offsets, p.position_ids, interleaved};
}

}  // namespace annulus
