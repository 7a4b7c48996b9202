// The table that started the suite `ring-rnn`, as published: forward only, relu, B = 256, T = 20,
// fp32 tensors, milliseconds, on an RTX PRO 6000 Blackwell. Plain data: 12 rows of four columns.
#pragma once

#include <array>

namespace annulus::bench {

inline constexpr const char* kRingSeedHardware = "RTX PRO 6000 Blackwell";
inline constexpr int kRingSeedB = 256, kRingSeedT = 20;
// The source's names; its two kernels multiply in fp32 and, on tensor cores, in fp16.
inline constexpr std::array<const char*, 4> kRingSeedColumns = {"torch.sum", "torch.matmul", "CUDA",
                                                                "CUDA WMMA"};

struct RingSeedRow {
  int N;
  int K;
  std::array<double, 4> ms;  // 0: "OOM" or "N/A" in the source
};

inline constexpr std::array<RingSeedRow, 12> kRingSeed = {{
    {128, 16, {9.438, 2.234, 0.372, 0.282}},
    {256, 16, {32.742, 2.846, 0.897, 0.595}},
    {384, 16, {73.732, 8.607, 1.755, 1.269}},
    {512, 16, {130.132, 16.066, 2.795, 1.772}},
    {1024, 16, {755.812, 61.446, 10.172, 6.163}},
    {2048, 16, {3027.348, 241.135, 46.110, 24.455}},
    {2048, 32, {0, 244.381, 76.646, 36.741}},
    {2048, 64, {0, 251.123, 139.247, 62.792}},
    {1024, 2, {116.973, 59.912, 10.112, 0}},
    {1024, 3, {145.126, 59.974, 10.129, 0}},
    {1024, 6, {231.524, 60.584, 10.744, 0}},
    {1024, 12, {553.342, 61.159, 10.549, 0}},
}};

}  // namespace annulus::bench
