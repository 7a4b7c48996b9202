// Attention on one device: dense, LongNet-dilated, grouped-dilated and block-sparse, forward and exact backward.
//
//   Inputs   q (B, Tq, H, D)   k (B, Tk, Hkv, D)   v (B, Tk, Hkv, Dv);  Hkv divides H, query head h reads key head
//            h div (H / Hkv).  1 <= D, Dv <= 256.  Every other size may be 0.
//   Scores   s[b,h,i,j] = scale <q[b,i,h], k[b,j,h']>;  scale is 1 / sqrt(D) unless given (any finite number)
//   Set      S(b,h,i): the keys that query i of head h may see, which is all that the functions below differ in. A key may
//            be in it several times (LongNet).
//   Output   o[b,i,h] = sum_{j in S} p_j v[b,j,h'],   p_j = exp(s_j - lse),   lse[b,h,i] = log sum_{j in S} exp(s_j)
//            o (B, Tq, H, Dv),  lse (B, H, Tq) f32. An empty S gives o = 0, lse = -inf and no gradient to anything.
//   Dropout  every p_j that o is made of (not lse) is kept with probability 1 - p and divided by it, or is 0. Which ones is a
//            function of (seed, b, h, i, j) alone: the same for every device, tiling and thread count.
//
//   Backward delta_i = <do_i, o_i> - dlse_i;   dv_j += z_ij p_ij do_i,   ds_ij = p_ij (z_ij <do_i, v_j> - delta_i),
//            dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i        (sums over the heads that share a key)
//            with z what dropout makes of a weight, 1 without it. p is computed again from q, k and lse: nothing of size
//            Tq x Tk exists anywhere.
//
// Every tensor may have any strides (packed qkv, transposed views). dtypes of q: f32, f16, bf16; all tensors but lse and dlse
// (f32) and integers have it. f32 products are fp32 products on the CPU and bf16x3 (see the page) on CUDA; bf16 products
// are bf16's, those of f16 are f16's on CUDA and fp32's on the CPU; sums, softmax and everything that is carried are fp32,
// and a result is rounded once. A NaN or infinity in a row reaches the outputs of those that attend it and no others.
// Deterministic but for CUDA's backward of f16 and bf16 with D, Dv <= 128, which may add to dq with atomics, in an order that
// changes, unless Context::deterministic asks for kernels without; on the CPU bit-equal for every number of threads. The
// caller owns every tensor; outputs overlap nothing. Integers that say where to read (cu_seqlens, key_lengths, block lists, an
// order) are checked where they can be read, on the CPU; on CUDA they are clamped to what is there, so that a wrong one gives
// wrong numbers at worst.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "annulus/core/context.h"
#include "annulus/core/macros.h"
#include "annulus/core/tensor.h"

namespace annulus {

// S of attention: with the query at position i' = i + Tk - Tq (so that the last query stands at the last key),
//   j <= i'  where causal,   i' - window_left <= j <= i' + window_right  where a bound is not negative.
struct AttentionOptions {
  bool causal = false;
  std::optional<double> softmax_scale = {};
  std::int64_t window_left = -1, window_right = -1;  // negative: no bound
  // Tq == Tk: a permutation (T,) i32 or i64 on q's device; token order[r] has rank r, and i, j above are ranks.
  TensorView order = {};
  // (B,) i32 or i64 on q's device: only the first key_lengths[b] keys of a sample exist, and Tk above is that number.
  TensorView key_lengths = {};
  double dropout = 0;
  std::uint64_t dropout_seed = 0;
};

// q, k, v -> o, lse. lse may be left out where no backward follows.
ANNULUS_API void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const TensorView& o, const TensorView& lse,
                                   const AttentionOptions& options, Context& context);
