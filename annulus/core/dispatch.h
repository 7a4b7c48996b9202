// Run-time value -> template parameter, by lambda:
//   visit_floating(x.dtype, [&]<class T>() { kernel<T>(...); });
#pragma once

#include <utility>

#include "annulus/core/dtype.h"
#include "annulus/core/errors.h"

namespace annulus {

// The four floating types; operators check the dtype first, so anything else is a bug of ours.
template <class F>
decltype(auto) visit_floating(DType t, F&& f) {
  switch (t) {
    case DType::kF64:
      return f.template operator()<double>();
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kF16:
      return f.template operator()<float16>();
    case DType::kBF16:
      return f.template operator()<bfloat16>();
    default:
      throw InvalidArgument(std::string("[dispatch] dtype must be floating but is ") + name_of(t));
  }
}

template <class F>
decltype(auto) visit_bool(bool value, F&& f) {
  return value ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace annulus
