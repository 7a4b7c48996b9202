#include "annulus/attention/check.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "annulus/core/checked.h"
#include "annulus/core/operator.h"

namespace annulus::attention {

namespace {

constexpr std::int64_t kMaxHeadDim = 256;
const Few<DType, 4> kFloating = {DType::kF32, DType::kF16, DType::kBF16};
const Few<DType, 4> kIntegers = {DType::kI32, DType::kI64};

bool has_data(Call c) { return c == Call::kForward || c == Call::kBackward; }

Integers integers_of(const TensorView& v) {
  return {v.data, v.dtype == DType::kI64, v.rank > 0 ? v.stride[0] : 1};
}

// (T, H, D) as (1, T, H, D); (H, T) as (1, H, T).
TensorView with_batch(const TensorView& v) {
  if (!v.defined()) return v;
  TensorView r = v;
  r.rank = v.rank + 1;
  std::copy_n(v.shape.begin(), v.rank, r.shape.begin() + 1);
  std::copy_n(v.stride.begin(), v.rank, r.stride.begin() + 1);
  r.shape[0] = 1;
  r.stride[0] = 0;
  return r;
}

void check_head_dim(const char* op, const char* name, const TensorView& v, std::int64_t d) {
  if (d >= 1 && d <= kMaxHeadDim) return;
  invalid(op, name, "have 1 to 256 columns", "has shape " + shape_string(v.sizes()));
}

// More inputs of a call, beside the tensors.
using More = std::vector<Argument>;

// The plan of what all functions have in common; the pattern is left to the caller.
Plan common_plan(const char* op, const Tensors& t, bool packed, const More& more, Call call,
                 std::optional<double> scale, double dropout, std::uint64_t seed,
                 const Context* context) {
  Arguments list(op);
  const DType type = t.q.dtype;
  const auto size = [](const TensorView& v, int axis) {
    return axis < v.rank && axis < kMaxRank ? v.shape[static_cast<std::size_t>(axis)] : 0;
  };
  // Of rank 4, or 3 where packed.
  const int at = packed ? 0 : 1;
  const std::int64_t B = packed ? 1 : size(t.q, 0), Tq = size(t.q, at), H = size(t.q, at + 1),
                     D = size(t.q, at + 2), Tk = size(t.k, at), Hkv = size(t.k, at + 1),
                     Dv = size(t.v, at + 2);
  const auto shape = [&](std::int64_t T, std::int64_t heads, std::int64_t columns) {
    return packed ? Few<std::int64_t, kMaxRank>{T, heads, columns}
                  : Few<std::int64_t, kMaxRank>{B, T, heads, columns};
  };
  const Few<std::int64_t, kMaxRank> rows =
      packed ? Few<std::int64_t, kMaxRank>{H, Tq} : Few<std::int64_t, kMaxRank>{B, H, Tq};
  const Few<std::int64_t, kMaxRank> any = packed
                                              ? Few<std::int64_t, kMaxRank>{kAny, kAny, kAny}
                                              : Few<std::int64_t, kMaxRank>{kAny, kAny, kAny, kAny};
  list.input("q", t.q, kFloating, any);
  list.input("k", t.k, {type}, shape(kAny, kAny, D));
  list.input("v", t.v, {type}, shape(Tk, Hkv, kAny));
  for (const Argument& a : more) list.add(a);
  if (call == Call::kForward) {
    list.output("o", t.o, {type}, shape(Tq, H, Dv));
    list.optional_output("lse", t.lse, {DType::kF32}, rows);
  } else if (call == Call::kBackward) {
    list.input("do", t.do_, {type}, shape(Tq, H, Dv));
    list.optional_input("dlse", t.dlse, {DType::kF32}, rows);
    list.input("o", t.o, {type}, shape(Tq, H, Dv));
    list.input("lse", t.lse, {DType::kF32}, rows);
    list.optional_output("dq", t.dq, {type}, shape(Tq, H, D));
    list.optional_output("dk", t.dk, {type}, shape(Tk, Hkv, D));
    list.optional_output("dv", t.dv, {type}, shape(Tk, Hkv, Dv));
  }
  if (context != nullptr) {
    list.check(*context);
  } else {
    list.check_sizes();
  }
  check_head_dim(op, "q", t.q, D);
  check_head_dim(op, "v", t.v, Dv);
  if (Hkv == 0 ? H != 0 : H % Hkv != 0) {
    invalid(op, "k", "have a number of heads that divides q's " + std::to_string(H),
            "has shape " + shape_string(t.k.sizes()));
  }
  if (call == Call::kBackward && t.dk.defined() != t.dv.defined()) {
    invalid(op, t.dk.defined() ? "dv" : "dk", "be given with the other of dk and dv",
            "is left out");
  }
  const double s = scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  if (!std::isfinite(static_cast<float>(s))) {
    invalid(op, "softmax_scale", "be a finite number", "is " + std::to_string(s));
  }
  if (!(dropout >= 0 && dropout < 1)) {
    invalid(op, "dropout", "be at least 0 and less than 1", "is " + std::to_string(dropout));
  }

  Plan plan;
  plan.op = op;
  plan.device = t.q.device;
  plan.dtype = type;
  plan.B = B;
  plan.Tq = Tq;
  plan.Tk = Tk;
  plan.H = H;
  plan.Hkv = Hkv;
  plan.D = D;
  plan.Dv = Dv;
  const auto own = [&](const TensorView& v) { return packed ? with_batch(v) : v; };
  plan.q = own(t.q);
  plan.k = own(t.k);
  plan.v = own(t.v);
  plan.o = own(t.o);
  plan.lse = own(t.lse);
  plan.do_ = own(t.do_);
  plan.dlse = own(t.dlse);
  plan.dq = own(t.dq);
  plan.dk = own(t.dk);
  plan.dv = own(t.dv);
  plan.scale = s;
  plan.dropout = Dropout(dropout, seed);
  plan.deterministic = context != nullptr && context->deterministic;
  plan.portable = context != nullptr && context->portable;
  return plan;
}

// f(i) is entry i of integers on the CPU, where they can be read.
template <class F>
void check_entries(const TensorView& v, bool readable, F&& f) {
  if (!v.defined() || !readable || v.device.type != DeviceType::kCPU) return;
  f([&](std::int64_t i) { return integer_at(v, i * v.stride[0]); });
}

// Tokens by rank: every one of them once.
void check_order(const Plan& plan, const TensorView& order, bool readable) {
  if (!order.defined()) return;
  if (plan.Tq != plan.Tk) {
    invalid(plan.op, "order", "be left out where q and k have different numbers of rows",
            "is given with " + std::to_string(plan.Tq) + " and " + std::to_string(plan.Tk));
  }
  check_entries(order, readable, [&](auto at) {
    std::vector<bool> there(static_cast<std::size_t>(plan.Tq));
    for (std::int64_t r = 0; r < plan.Tq; ++r) {
      const std::int64_t token = at(r);
      if (token < 0 || token >= plan.Tq || there[static_cast<std::size_t>(token)]) {
        invalid(plan.op, "order", "have every number below " + std::to_string(plan.Tq) + " once",
                "has " + std::to_string(token) +
                    (token >= 0 && token < plan.Tq ? " twice" : " at " + std::to_string(r)));
      }
      there[static_cast<std::size_t>(token)] = true;
    }
  });
}

Argument order_argument(const TensorView& order, std::int64_t rows) {
  return {.name = "order", .view = order, .dtypes = kIntegers, .shape = {rows}, .optional = true};
}

void check_cu_seqlens(const char* op, const char* name, const TensorView& v, std::int64_t total,
                      bool readable) {
  check_entries(v, readable, [&](auto at) {
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < v.shape[0]; ++i) {
      const std::int64_t now = at(i);
      if (i == 0 ? now != 0 : now < before) {
        invalid(op, name, "ascend from 0",
                "has " + std::to_string(now) + " at " + std::to_string(i));
      }
      before = now;
    }
    if (before != total) {
      invalid(op, name, "end with the number of rows, " + std::to_string(total),
              "ends with " + std::to_string(before));
    }
  });
}

}  // namespace

