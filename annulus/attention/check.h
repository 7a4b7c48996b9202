// The rules of attention's arguments: checks a call, once, and makes its Plan.
#pragma once

#include <cstdint>

#include "annulus/attention/attention.h"
#include "annulus/attention/plan.h"

namespace annulus::attention {

// The tensors of a call, by the names of the header.
struct Tensors {
  TensorView q, k, v, o, lse;
  TensorView do_ = {}, dlse = {}, dq = {}, dk = {}, dv = {};
  // Packed sequences, which make all of the above one rank less.
  TensorView cu_seqlens_q = {}, cu_seqlens_k = {};
};

enum class Call { kForward, kBackward, kForwardSizes, kBackwardSizes };

// Where the tensors hold some tokens of a longer sequence: how many it has. The pattern is that of all of them.
inline constexpr std::int64_t kOwnTokens = -1;

Plan plan_of(const char* op, const Tensors& t, const AttentionOptions& options, Call call,
             const Context* context, std::int64_t tokens = kOwnTokens);
Plan plan_of(const char* op, const Tensors& t, const DilatedAttentionOptions& options, Call call,
             const Context* context, std::int64_t tokens = kOwnTokens);
Plan plan_of(const char* op, const Tensors& t, const BlockSparseAttentionOptions& options,
             Call call, const Context* context, std::int64_t tokens = kOwnTokens);

// What a list of blocks says, in host memory; its shapes are right.
void check_blocks(const char* op, const TensorView& row_ptr, const TensorView& col_idx,
                  std::int64_t columns);

}  // namespace annulus::attention
