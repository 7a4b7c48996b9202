// Calls of a case made by hand, one after the other: the tensors are values under their names, and a call
// adds its outputs to them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <valarray>
#include <vector>

#include "testing/dense.h"
#include "testing/reference.h"

namespace annulus::testing {

using Vector = std::valarray<double>;
using Tensors = std::map<std::string, Vector>;

inline Vector vector_of(const std::vector<double>& v) { return Vector(v.data(), v.size()); }
inline std::vector<double> values_of(const Vector& v) { return {begin(v), end(v)}; }

// The inputs of all calls.
inline Tensors draw(const Case& c) {
  Tensors t;
  const std::vector<Values> all = draw_inputs(c);
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t k = 0; k < all[i].size(); ++k) {
      const TensorSpec& s = c.calls[i].inputs[k];
      if (!s.derived) t[s.name] = vector_of(all[i][k]);
    }
  }
  return t;
}

// The tensor of this name, which must have the elements of its shape: assigning one valarray to another
// changes its length.
inline std::vector<double> input_of(const TensorSpec& s, const Tensors& t) {
  const Vector& v = t.at(s.name);
  if (static_cast<std::int64_t>(v.size()) != numel_of(s)) {
    throw std::logic_error(s.name + " has " + std::to_string(v.size()) + " elements, not " +
                           std::to_string(numel_of(s)));
  }
  return values_of(v);
}

// The library's function, on dense tensors; what an earlier one left for it is there by its name.
inline void run(const Call& call, Device device, Context& context, Tensors& t) {
  std::vector<Dense> tensors;
  std::vector<TensorView> in, out;
  for (const TensorSpec& s : call.inputs) {
    tensors.emplace_back(device, s.dtype, s.shape).write(input_of(s, t));
    in.push_back(tensors.back().view());
  }
  for (const TensorSpec& s : call.outputs) {
    out.push_back(tensors.emplace_back(device, s.dtype, s.shape).view());
  }
  call.run(in, out, context);
  for (std::size_t i = 0; i < out.size(); ++i) {
    t[call.outputs[i].name] = vector_of(tensors[in.size() + i].values());
  }
}

// The definition.
inline void define(const Call& call, Tensors& t) {
  Values inputs;
  for (const TensorSpec& s : call.inputs) inputs.push_back(input_of(s, t));
  const Values outputs = run_reference(call, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    t[call.outputs[i].name] = vector_of(outputs[i]);
  }
}

// All calls.
inline Tensors run(const Case& c, Device device, Context& context, Tensors t) {
  for (const Call& call : c.calls) run(call, device, context, t);
  return t;
}
inline Tensors define(const Case& c, Tensors t) {
  for (const Call& call : c.calls) define(call, t);
  return t;
}

inline bool same_bits(const Vector& a, const Vector& b) {
  return std::equal(begin(a), end(a), begin(b), end(b), [](double x, double y) {
    return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
  });
}
// Names the tensors of both that differ.
inline std::string differing(const Tensors& a, const Tensors& b) {
  std::string names;
  for (const auto& [name, values] : a) {
    if (b.contains(name) && !same_bits(values, b.at(name))) names += name + " ";
  }
  return names;
}

}  // namespace annulus::testing
