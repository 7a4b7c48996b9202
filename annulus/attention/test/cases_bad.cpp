// Calls that break one rule of attention.h each, beyond those that the argument lists say.

#include <array>
#include <cmath>
#include <deque>
#include <initializer_list>
#include <span>
#include <vector>

#include "annulus/attention/test/cases.h"
#include "testing/bad_calls.h"

namespace annulus::testing {

namespace {

// Good arguments of every function, B = 2, Tq = Tk = 40, H = 4 (k: 2), D = 8, Dv = 6; packed, one sequence of 40. A bad call
// spoils one.
class Attempt : public AttemptTensors {
 public:
  explicit Attempt(Device device) : AttemptTensors(device) {
    q = input("q", {2, 40, 4, 8});
    k = input("k", {2, 40, 2, 8});
    v = input("v", {2, 40, 2, 6});
    o = output("o", {2, 40, 4, 6});
    lse = output("lse", {2, 4, 40});
    d_o = input("do", {2, 40, 4, 6});
    saved_o = input("o", {2, 40, 4, 6});
    saved_lse = input("lse", {2, 4, 40});
    dq = output("dq", {2, 40, 4, 8});
    dk = output("dk", {2, 40, 2, 8});
    dv = output("dv", {2, 40, 2, 6});
    packed_q = input("packed q", {40, 4, 8});
    packed_k = input("packed k", {40, 2, 8});
    packed_v = input("packed v", {40, 2, 6});
    packed_o = output("packed o", {40, 4, 6});
    cu_q = input("cu_seqlens_q", {2}, DType::kI64);
    cu_k = input("cu_seqlens_k", {2}, DType::kI64);
    key_lengths = input("key_lengths", {2}, DType::kI64);
    order = input("order", {40}, DType::kI64);
    blocks.block_size = 16;
    blocks.row_ptr = input("row_ptr", {4, 4}, DType::kI64);
    blocks.col_idx = input("col_idx", {6}, DType::kI32);
  }

  void dense() { attention_forward(q, k, v, o, lse, options, context); }
  void dense_backward() {
    attention_backward(d_o, {}, q, k, v, saved_o, saved_lse, dq, dk, dv, options, context);
  }
  void varlen() {
    attention_varlen_forward(packed_q, packed_k, packed_v, cu_q, cu_k, packed_o, {}, options,
                             context);
  }
  void dilated() {
    DilatedAttentionOptions own = longnet;
    own.segment_lengths = {segments.data(), segment_count};
    own.dilation_rates = {rates.data(), rate_count};
    dilated_attention_forward(q, k, v, o, lse, own, context);
  }
  void block_sparse() { block_sparse_attention_forward(q, k, v, o, lse, blocks, context); }

  // Only where the CPU can read them; the library leaves them alone on CUDA. The numbers are this object's own, and no tensor's
  // that must stay as it is.
  void set(TensorView& view, std::initializer_list<std::int64_t> values) {
    const std::size_t at = integers_.size();
    integers_.resize(at + 1);
    for (const std::int64_t x : values) {
      integers_[at].wide.push_back(x);
      integers_[at].narrow.push_back(static_cast<std::int32_t>(x));
    }
    view.data = view.dtype == DType::kI64 ? static_cast<void*>(integers_[at].wide.data())
                                          : static_cast<void*>(integers_[at].narrow.data());
  }
  // 0, 1, 2, ... but for one.
  void set_order(std::int64_t at, std::int64_t token) {
    set(order, {});
    std::vector<std::int64_t>& values = integers_.back().wide;
    for (std::int64_t i = 0; i < 40; ++i) values.push_back(i == at ? token : i);
    order.data = values.data();
    options.order = blocks.order = order;
  }

