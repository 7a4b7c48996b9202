// Attention over ranks: queries, keys and values of one sequence lie on the P ranks of a communicator, and every query attends
// what it would attend on one device. The same function of the whole sequence for every P, forward and backward.
//
//   Sequence  n tokens, cut into chunks: of contiguous shards P, chunk c beginning at (c n) div P, and rank p holds chunk p; of
//             zigzag 2 P, chunk c beginning at (c n) div (2 P), and rank p holds chunks p and 2 P - 1 - p, one behind the other,
//             so that with causality all ranks have as much to do. Chunks may be empty: n < P is fine.
//   Shards    q (B, m, H, D)   k (B, m, Hkv, D)   v (B, m, Hkv, Dv)   o (B, m, H, Dv)   lse (B, H, m) f32: of the m tokens
//             of this rank, in order. A token's position is that in the sequence, and all options (causality, windows,
//             segments, blocks, dropout) go by it, whatever the shard. An order of tokens (Hilbert) is had by ordering
//             the sequence before it is cut.
//   Scores, sets of keys, outputs and gradients as in attention.h, S being that of the whole sequence.
//
// Keys and values travel, or in the backward queries with do, lse and delta where these are fewer bytes; what comes back is fp32,
// and so is everything that is carried from rank to rank. Only rows travel that their receiver needs: none for later chunks
// where causal, those of a residue and a segment in LongNet, those of listed blocks. While the rows of a hop are computed the next
// are under way, and no rank ever has more than a few thousand rows of others: memory is O(n / P).
//
//   deterministic   o, lse, dq, dk and dv have the same bits for every P: tiles lie at fixed positions of the sequence, every
//                   rank takes them from first to last, and nothing is summed on the way. It takes up to 1.7 times as long on CPUs, 2.6 on a GPU. (Not
//                   where an element is no number or beyond 1e15: what is beside it in a tile is then computed otherwise.)
//
// All ranks make the same calls with the same options, or all throw RankLost before any data moves. When a rank is lost the
// outputs of all others are filled with NaN, their inputs are as they were, and the communicator is closed (communicator.h).
// A call that breaks a rule on every rank throws InvalidArgument on every rank, and the next call works.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "annulus/attention/attention.h"
#include "annulus/core/context.h"
#include "annulus/core/macros.h"
#include "annulus/core/tensor.h"
#include "annulus/dist/communicator.h"

namespace annulus {

enum class Balance : std::uint8_t { kZigzag, kContiguous };

struct RingOptions {
  std::int64_t tokens = 0;  // n
  Balance balance = Balance::kZigzag;
  bool deterministic = false;
  // Rows that travel in one message, at most; 0: 1536 from CPU to CPU, where more is no faster, and 8192 from GPU to GPU, whose
  // kernels want that many to be at their best.
  std::int64_t slice = 0;
};

// Tokens first .. end-1.
struct TokenRange {
  std::int64_t first = 0, end = 0;

  std::int64_t count() const { return end - first; }
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

// The chunks that a rank holds, in the order in which its shard has them; the second is empty where shards are contiguous.
ANNULUS_API std::array<TokenRange, 2> ring_shard(std::int64_t tokens, int ranks, int rank,
                                                 Balance balance);

// Of options: order and key_lengths are left out. row_ptr and col_idx are those of the whole sequence, on every rank.
ANNULUS_API void ring_attention_forward(const TensorView& q, const TensorView& k,
                                        const TensorView& v, const TensorView& o,
                                        const TensorView& lse, const AttentionOptions& options,
                                        const RingOptions& ring, Communicator& group,
                                        Context& context);
ANNULUS_API void ring_attention_forward(const TensorView& q, const TensorView& k,
                                        const TensorView& v, const TensorView& o,
                                        const TensorView& lse,
                                        const DilatedAttentionOptions& options,
                                        const RingOptions& ring, Communicator& group,
                                        Context& context);
ANNULUS_API void ring_attention_forward(const TensorView& q, const TensorView& k,
                                        const TensorView& v, const TensorView& o,
                                        const TensorView& lse,
                                        const BlockSparseAttentionOptions& options,
                                        const RingOptions& ring, Communicator& group,
                                        Context& context);

// dlse may be left out; dq, dk and dv not: all ranks compute the same.
ANNULUS_API void ring_attention_backward(const TensorView& do_, const TensorView& dlse,
                                         const TensorView& q, const TensorView& k,
                                         const TensorView& v, const TensorView& o,
                                         const TensorView& lse, const TensorView& dq,
                                         const TensorView& dk, const TensorView& dv,
                                         const AttentionOptions& options, const RingOptions& ring,
                                         Communicator& group, Context& context);
ANNULUS_API void ring_attention_backward(
    const TensorView& do_, const TensorView& dlse, const TensorView& q, const TensorView& k,
    const TensorView& v, const TensorView& o, const TensorView& lse, const TensorView& dq,
    const TensorView& dk, const TensorView& dv, const DilatedAttentionOptions& options,
    const RingOptions& ring, Communicator& group, Context& context);
ANNULUS_API void ring_attention_backward(
    const TensorView& do_, const TensorView& dlse, const TensorView& q, const TensorView& k,
    const TensorView& v, const TensorView& o, const TensorView& lse, const TensorView& dq,
    const TensorView& dk, const TensorView& dv, const BlockSparseAttentionOptions& options,
    const RingOptions& ring, Communicator& group, Context& context);

// Scratch of a rank's call, exactly, from its shards (their data is not read).
ANNULUS_API std::size_t ring_attention_forward_workspace(const TensorView& q, const TensorView& k,
                                                         const TensorView& v,
                                                         const AttentionOptions& options,
                                                         const RingOptions& ring, int ranks,
                                                         int rank);
ANNULUS_API std::size_t ring_attention_backward_workspace(const TensorView& q, const TensorView& k,
                                                          const TensorView& v,
                                                          const AttentionOptions& options,
                                                          const RingOptions& ring, int ranks,
                                                          int rank);
ANNULUS_API std::size_t ring_attention_forward_workspace(const TensorView& q, const TensorView& k,
                                                         const TensorView& v,
                                                         const DilatedAttentionOptions& options,
                                                         const RingOptions& ring, int ranks,
                                                         int rank);
ANNULUS_API std::size_t ring_attention_backward_workspace(const TensorView& q, const TensorView& k,
                                                          const TensorView& v,
                                                          const DilatedAttentionOptions& options,
                                                          const RingOptions& ring, int ranks,
                                                          int rank);
ANNULUS_API std::size_t ring_attention_forward_workspace(const TensorView& q, const TensorView& k,
                                                         const TensorView& v,
                                                         const BlockSparseAttentionOptions& options,
                                                         const RingOptions& ring, int ranks,
                                                         int rank);
ANNULUS_API std::size_t ring_attention_backward_workspace(
    const TensorView& q, const TensorView& k, const TensorView& v,
    const BlockSparseAttentionOptions& options, const RingOptions& ring, int ranks, int rank);

}  // namespace annulus
