// The tables that started the suites of attention, as published by dilated-attention-pytorch: one GTX 1080 (8 GB), fp16 tensors,
// forward, not causal, H = 8, D = 64. Plain data.
//
// What stands beside them was counted from its source: the work it did, what its own definition asks for, and the share of its
// output rows that are zeros. A row of zeros takes no time, so no time of this table means anything without it.
#pragma once

#include <array>

namespace annulus::bench {

inline constexpr const char* kAttentionOriginalHardware = "GTX 1080";

// "Comprehensive Ring Attention Benchmark": B = 1; segments 512, 1024 and rates 1, 2 up to n = 2048, then 1024, 2048, 4096 and
// 1, 2, 4.
struct RingOriginalRow {
  int n;
  double ms, gb;            // as published; gb: peak of the allocator
  double executed, needed;  // GFLOP
  double zero_rows;
};
struct RingOriginalClass {
  const char* name;
  const char* computes;  // here
  const char* did;       // there
  int ranks;             // here; there they were simulated
  std::array<RingOriginalRow, 4> rows;
};

// clang-format off
inline constexpr std::array<RingOriginalClass, 6> kRingOriginalClasses = {{
{"ImprovedDilated", "grouped, remainder to the first groups",
 "softmax over the heads of each token instead of over tokens, rows outside the branch zero, all divided by the number of groups", 1, {{
  {1024,  6.97, 0.017,  0.0063, 0.805, 0.25},
  {2048, 13.78, 0.025,  0.0126, 1.611, 0.25},
  {4096, 27.90, 0.042,  0.0152, 5.369, 0.375},
  {8192, 57.90, 0.078,  0.0304, 10.74, 0.375}}}},
{"RingDilatedV2", "grouped_kv, remainder to the last groups",
 "every key repeated as often as its rate, scores in memory, sums in fp16", 1, {{
  {1024,  1.44, 0.030,  1.611, 1.074, 0},
  {2048,  2.36, 0.054,  3.221, 2.147, 0},
  {4096, 15.60, 0.222,  21.47, 8.590, 0},
  {8192, 52.50, 0.440,  42.95, 17.18, 0}}}},
{"RingDilatedV2_Ring4", "grouped_kv, remainder to the last groups",
 "four chunks that never meet: no ring, and another function than with one rank", 4, {{
  {1024,   1.89, 0.015, 0.537, 0.403, 0},
  {2048,   1.88, 0.024, 2.147, 1.611, 0},
  {4096,   9.52, 0.043, 8.590, 4.563, 0},
  {8192, 118.17, 0.101, 30.07, 13.96, 0}}}},
{"Production_NoCP", "grouped, remainder to the last groups",
 "queries and keys repeated as often as their rate; groups whose segment exceeds n left out", 1, {{
  {1024,  1.51, 0.032,  1.611, 0.805, 0.25},
  {2048,  2.52, 0.056,  3.221, 1.611, 0.25},
  {4096, 49.98, 0.228,  21.47, 4.563, 0.46875},
  {8192, 69.18, 0.448,  42.95, 9.127, 0.46875}}}},
{"Production_CP", "grouped, remainder to the last groups",
 "the same with checkpoints, which a forward without gradients does not have", 1, {{
  {1024,  1.70, 0.032,  1.611, 0.805, 0.25},
  {2048,  3.21, 0.057,  3.221, 1.611, 0.25},
  {4096, 31.46, 0.231,  21.47, 4.563, 0.46875},
  {8192, 43.92, 0.454,  42.95, 9.127, 0.46875}}}},
{"Production_Ring4", "grouped, remainder to the last groups",
 "four chunks that never meet, and groups whose segment exceeds a chunk left out: all of them at n = 1024", 4, {{
  {1024,   0.30, 0.014, 0,     0,     1},
  {2048,   1.97, 0.025, 1.074, 1.074, 0.5},
  {4096,   2.76, 0.044, 2.147, 2.147, 0.75},
  {8192, 167.79, 0.117, 17.18, 7.516, 0.5625}}}},
}};

// "Ring Attention Benchmark Summary", throughput: B = 2, tokens a second of the best at each length, which is all that it states.
struct SingleOriginalRow {
  const char* name;
  int n;
  double tokens_per_s;
};
inline constexpr std::array<SingleOriginalRow, 3> kSingleOriginal = {{
  {"Hilbert", 1024, 304971},
  {"Distributed", 2048, 120516},
  {"Standard", 4096, 21416}}};

// The same page, memory: B = 1, KB a token at 512 tokens. The first that was measured paid for the workspace of
// cuBLAS, 16.25 KB a token, which is all of the difference between Standard and Hilbert.
struct MemoryOriginalRow {
  const char* name;
  double kb_per_token;
};
inline constexpr int kMemoryOriginalTokens = 512;
inline constexpr std::array<MemoryOriginalRow, 3> kMemoryOriginal = {{
  {"Hilbert", 21.031}, {"BlockSparse", 21.531}, {"Standard", 37.281}}};

// The same page: "estimated 298GB for 100K tokens", one matrix of scores in fp32 a head.
inline constexpr int kExtremeOriginalTokens = 100'000;
inline constexpr double kExtremeOriginalGb = 298;
// clang-format on

}  // namespace annulus::bench