  TensorView q, k, v, o, lse, d_o, saved_o, saved_lse, dq, dk, dv;
  TensorView packed_q, packed_k, packed_v, packed_o, cu_q, cu_k, key_lengths, order;
  AttentionOptions options;
  DilatedAttentionOptions longnet;
  std::array<std::int64_t, 17> segments{8, 16, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
  std::array<std::int64_t, 17> rates{1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  std::size_t segment_count = 2, rate_count = 2;
  BlockSparseAttentionOptions blocks;
  Context context;

 private:
  struct Integers {
    std::vector<std::int64_t> wide;
    std::vector<std::int32_t> narrow;
  };
  std::deque<Integers> integers_;
};

struct Rule {
  const char *what, *argument;
  void (*spoil)(Attempt& a);
  void (Attempt::*call)();
  bool reads = false;  // integers, which only a CPU call does
};

using A = Attempt;

const Rule kDenseRules[] = {
    {"no column", "q", [](A& a) { a.q.shape[3] = a.k.shape[3] = 0; }, &A::dense},
    {"more than 256 columns", "q",
     [](A& a) {
       set_shape(a.q, {1, 1, 1, 257}), set_shape(a.k, {1, 1, 1, 257}), set_shape(a.v, {1, 1, 1, 6}),
           set_shape(a.o, {1, 1, 1, 6}), set_shape(a.lse, {1, 1, 1});
     },
     &A::dense},
    {"no column of v", "v", [](A& a) { a.v.shape[3] = a.o.shape[3] = 0; }, &A::dense},
    {"more than 256 columns of v", "v",
     [](A& a) {
       set_shape(a.q, {1, 1, 1, 8}), set_shape(a.k, {1, 1, 1, 8}), set_shape(a.v, {1, 1, 1, 257}),
           set_shape(a.o, {1, 1, 1, 257}), set_shape(a.lse, {1, 1, 1});
     },
     &A::dense},
    {"Hkv does not divide H", "k", [](A& a) { a.q.shape[2] = a.o.shape[2] = a.lse.shape[1] = 3; },
     &A::dense},
    {"queries without a key head", "k", [](A& a) { a.k.shape[2] = a.v.shape[2] = 0; }, &A::dense},
    {"backward: Hkv does not divide H", "k",
     [](A& a) { a.k.shape[2] = a.v.shape[2] = a.dk.shape[2] = a.dv.shape[2] = 0; },
     &A::dense_backward},
    {"dk without dv", "dv", [](A& a) { a.dv = {}; }, &A::dense_backward},
    {"dv without dk", "dk", [](A& a) { a.dk = {}; }, &A::dense_backward},
    {"a scale that is NaN", "softmax_scale", [](A& a) { a.options.softmax_scale = std::nan(""); },
     &A::dense},
    {"a scale that is infinite", "softmax_scale", [](A& a) { a.options.softmax_scale = INFINITY; },
     &A::dense},
    {"a scale that f32 has no number for", "softmax_scale",
     [](A& a) { a.options.softmax_scale = 1e39; }, &A::dense},
    {"dropout of all", "dropout", [](A& a) { a.options.dropout = 1; }, &A::dense},
    {"dropout below 0", "dropout", [](A& a) { a.options.dropout = -0.1; }, &A::dense},
    {"dropout that is NaN", "dropout", [](A& a) { a.options.dropout = std::nan(""); },
     &A::dense_backward},
    {"an order of other keys than queries", "order",
     [](A& a) { a.k.shape[1] = a.v.shape[1] = 30, a.options.order = a.order; }, &A::dense},
    {"an order that has a token twice", "order", [](A& a) { a.set_order(7, 3); }, &A::dense, true},
    {"an order that has a token beyond the last", "order", [](A& a) { a.set_order(7, 40); },
     &A::dense, true},
    {"an order that has a negative token", "order", [](A& a) { a.set_order(0, -1); },
     &A::dense_backward, true},
    {"key_lengths beside an order", "key_lengths",
     [](A& a) { a.set_order(0, 0), a.options.key_lengths = a.key_lengths; }, &A::dense, true},
    {"key_lengths beyond the keys", "key_lengths",
     [](A& a) {
       a.set(a.key_lengths, {3, 41}), a.options.key_lengths = a.key_lengths;
     },
     &A::dense, true},
    {"negative key_lengths", "key_lengths",
     [](A& a) {
       a.set(a.key_lengths, {-1, 40}), a.options.key_lengths = a.key_lengths;
     },
     &A::dense, true},
    {"packed, with an order", "order", [](A& a) { a.options.order = a.order; }, &A::varlen},
    {"packed, with key_lengths", "key_lengths", [](A& a) { a.options.key_lengths = a.key_lengths; },
     &A::varlen},
    {"packed, cu_seqlens_q without an entry", "cu_seqlens_q",
     [](A& a) { a.cu_q.shape[0] = a.cu_k.shape[0] = 0; }, &A::varlen},
    {"packed, cu_seqlens_q begins behind 0", "cu_seqlens_q",
     [](A& a) {
       a.set(a.cu_q, {1, 40});
     },
     &A::varlen, true},
    {"packed, cu_seqlens_q falls", "cu_seqlens_q",
     [](A& a) {
       set_shape(a.cu_q, {3}), set_shape(a.cu_k, {3}), a.set(a.cu_q, {0, 41, 40}),
           a.set(a.cu_k, {0, 1, 40});
     },
     &A::varlen, true},
    {"packed, cu_seqlens_q ends before the last row", "cu_seqlens_q",
     [](A& a) {
       a.set(a.cu_q, {0, 39});
     },
     &A::varlen, true},
    {"packed, cu_seqlens_q ends behind the last row", "cu_seqlens_q",
     [](A& a) {
       a.set(a.cu_q, {0, 41});
     },
     &A::varlen, true},
    {"packed, cu_seqlens_k ends before the last row", "cu_seqlens_k",
     [](A& a) {
       a.set(a.cu_q, {0, 40}), a.set(a.cu_k, {0, 39});
     },
     &A::varlen, true},
    {"packed, cu_seqlens_k begins behind 0", "cu_seqlens_k",
     [](A& a) {
       a.set(a.cu_q, {0, 40}), a.set(a.cu_k, {2, 40});
     },
     &A::varlen, true},
    {"packed, cu_seqlens_q and no cu_seqlens_k", "cu_seqlens_k", [](A& a) { a.cu_k = {}; },
     &A::varlen},
};

const Rule kDilatedRules[] = {
    {"other keys than queries", "k", [](A& a) { a.k.shape[1] = a.v.shape[1] = 30; }, &A::dilated},
    {"no branch", "segment_lengths", [](A& a) { a.segment_count = a.rate_count = 0; }, &A::dilated},
    {"seventeen branches", "segment_lengths", [](A& a) { a.segment_count = a.rate_count = 17; },
     &A::dilated},
    {"fewer rates than segments", "dilation_rates", [](A& a) { a.rate_count = 1; }, &A::dilated},
    {"more rates than segments", "dilation_rates", [](A& a) { a.rate_count = 3; }, &A::dilated},
    {"a segment of no token", "segment_lengths", [](A& a) { a.segments[1] = 0; }, &A::dilated},
    {"a negative segment", "segment_lengths", [](A& a) { a.segments[0] = -8; }, &A::dilated},
    {"a rate of 0", "dilation_rates", [](A& a) { a.rates[1] = 0; }, &A::dilated},
    {"a negative rate", "dilation_rates", [](A& a) { a.rates[0] = -1; }, &A::dilated},
    {"a union of groups", "unite",
     [](A& a) { a.longnet.mode = DilatedMode::kGrouped, a.longnet.unite = true; }, &A::dilated},
    {"alpha of groups", "stop_alpha_gradient",
     [](A& a) { a.longnet.mode = DilatedMode::kGroupedKv, a.longnet.stop_alpha_gradient = true; },
     &A::dilated},
    {"alpha of a union", "stop_alpha_gradient",
     [](A& a) { a.longnet.unite = a.longnet.stop_alpha_gradient = true; }, &A::dilated},
    {"offsets of groups", "offsets",
     [](A& a) {
       a.longnet.mode = DilatedMode::kGrouped, a.longnet.offsets = DilatedOffsets::kBlock;
     },
     &A::dilated},
    {"more groups than heads", "segment_lengths",
     [](A& a) { a.longnet.mode = DilatedMode::kGrouped, a.segment_count = a.rate_count = 5; },
     &A::dilated},
    {"a scale that is NaN", "softmax_scale", [](A& a) { a.longnet.softmax_scale = std::nan(""); },
     &A::dilated},
    {"dropout of all", "dropout", [](A& a) { a.longnet.dropout = 1; }, &A::dilated},
    {"a mode that does not exist", "mode",
     [](A& a) { a.longnet.mode = static_cast<DilatedMode>(77); }, &A::dilated},
    {"offsets that do not exist", "offsets",
     [](A& a) { a.longnet.offsets = static_cast<DilatedOffsets>(77); }, &A::dilated},
};

const Rule kBlockRules[] = {
    {"blocks of 48", "block_size", [](A& a) { a.blocks.block_size = 48; }, &A::block_sparse},
    {"blocks of nothing", "block_size", [](A& a) { a.blocks.block_size = 0; }, &A::block_sparse},
    {"negative blocks", "block_size", [](A& a) { a.blocks.block_size = -16; }, &A::block_sparse},
    {"no row_ptr", "row_ptr", [](A& a) { a.blocks.row_ptr = {}; }, &A::block_sparse},
    {"no col_idx", "col_idx", [](A& a) { a.blocks.col_idx = {}; }, &A::block_sparse},
    {"row_ptr of other blocks", "row_ptr", [](A& a) { a.blocks.block_size = 32; },
     &A::block_sparse},
    {"row_ptr that falls", "row_ptr",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {0, 2, 1, 3}),
           a.set(a.blocks.col_idx, {0, 1, 2, 0, 1, 2});
     },
     &A::block_sparse, true},
    {"row_ptr that begins below 0", "row_ptr",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {-1, 0, 1, 3});
     },
     &A::block_sparse, true},
    {"row_ptr beyond the blocks", "row_ptr",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {0, 0, 0, 7});
     },
     &A::block_sparse, true},
    {"a block that is not there", "col_idx",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {0, 1, 3, 6}),
           a.set(a.blocks.col_idx, {0, 0, 3, 0, 1, 2});
     },
     &A::block_sparse, true},
    {"a negative block", "col_idx",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {0, 1, 3, 6}),
           a.set(a.blocks.col_idx, {-1, 0, 1, 0, 1, 2});
     },
     &A::block_sparse, true},
    {"blocks that do not ascend", "col_idx",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {0, 1, 3, 6}),
           a.set(a.blocks.col_idx, {0, 0, 1, 2, 1, 0});
     },
     &A::block_sparse, true},
    {"a block twice", "col_idx",
     [](A& a) {
       set_shape(a.blocks.row_ptr, {1, 4}), a.set(a.blocks.row_ptr, {0, 1, 3, 6}),
           a.set(a.blocks.col_idx, {0, 1, 1, 0, 1, 2});
     },
     &A::block_sparse, true},
    {"an order that has a token twice", "order", [](A& a) { a.set_order(7, 3); }, &A::block_sparse,
     true},
    {"an order of other keys than queries", "order",
     [](A& a) { a.k.shape[1] = a.v.shape[1] = 30, a.blocks.order = a.order; }, &A::block_sparse},
    {"a scale that is NaN", "softmax_scale", [](A& a) { a.blocks.softmax_scale = std::nan(""); },
     &A::block_sparse},
    {"dropout of all", "dropout", [](A& a) { a.blocks.dropout = 1; }, &A::block_sparse},
};

std::vector<BadCall> calls_of(std::span<const Rule> rules, Device device) {
  BadCallsOf<Attempt> b;
  for (const Rule& r : rules) {
    if (r.reads && device.type != DeviceType::kCPU) continue;
    b.add(r.what, r.argument, [r](Attempt& a) { r.spoil(a), (a.*r.call)(); });
  }
  return b.take();
}

}  // namespace

std::vector<BadCall> attention_bad_calls(Device device) { return calls_of(kDenseRules, device); }
std::vector<BadCall> dilated_attention_bad_calls(Device device) {
  return calls_of(kDilatedRules, device);
}
std::vector<BadCall> block_sparse_attention_bad_calls(Device device) {
  return calls_of(kBlockRules, device);
}

}  // namespace annulus::testing