// do, dlse (may be left out) and what the forward read and wrote -> dq, dk, dv. dq may be left out, and so may dk and dv.
ANNULUS_API void attention_backward(const TensorView& do_, const TensorView& dlse,
                                    const TensorView& q, const TensorView& k, const TensorView& v,
                                    const TensorView& o, const TensorView& lse,
                                    const TensorView& dq, const TensorView& dk,
                                    const TensorView& dv, const AttentionOptions& options,
                                    Context& context);

// Sequences packed one behind the other: q (total_q, H, D), k and v (total_k, Hkv, D or Dv), o (total_q, H, Dv),
// lse (H, total_q). Sequence b is rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q, and likewise of k: both are
// (B + 1,) i32 or i64, ascending, from 0 to the total. As attention of each sequence by itself; options.order and
// key_lengths are left out.
ANNULUS_API void attention_varlen_forward(const TensorView& q, const TensorView& k,
                                          const TensorView& v, const TensorView& cu_seqlens_q,
                                          const TensorView& cu_seqlens_k, const TensorView& o,
                                          const TensorView& lse, const AttentionOptions& options,
                                          Context& context);
ANNULUS_API void attention_varlen_backward(const TensorView& do_, const TensorView& dlse,
                                           const TensorView& q, const TensorView& k,
                                           const TensorView& v, const TensorView& cu_seqlens_q,
                                           const TensorView& cu_seqlens_k, const TensorView& o,
                                           const TensorView& lse, const TensorView& dq,
                                           const TensorView& dk, const TensorView& dv,
                                           const AttentionOptions& options, Context& context);

// Branch i has segments of w_i tokens and a rate r_i, and for head h an offset rho_i(h) < r_i. Token t is of the branch where
// (t mod w_i) mod r_i = rho_i(h); then the branch gives it the keys of its segment (t div w_i) that are of the branch, too
// (and no later, where causal). The last segment may be short, and a segment longer than the sequence.
enum class DilatedMode : std::uint8_t {
  kLongNet,  // every head runs every branch; S is all they give, with multiplicity or without
  kGrouped,  // heads are split into as many groups as there are branches; group i runs branch i with rho = i mod r_i
  kGroupedKv,  // the same, but every query of a segment sees the branch's keys, whether it is of the branch or not
};
enum class DilatedOffsets : std::uint8_t {
  kMod,    // LongNet: rho_i(h) = h mod r_i (LongNet's paper)
  kBlock,  // rho_i(h) = h div (H' / r_i), H' being H rounded up to a multiple of r_i (torchscale)
};

inline constexpr std::size_t kMaxDilatedBranches = 16;

struct DilatedAttentionOptions {
  std::span<const std::int64_t> segment_lengths =
      {};  // w, 1 to 16 of them, each at least 1; as many rates
  std::span<const std::int64_t> dilation_rates = {};  // r >= 1
  bool causal = false;
  DilatedMode mode = DilatedMode::kLongNet;
  DilatedOffsets offsets = DilatedOffsets::kMod;
  // LongNet: a key of several branches counts once. Otherwise as often as it is of one.
  bool unite = false;
  // LongNet: branches are weighted by constants alpha_i = exp(lse_i - lse) as far as gradients go (torchscale). Not with unite.
  bool stop_alpha_gradient = false;
  // Grouped: heads that do not divide evenly go one each to the first groups; or to the last.
  bool remainder_last = false;
  std::optional<double> softmax_scale = {};
  double dropout = 0;
  std::uint64_t dropout_seed = 0;
};

// Tq == Tk.
ANNULUS_API void dilated_attention_forward(const TensorView& q, const TensorView& k,
                                           const TensorView& v, const TensorView& o,
                                           const TensorView& lse,
                                           const DilatedAttentionOptions& options,
                                           Context& context);
ANNULUS_API void dilated_attention_backward(const TensorView& do_, const TensorView& dlse,
                                            const TensorView& q, const TensorView& k,
                                            const TensorView& v, const TensorView& o,
                                            const TensorView& lse, const TensorView& dq,
                                            const TensorView& dk, const TensorView& dv,
                                            const DilatedAttentionOptions& options,
                                            Context& context);

