// The problems of attention, for tests, checks, fuzzing and benchmarks: dense and packed ones are of the operator
// "attention", the others of "dilated_attention" and "block_sparse_attention".
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "annulus/attention/attention.h"
#include "testing/case.h"

namespace annulus::testing {

struct AttentionProblem {
  enum class Form { kDense, kVarlen, kDilated, kBlocks } form = Form::kDense;
  std::int64_t B = 1, Tq = 1, Tk = 1, H = 1, Hkv = 1, D = 1, Dv = 1;
  DType dtype = DType::kF32;
  bool causal = false;
  std::optional<double> scale = {};
  double dropout = 0;
  bool deterministic = false, portable = false;  // Context's

  // Dense.
  std::int64_t window_left = -1, window_right = -1;
  std::vector<std::int64_t> key_lengths = {};  // one a sample; none: all keys
  bool order = false;                          // of blocks, too: a permutation drawn from the seed
  // Varlen: the lengths of the sequences; Tq and Tk are their sums, and B is 1.
  std::vector<std::int64_t> query_lengths = {}, packed_key_lengths = {};

  // Dilated.
  std::vector<std::int64_t> segments = {}, rates = {};
  DilatedMode mode = DilatedMode::kLongNet;
  DilatedOffsets offsets = DilatedOffsets::kMod;
  bool unite = false, stop_alpha_gradient = false, remainder_last = false;

  // Blocks: which there are is drawn from the seed, so many of them; 1: all.
  std::int64_t block_size = 64;
  double density = 0.5;
  bool shared_list = false;  // by all heads

  bool lse = true;  // without it there is no backward
  bool dlse = false;
  bool need_dq = true, need_dkv = true;
  bool wide_integers = true;  // i64; i32 otherwise
  double q_size = 1;          // of its values, which are normal
  // A value that is no number, in one row of the last head of the last sample.
  enum class Special : std::uint8_t {
    kNone,
    kNanQ,
    kNanK,
    kNanV,
    kInfinityV,
    kNanDo,
    kInfinityDo,
    kInfinityQ,
    kInfinityK,
  } special = Special::kNone;
  std::uint64_t seed = 0;
};

// The same, with the sums of a packed problem's lengths.
AttentionProblem attention_totals(AttentionProblem problem);

// calls: "forward" (o, lse) and "backward" (do, dlse; dq, dk, dv as asked). Inputs are named as in the header.
Case attention_case(AttentionProblem problem);

// Weights of P that the mathematics asks for, over all heads: pairs of a query and a key that it sees, as often as it sees it.
double attention_pairs(const AttentionProblem& problem);

// How much a problem proves, by its definition: shares of what has nothing to do.
struct AttentionCensus {
  std::int64_t queries = 0, empty_queries = 0;  // of all heads; those without a key,
  std::int64_t single_queries = 0;              // and with one, whose softmax is a constant
  std::int64_t keys = 0, unseen_keys = 0;
  double pairs = 0;
};
AttentionCensus attention_census(const AttentionProblem& problem);

// A random problem of each operator.
AttentionProblem drawn_attention(std::uint64_t seed);
AttentionProblem drawn_dilated_attention(std::uint64_t seed);
AttentionProblem drawn_block_sparse_attention(std::uint64_t seed);

std::vector<BadCall> attention_bad_calls(Device device);
std::vector<BadCall> dilated_attention_bad_calls(Device device);
std::vector<BadCall> block_sparse_attention_bad_calls(Device device);

}  // namespace annulus::testing
