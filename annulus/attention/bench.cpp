// The suites of attention.
//
//   attention                      the engine: dense, grouped, LongNet, blocks, forward and with all gradients
//   ring-attention-single          the original's four "standardized" classes on one rank
//   memory-scaling                 memory a token over the length, and the exponent that it grows with
//   extreme-sequences              LongNet of 100 000 and a million tokens on one device
//
// Deliberate differences from the originals: none of them computed what it was named for (attention.md has a table of what each
// did), so that times compare with theirs only beside the share of zero rows and the work done, which records state.
// (ring-attention-comprehensive, some of whose classes have several ranks, is ring_attention's.)
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <vector>

#include "annulus/attention/bench_original.h"
#include "annulus/attention/bench_rows.h"
#include "annulus/core/errors.h"

namespace annulus::bench {
namespace {

constexpr double kMiBOfGb = 1024, kMiBOfKb = 1.0 / 1024;

// --- attention -------------------------------------------------------------------------------------------------

std::string name_of_row(const AttentionProblem& p, bool backward) {
  const std::string kind =
      std::string(kind_of(p)) +
      (p.form == Form::kBlocks ? fmt::format("{:.0f}", 100 * p.density) : std::string());
  // Segments that do not grow with n.
  const bool own = p.form == Form::kDilated && 4 * p.segments[0] != p.Tq;
  return fmt::format("{}-{}-b{}-h{}{}-d{}-n{}{}{}{}{}", backward ? "fwdbwd" : "fwd", kind, p.B, p.H,
                     p.Hkv < p.H ? fmt::format("x{}", p.Hkv) : "", p.D, p.Tq,
                     p.causal ? "-causal" : "", own ? fmt::format("-w{}", p.segments[0]) : "",
                     p.deterministic ? "-deterministic" : "", p.portable ? "-portable" : "");
}

std::vector<Row> engine_rows(const SuiteRequest& request) {
  const bool quick = request.size == Size::kQuick, full = request.size == Size::kFull;
  std::vector<Row> rows;
  const auto add = [&](const AttentionProblem& p, bool backward) {
    rows.push_back(attention_row(name_of_row(p, backward), p, backward, request.device));
  };
  const auto both = [&](const AttentionProblem& p, bool quick_backward) {
    add(p, false);
    if (!quick || quick_backward) add(p, true);
  };
  for (const DType t : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t n : {1024, 4096}) {
      both(dense(n, t), n == 1024);
      both(dense(n, t, true), true);
    }
    for (const std::int64_t n : {4096, 8192}) {
      if (quick && n > 4096) continue;
      const std::vector<std::int64_t> w = {n / 4, n / 2, n}, r = {1, 2, 4};
      both(dilated(n, t, DilatedMode::kGrouped, w, r), true);
      both(dilated(n, t, DilatedMode::kLongNet, w, r), true);
    }
    both(blocks(4096, t, 0.1), true);
  }
  // What it costs to add without atomics, beside the row of the same name without the word; on the CPU nothing.
  if (request.device == DeviceType::kCUDA) {
    for (const bool causal : {false, true}) {
      AttentionProblem p = dense(4096, DType::kBF16, causal);
      p.deterministic = true;
      add(p, true);
    }
  }
  if (!full) return fitting(std::move(rows), request);
  if (request.device == DeviceType::kCUDA) {
    // The kernels that the device gets, and those of any.
    for (const bool portable : {false, true}) {
      for (const std::int64_t D : {64, 128}) {
        for (const std::int64_t n : {1024, 2048, 4096, 8192, 16384, 32768}) {
          for (const bool causal : {false, true}) {
            AttentionProblem p = dense(n, DType::kBF16, causal);
            p.D = D;
            p.portable = portable;
            if (portable || D > 64 || (n != 1024 && n != 4096)) both(p, true);
          }
        }
      }
    }
  } else {
    for (const std::int64_t n : {16384, 32768}) both(dense(n, DType::kBF16, n == 16384), true);
  }
  // LongNet's branches as in ring-attention-comprehensive; of 4096 they are those above.
  for (const std::int64_t n : {1024, 2048, 8192, 16384, 32768}) {
    if (n < 4096) {
      both(dilated(n, DType::kBF16, DilatedMode::kLongNet, {512, 1024}, {1, 2}), true);
    } else {
      both(dilated(n, DType::kBF16, DilatedMode::kLongNet, {1024, 2048, 4096}, {1, 2, 4}), true);
    }
  }
  for (const std::int64_t n : {16384, 32768}) both(blocks(n, DType::kBF16, 0.1, 128), true);
  both(dense(4096, DType::kF16, true), true);
  // As a transformer has them: wider heads, and four of queries to one of keys.
  for (const std::int64_t shared : {1, 4}) {
    AttentionProblem p = dense(8192, DType::kBF16, true);
    p.H = 16;
    p.Hkv = p.H / shared;
    p.D = 128;
    both(p, true);
  }
  return rows;
}

// --- ring-attention-single -------------------------------------------------------------------------------------

std::vector<Row> single_rows(const SuiteRequest& request) {
  const bool quick = request.size == Size::kQuick;
  std::vector<Row> rows;
  const auto add = [&](const char* name, AttentionProblem p, const char* computes) {
    p.B = 2;
    rows.push_back(attention_row(fmt::format("{}-n{}", name, p.Tq), p, false, request.device));
    Row& row = rows.back();
    row.params["computes"] = std::string(computes);
    if (!is_16_bits(p.dtype)) return;
    for (const SingleOriginalRow& s : kSingleOriginal) {
      if (s.name != std::string(name) || s.n != p.Tq) continue;
      const double ms = 1e3 * static_cast<double>(p.B * p.Tq) / s.tokens_per_s;
      row.original = {ms, "ms", kAttentionOriginalHardware, {}};
    }
  };
  for (const DType dtype : dtypes_of(request)) {
    for (const std::int64_t n : {1024, 2048, 4096, 8192}) {
      if (quick && n > 2048) continue;
      add("Standard", dense(n, dtype), "dense attention, which is what a ring of one rank is");
      add("Distributed", dense(n, dtype), "the same as Standard, in the original too");
      AttentionProblem hilbert = dense(n, dtype);
      hilbert.order = true;
      add("Hilbert", hilbert,
          "the same as Standard: without a mask an order changes nothing but where rows are read");
      // What an order is for: with it, a window is a neighbourhood of the picture.
      hilbert.window_left = hilbert.window_right = n / 16;
      add("Hilbert-window", hilbert, "an eighth of the ranks around each, of the Hilbert order");
      AttentionProblem sparse = blocks(n, dtype, 0.1);
      sparse.shared_list = true;
      add("BlockSparse", sparse,
          "a tenth of the blocks of 64 x 64; the original kept nine tenths, and computed all");
    }
  }
  return fitting(std::move(rows), request);
}

// --- memory-scaling --------------------------------------------------------------------------------------------

// The slope of log bytes over log tokens.
double exponent_of(const std::vector<double>& tokens, const std::vector<double>& bytes) {
  double x = 0, y = 0, xx = 0, xy = 0;
  const auto n = static_cast<double>(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const double a = std::log(tokens[i]), b = std::log(std::max(bytes[i], 1.0));
    x += a, y += b, xx += a * a, xy += a * b;
  }
  return (n * xy - x * y) / (n * xx - x * x);
}

std::vector<Row> memory_rows(const SuiteRequest& request) {
  std::vector<std::int64_t> lengths = {512, 1024, 2048};
  if (request.size != Size::kQuick) lengths.insert(lengths.end(), {4096, 8192, 16384, 32768});
  const Device device{request.device, 0};
  std::vector<Row> rows;
  // f16 everywhere, as in the original: its bytes are what is compared.
  const auto series = [&](const char* name, bool backward, auto problem_of) {
    std::vector<Row> own;
    for (const std::int64_t n : lengths) {
      AttentionProblem p = problem_of(n);
      p.lse = true;
      own.push_back(attention_row(fmt::format("{}-n{}", name, n), p, backward, request.device));
    }
    for (std::size_t i = 0; i < own.size(); ++i) {
      own[i].observe = [own, lengths, i, device](const Problem&) {
        std::vector<double> tokens, peak, scratch;
        for (std::size_t j = 0; j < own.size(); ++j) {
          const testing::Case c = own[j].problem();
          tokens.push_back(static_cast<double>(lengths[j]));
          peak.push_back(static_cast<double>(peak_bytes_of(c, own[j].calls, device)));
          std::size_t most = 0;
          for (const std::string& call : own[j].calls) {
            most = std::max(most, workspace_of(find_call(c, call), device));
          }
          scratch.push_back(static_cast<double>(most));
        }
        const auto rounded = [](double v) { return std::round(1e3 * v) / 1e3; };
        return Params{{"peak_kib_per_token", rounded(peak[i] / tokens[i] / 1024)},
                      {"workspace_kib_per_token", rounded(scratch[i] / tokens[i] / 1024)},
                      {"peak_exponent", rounded(exponent_of(tokens, peak))},
                      {"workspace_exponent", rounded(exponent_of(tokens, scratch))}};
      };
    }
    for (const MemoryOriginalRow& o : kMemoryOriginal) {
      if (o.name != std::string(name)) continue;
      Row& row = own.front();
      row.memory_name = "memory-" + row.name;
      row.memory_calls = row.calls;
      row.memory_original = {
          o.kb_per_token * kMemoryOriginalTokens * kMiBOfKb, "MiB", kAttentionOriginalHardware, {}};
    }
    for (Row& row : own) rows.push_back(std::move(row));
  };
  series("Standard", false, [](std::int64_t n) { return dense(n, DType::kF16); });
  series("Hilbert", false, [](std::int64_t n) {
    AttentionProblem p = dense(n, DType::kF16);
    p.order = true;
    return p;
  });
  // A tenth of the blocks, but one of every row at least.
  series("BlockSparse", false, [](std::int64_t n) {
    return blocks(n, DType::kF16, std::max(0.1, 100 / static_cast<double>(n)));
  });
  series("LongNet", false, [](std::int64_t n) {
    return dilated(n, DType::kF16, DilatedMode::kLongNet, {n / 4, n / 2, n}, {1, 2, 4});
  });
  series("Standard-fwdbwd", true, [](std::int64_t n) { return dense(n, DType::kF16); });
  series("LongNet-fwdbwd", true, [](std::int64_t n) {
    return dilated(n, DType::kF16, DilatedMode::kLongNet, {n / 4, n / 2, n}, {1, 2, 4});
  });
  return fitting(std::move(rows), request);
}

// --- extreme-sequences -----------------------------------------------------------------------------------------

std::vector<Row> extreme_rows(const SuiteRequest& request) {
  std::vector<Row> rows;
  const auto add = [&](std::int64_t n, DType dtype, bool backward) {
    // LongNet's own lengths and rates, and torchscale's for a million.
    AttentionProblem p = n < 500'000
                             ? dilated(n, dtype, DilatedMode::kLongNet,
                                       {2048, 4096, 8192, 16384, 32768}, {1, 2, 4, 6, 12})
                             : dilated(n, dtype, DilatedMode::kLongNet,
                                       {1024, 4096, 32768, 262144, 1048576}, {1, 2, 4, 8, 16});
    p.causal = true;  // a language model's
    rows.push_back(attention_row(fmt::format("{}-LongNet-n{}", backward ? "fwdbwd" : "fwd", n), p,
                                 backward, request.device));
    Row& row = rows.back();
    if (n == kExtremeOriginalTokens && !backward) {
      row.memory_name = "memory-" + row.name;
      row.memory_calls = row.calls;
      row.memory_original = {kMiBOfGb * kExtremeOriginalGb, "MiB", "estimate", {}};
    }
  };
  if (request.size == Size::kQuick) {
    add(8192, DType::kF32, false);
    add(8192, DType::kBF16, false);
    add(16384, DType::kBF16, false);
    add(8192, DType::kBF16, true);
    return rows;
  }
  for (const std::int64_t n : {16384, 100'000, 1'000'000}) {
    for (const bool backward : {false, true}) add(n, DType::kBF16, backward);
  }
  add(100'000, DType::kF32, false);
  return fitting(std::move(rows), request);
}

const SuiteRegistration engine(
    {"attention",
     "attention on one device: dense, grouped, LongNet and lists of blocks, forward and with all "
     "gradients",
     engine_rows,
     {{"torch-sdpa", "scaled_dot_product_attention as torch chooses its kernel"},
      {"torch-sdpa-flash", "scaled_dot_product_attention by its FlashAttention kernel alone"},
      {"torch-sdpa-cudnn", "scaled_dot_product_attention by cuDNN alone"},
      {"torch-sdpa-efficient", "scaled_dot_product_attention by its memory-efficient kernel alone"},
      {"torch-sdpa-graph", "torch-sdpa under a CUDA graph: no launch costs"},
      {"torch-sdpa-flash-graph", "torch-sdpa-flash under a CUDA graph"},
      {"torch-sdpa-cudnn-graph", "torch-sdpa-cudnn under a CUDA graph"},
      {"torch-sdpa-efficient-graph", "torch-sdpa-efficient under a CUDA graph"},
      {"annulus-torch-graph", "annulus-torch under a CUDA graph"},
      {"torch-flex", "flex_attention under torch.compile, its block mask made before"},
      {"torch-mask", "scaled_dot_product_attention with a mask of all pairs, made before"},
      {"torch-gather",
       "a branch at a time: rows copied by index, attended, copied back; LongNet's branches merged "
       "by "
       "their log-sum-exp (torchscale's way)"},
      {"torch-strided",
       "the same on strided views, which need no copy where the kernel takes them"},
      {"torch-mask-graph", "torch-mask under a CUDA graph"},
      {"torch-gather-graph", "torch-gather under a CUDA graph"},
      {"torch-strided-graph", "torch-strided under a CUDA graph"},
      {"torch-gather-compile", "torch-gather under torch.compile"},
      {"torch-strided-compile", "torch-strided under torch.compile"}}});
const SuiteRegistration single(
    {"ring-attention-single",
     "ring attention of one rank: dense, Hilbert-ordered, block-sparse: the table of the original",
     single_rows});
const SuiteRegistration memory(
    {"memory-scaling",
     "memory of attention a token, over the length, and the exponent it grows with", memory_rows});
const SuiteRegistration extreme({"extreme-sequences",
                                 "LongNet of 100 000 and a million tokens on one device",
                                 extreme_rows});

}  // namespace
}  // namespace annulus::bench
