// Argument checks shared by every operator: each throws InvalidArgument with a message that names
// operator, argument, rule and what came. The list of a call (core/operator.h) runs them all.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "annulus/core/errors.h"
#include "annulus/core/tensor.h"

namespace annulus {

// "[op] name must ..., but ..." in one place, so that all messages read alike.
[[noreturn]] void invalid(const char* op, const std::string& argument, const std::string& rule,
                          const std::string& came);

// The tensor is there, has that rank, no negative extent, sizes whose products fit in 63 bits,
// and data where it has elements.
void check_tensor(const char* op, const char* name, const TensorView& v, int rank);
void check_dtype(const char* op, const char* name, const TensorView& v,
                 std::span<const DType> allowed);
void check_shape(const char* op, const char* name, const TensorView& v,
                 std::span<const std::int64_t> expected);
inline void check_dtype(const char* op, const char* name, const TensorView& v,
                        std::initializer_list<DType> allowed) {
  check_dtype(op, name, v, std::span<const DType>(allowed.begin(), allowed.size()));
}
inline void check_shape(const char* op, const char* name, const TensorView& v,
                        std::initializer_list<std::int64_t> expected) {
  check_shape(op, name, v, std::span<const std::int64_t>(expected.begin(), expected.size()));
}
void check_device(const char* op, const char* name, const TensorView& v, const char* reference_name,
                  const TensorView& reference);
// Two elements of an output must not share an address (strides 0, or rows that overlap).
void check_output_layout(const char* op, const char* name, const TensorView& v);
// An output and another tensor must not share memory: their spans do not touch, or they are different columns of rows.
void check_no_overlap(const char* op, const char* name, const TensorView& out,
                      const char* other_name, const TensorView& other);

}  // namespace annulus
