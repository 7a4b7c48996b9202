// Columns that partial rotary passes through, on CUDA: copied as they are, of queries and keys in one launch. A kernel
// of its own, so that those that turn have no branch for it.

#include <cstdint>

#include "annulus/cuda/check.h"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

namespace {

constexpr int kPassThreads = 256;
constexpr int kPassTokens = 4;  // of a thread

// Pointers, strides and columns in words, which are what a thread moves at a time.
struct PassArgs {
  Operand from[2], to[2];
  std::int64_t columns = 0;
};

// Thread (x, y) of a block: words x, x + blockDim.x, ... of tokens y, y + blockDim.y, ... of the tile, of one sequence.
template <class Word>
__global__ void __launch_bounds__(kPassThreads)
    pass_kernel(const __grid_constant__ Args a, const __grid_constant__ PassArgs pass) {
  const Place p = find_place(a);
  const Operand& from = pass.from[p.side];
  const Operand& to = pass.to[p.side];
  if (to.first == nullptr) return;  // in place, or a gradient that was not asked for
  const auto* source = static_cast<const Word*>(from.first);
  auto* target = static_cast<Word*>(to.first);
  const std::int64_t t_begin = static_cast<std::int64_t>(p.tile) * blockDim.y * kPassTokens;
#pragma unroll
  for (int i = 0; i < kPassTokens; ++i) {
    const std::int64_t t = t_begin + static_cast<std::int64_t>(i) * blockDim.y + threadIdx.y;
    if (t >= a.L) return;
    for (std::int64_t c = threadIdx.x; c < pass.columns; c += blockDim.x) {
      target[element(to, p.group, p.head, t, c)] = source[element(from, p.group, p.head, t, c)];
    }
  }
}

// Whether rows of a tensor are whole words of so many bytes.
bool has_words(const TensorView& v, std::int64_t bytes) {
  const std::int64_t size = size_of(v.dtype);
  bool whole = v.stride[3] == 1 && v.shape[3] * size % bytes == 0 &&
               reinterpret_cast<std::uintptr_t>(v.data) % static_cast<std::uintptr_t>(bytes) == 0;
  for (std::size_t i = 0; i < 3; ++i) whole = whole && v.stride[i] * size % bytes == 0;
  return whole;
}

template <class Word>
void launch(const Plan& plan, Args a, cudaStream_t stream) {
  const std::int64_t in_word =
      static_cast<std::int64_t>(sizeof(Word)) / size_of(plan.dtype);  // elements
  const auto operand = [&](const TensorView& v) {
    Operand o;
    o.first = v.data;
    for (std::size_t i = 0; i < 3; ++i) o.stride[i] = v.stride[i] / in_word;
    o.stride[3] = in_word > 1 ? 1 : v.stride[3];
    return o;
  };
  PassArgs pass;
  for (int i = 0; i < plan.sides; ++i) {
    const Side& s = plan.side[i];
    if (!s.pass_to.defined()) continue;
    pass.from[i] = operand(s.pass_from);
    pass.to[i] = operand(s.pass_to);
    pass.columns = s.pass_to.shape[3] / in_word;
  }
  const int lanes = lanes_of_row(pass.columns, 1, 32);
  const dim3 shape(static_cast<unsigned>(lanes), static_cast<unsigned>(kPassThreads / lanes));
  const unsigned blocks = number_blocks(plan, ceil_div(plan.L, kPassTokens * shape.y), 1, a);
  pass_kernel<Word><<<blocks, shape, 0, stream>>>(a, pass);
  check_launch(plan.op, "pass_kernel");
}

}  // namespace

void launch_pass(const Plan& plan, const Args& a, cudaStream_t stream) {
  bool any = false, wide = true;
  for (int i = 0; i < plan.sides; ++i) {
    const Side& s = plan.side[i];
    if (!s.pass_to.defined()) continue;
    any = true;
    wide = wide && has_words(s.pass_from, 16) && has_words(s.pass_to, 16);
  }
  if (!any) return;
  if (wide) return launch<uint4>(plan, a, stream);
  switch (size_of(plan.dtype)) {
    case 2:
      return launch<std::uint16_t>(plan, a, stream);
    case 4:
      return launch<std::uint32_t>(plan, a, stream);
    default:
      return launch<std::uint64_t>(plan, a, stream);
  }
}

}  // namespace annulus::lrpe_cosine::cuda