Plan plan_of(const char* op, const Tensors& t, const AttentionOptions& options, Call call,
             const Context* context, std::int64_t tokens) {
  const bool packed = t.cu_seqlens_q.defined() || t.cu_seqlens_k.defined();
  const std::int64_t rows = t.q.rank > 1 ? t.q.shape[1] : 0,
                     batch = t.q.rank > 0 ? t.q.shape[0] : 0;
  More more;
  if (packed) {
    more.push_back(
        {.name = "cu_seqlens_q", .view = t.cu_seqlens_q, .dtypes = kIntegers, .shape = {kAny}});
    more.push_back({.name = "cu_seqlens_k",
                    .view = t.cu_seqlens_k,
                    .dtypes = kIntegers,
                    .shape = {t.cu_seqlens_q.rank == 1 ? t.cu_seqlens_q.shape[0] : kAny}});
    if (options.order.defined()) {
      invalid(op, "order", "be left out where sequences are packed", "is given");
    }
    if (options.key_lengths.defined()) {
      invalid(op, "key_lengths", "be left out where sequences are packed", "is given");
    }
  } else {
    more.push_back(order_argument(options.order, rows));
    more.push_back({.name = "key_lengths",
                    .view = options.key_lengths,
                    .dtypes = kIntegers,
                    .shape = {batch},
                    .optional = true});
  }
  Plan plan = common_plan(op, t, packed, more, call, options.softmax_scale, options.dropout,
                          options.dropout_seed, context);
  Dense dense;
  dense.queries = tokens == kOwnTokens ? plan.Tq : tokens;
  dense.keys = tokens == kOwnTokens ? plan.Tk : tokens;
  // A window longer than any sequence bounds nothing.
  const auto bound = [](std::int64_t window) {
    return window < 0 || window > kFar / 2 ? kFar : window;
  };
  dense.left = bound(options.window_left);
  dense.right = options.causal ? 0 : bound(options.window_right);
  if (packed) {
    if (t.cu_seqlens_q.shape[0] < 1) {
      invalid(op, "cu_seqlens_q", "have at least 1 entry", "has shape (0)");
    }
    check_cu_seqlens(op, "cu_seqlens_q", t.cu_seqlens_q, plan.Tq, has_data(call));
    check_cu_seqlens(op, "cu_seqlens_k", t.cu_seqlens_k, plan.Tk, has_data(call));
    dense.cu_queries = integers_of(t.cu_seqlens_q);
    dense.cu_keys = integers_of(t.cu_seqlens_k);
    // Sizes are those of packed sequences, whether their ends are known or not.
    if (!has_data(call)) dense.cu_queries.data = dense.cu_keys.data = "";  // not read
    dense.sequences = t.cu_seqlens_q.shape[0] - 1;
  } else {
    check_order(plan, options.order, has_data(call));
    plan.order = options.order;
    if (options.key_lengths.defined()) {
      if (options.order.defined()) {
        invalid(op, "key_lengths", "be left out where an order is given", "is given");
      }
      check_entries(options.key_lengths, has_data(call), [&](auto at) {
        for (std::int64_t b = 0; b < plan.B; ++b) {
          if (at(b) < 0 || at(b) > plan.Tk) {
            invalid(op, "key_lengths", "lie within 0.." + std::to_string(plan.Tk),
                    "has " + std::to_string(at(b)) + " at " + std::to_string(b));
          }
        }
      });
      dense.key_lengths = integers_of(options.key_lengths);
    }
  }
  plan.pattern = dense;
  return plan;
}