// Queries and keys are cut into blocks of block_size, the last ones short; block row x of head h sees the block columns
// col_idx[row_ptr[h, x]] .. col_idx[row_ptr[h, x + 1] - 1], which ascend strictly. row_ptr (H or 1, ceil(Tq / size) + 1) i32 or i64,
// col_idx (any,) i32, on q's device. Causal as in attention. Work and time are those of the blocks there are.
struct BlockSparseAttentionOptions {
  std::int64_t block_size = 64;  // 16, 32, 64 or 128
  TensorView row_ptr = {};
  TensorView col_idx = {};
  bool causal = false;
  std::optional<double> softmax_scale = {};
  TensorView order = {};  // as in attention: blocks cut the sequence of ranks
  double dropout = 0;
  std::uint64_t dropout_seed = 0;
};

ANNULUS_API void block_sparse_attention_forward(const TensorView& q, const TensorView& k,
                                                const TensorView& v, const TensorView& o,
                                                const TensorView& lse,
                                                const BlockSparseAttentionOptions& options,
                                                Context& context);
ANNULUS_API void block_sparse_attention_backward(const TensorView& do_, const TensorView& dlse,
                                                 const TensorView& q, const TensorView& k,
                                                 const TensorView& v, const TensorView& o,
                                                 const TensorView& lse, const TensorView& dq,
                                                 const TensorView& dk, const TensorView& dv,
                                                 const BlockSparseAttentionOptions& options,
                                                 Context& context);

// The visiting order of a Hilbert curve through a grid of 1 to 3 axes of any sizes: order[r] is the row-major number of the
// r-th cell. (numel,) i64 on the CPU. Where a size is no power of two the curve is that of the next cube, outside cells left
// out: a bijection always, and where all sizes are one power of two cells that follow each other are neighbours.
ANNULUS_API void hilbert_order(std::span<const std::int64_t> shape, const TensorView& order);

// Scratch of a call, exactly, from the same tensors (their data is not read); of a backward also from Context::deterministic.
ANNULUS_API std::size_t attention_forward_workspace(const TensorView& q, const TensorView& k,
                                                    const TensorView& v,
                                                    const AttentionOptions& options);
ANNULUS_API std::size_t attention_backward_workspace(const TensorView& q, const TensorView& k,
                                                     const TensorView& v,
                                                     const AttentionOptions& options,
                                                     bool deterministic = false);
ANNULUS_API std::size_t attention_varlen_forward_workspace(const TensorView& q, const TensorView& k,
                                                           const TensorView& v,
                                                           const TensorView& cu_seqlens_q,
                                                           const TensorView& cu_seqlens_k,
                                                           const AttentionOptions& options);
ANNULUS_API std::size_t attention_varlen_backward_workspace(
    const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cu_seqlens_q,
    const TensorView& cu_seqlens_k, const AttentionOptions& options, bool deterministic = false);
ANNULUS_API std::size_t dilated_attention_forward_workspace(const TensorView& q,
                                                            const TensorView& k,
                                                            const TensorView& v,
                                                            const DilatedAttentionOptions& options);
ANNULUS_API std::size_t dilated_attention_backward_workspace(const TensorView& q,
                                                             const TensorView& k,
                                                             const TensorView& v,
                                                             const DilatedAttentionOptions& options,
                                                             bool deterministic = false);
ANNULUS_API std::size_t block_sparse_attention_forward_workspace(
    const TensorView& q, const TensorView& k, const TensorView& v,
    const BlockSparseAttentionOptions& options);
ANNULUS_API std::size_t block_sparse_attention_backward_workspace(
    const TensorView& q, const TensorView& k, const TensorView& v,
    const BlockSparseAttentionOptions& options, bool deterministic = false);

}  // namespace annulus