Plan plan_of(const char* op, const Tensors& t, const DilatedAttentionOptions& options, Call call,
             const Context* context, std::int64_t tokens) {
  Plan plan = common_plan(op, t, false, {}, call, options.softmax_scale, options.dropout,
                          options.dropout_seed, context);
  if (plan.Tq != plan.Tk) {
    invalid(op, "k", "have q's " + std::to_string(plan.Tq) + " rows",
            "has shape " + shape_string(t.k.sizes()));
  }
  const std::int64_t n = tokens == kOwnTokens ? plan.Tq : tokens;
  const std::span<const std::int64_t> w = options.segment_lengths, r = options.dilation_rates;
  constexpr std::size_t kMost = kMaxDilatedBranches;
  if (w.empty() || w.size() > kMost) {
    invalid(op, "segment_lengths", "have 1 to 16 entries", "has " + std::to_string(w.size()));
  }
  if (r.size() != w.size()) {
    invalid(op, "dilation_rates",
            "have as many entries as segment_lengths, " + std::to_string(w.size()) + ",",
            "has " + std::to_string(r.size()));
  }
  Dilated dilated;
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (w[i] < 1) {
      invalid(op, "segment_lengths", "be at least 1", "has " + std::to_string(w[i]));
    }
    if (r[i] < 1) invalid(op, "dilation_rates", "be at least 1", "has " + std::to_string(r[i]));
    // A segment longer than the sequence is all of it; a rate beyond a segment leaves one token of it, if any.
    dilated.length[i] = std::min(w[i], std::max<std::int64_t>(n, 1));
    // Beyond all tokens and heads one rate is as good as another, and a small one can be multiplied.
    dilated.rate[i] = std::min(r[i], std::max(n, plan.H) + 1);
  }
  if (options.mode > DilatedMode::kGroupedKv) {
    invalid(op, "mode", "be one of DilatedMode",
            "is " + std::to_string(static_cast<int>(options.mode)));
  }
  if (options.offsets > DilatedOffsets::kBlock) {
    invalid(op, "offsets", "be one of DilatedOffsets",
            "is " + std::to_string(static_cast<int>(options.offsets)));
  }
  const bool longnet = options.mode == DilatedMode::kLongNet;
  if (options.unite && !longnet) {
    invalid(op, "unite", "be left out where heads are grouped: each has one branch", "is given");
  }
  if (options.stop_alpha_gradient && !longnet) {
    invalid(op, "stop_alpha_gradient", "be left out where heads are grouped: nothing is merged",
            "is given");
  }
  if (options.unite && options.stop_alpha_gradient) {
    invalid(op, "stop_alpha_gradient",
            "be left out with unite: branches that share keys have no weights", "is given");
  }
  if (options.offsets != DilatedOffsets::kMod && !longnet) {
    invalid(op, "offsets", "be left out where heads are grouped: a group has its own offset",
            "is given");
  }
  if (!longnet && static_cast<std::int64_t>(w.size()) > plan.H && plan.H > 0) {
    invalid(op, "segment_lengths",
            "have at most " + std::to_string(plan.H) + " entries, so that every group has a head,",
            "has " + std::to_string(w.size()));
  }
  dilated.mode = options.mode;
  dilated.offsets = options.offsets;
  dilated.causal = options.causal;
  dilated.unite = options.unite;
  dilated.remainder_last = options.remainder_last;
  dilated.tokens = n;
  dilated.heads = plan.H;
  dilated.heads_per_key = plan.heads_per_key();
  dilated.branches = static_cast<int>(w.size());
  plan.layers = longnet ? dilated.branches : 1;
  plan.stop_alpha_gradient = options.stop_alpha_gradient;
  plan.pattern = dilated;
  return plan;
}

void check_blocks(const char* op, const TensorView& row_ptr, const TensorView& col_idx,
                  std::int64_t columns) {
  const std::int64_t rows = row_ptr.shape[1] - 1, count = col_idx.shape[0];
  for (std::int64_t h = 0; h < row_ptr.shape[0]; ++h) {
    const auto ptr = [&](std::int64_t x) {
      return integer_at(row_ptr, h * row_ptr.stride[0] + x * row_ptr.stride[1]);
    };
    for (std::int64_t x = 0; x < rows; ++x) {
      if (ptr(x) < 0 || ptr(x + 1) < ptr(x) || ptr(x + 1) > count) {
        invalid(op, "row_ptr",
                "ascend within 0.." + std::to_string(count) + ", the blocks of col_idx,",
                "goes from " + std::to_string(ptr(x)) + " to " + std::to_string(ptr(x + 1)));
      }
      std::int64_t before = -1;
      for (std::int64_t i = ptr(x); i < ptr(x + 1); ++i) {
        const std::int64_t column = integer_at(col_idx, i * col_idx.stride[0]);
        if (column <= before || column >= columns) {
          invalid(op, "col_idx", "ascend within a row and be less than " + std::to_string(columns),
                  "has " + std::to_string(column) + " after " + std::to_string(before));
        }
        before = column;
      }
    }
  }
}

Plan plan_of(const char* op, const Tensors& t, const BlockSparseAttentionOptions& options,
             Call call, const Context* context, std::int64_t tokens) {
  const std::int64_t size = options.block_size;
  if (size != 16 && size != 32 && size != 64 && size != 128) {
    invalid(op, "block_size", "be 16, 32, 64 or 128", "is " + std::to_string(size));
  }
  const auto rows_of = [&](const TensorView& v) {
    return tokens != kOwnTokens ? tokens : v.rank > 1 ? v.shape[1] : 0;
  };
  const TensorView& row_ptr = options.row_ptr;
  const std::int64_t H = t.q.rank > 2 ? t.q.shape[2] : 0;
  const std::int64_t rows = ceil_div(std::max<std::int64_t>(rows_of(t.q), 0), size);
  const std::int64_t columns = ceil_div(std::max<std::int64_t>(rows_of(t.k), 0), size);
  const std::int64_t lists = row_ptr.rank == 2 && row_ptr.shape[0] == 1 ? 1 : H;
  More more;
  more.push_back(
      {.name = "row_ptr", .view = row_ptr, .dtypes = kIntegers, .shape = {lists, rows + 1}});
  more.push_back(
      {.name = "col_idx", .view = options.col_idx, .dtypes = {DType::kI32}, .shape = {kAny}});
  more.push_back(order_argument(options.order, rows_of(t.q)));
  Plan plan = common_plan(op, t, false, more, call, options.softmax_scale, options.dropout,
                          options.dropout_seed, context);
  check_order(plan, options.order, has_data(call));
  plan.order = options.order;
  const std::int64_t count = options.col_idx.shape[0];
  if (has_data(call) && plan.device.type == DeviceType::kCPU) {
    check_blocks(op, row_ptr, options.col_idx, columns);
  }
  Blocks blocks;
  blocks.queries = rows_of(t.q);
  blocks.keys = rows_of(t.k);
  blocks.size = size;
  blocks.causal = options.causal;
  blocks.row_ptr = {row_ptr.data, row_ptr.dtype == DType::kI64, row_ptr.stride[1]};
  blocks.head_stride = lists == 1 ? 0 : row_ptr.stride[0];
  blocks.col_idx = static_cast<const std::int32_t*>(options.col_idx.data);
  blocks.col_stride = options.col_idx.stride[0];
  blocks.col_count = count;
  plan.pattern = blocks;
  return plan;
}

}  // namespace annulus::attention
