// Rows of tensors into messages and out of them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "annulus/core/tensor.h"
#include "annulus/ring_attention/engine.h"

namespace annulus::ring::cuda {

// Rows of a head, and where they begin among those of a message.
struct RowLine {
  Line rows;
  std::int64_t head, at;
};
inline std::vector<RowLine> lines_of(const Rows& rows) {
  std::vector<RowLine> lines;
  for_each_line(rows, [&](std::int64_t head, const Line& line, std::int64_t at) {
    lines.push_back({line, head, at});
  });
  return lines;
}

enum class Move : std::uint8_t { kPack, kUnpack, kAdd };  // kAdd: fp32 to fp32

// x (B, rows, heads, columns), whose row 0 is row `first` of the sequence; a message has (b, row of all lines).
void move_rows(const char* op, Move move, const TensorView& x, std::int64_t first,
               const std::vector<RowLine>& lines, std::byte* message, cudaStream_t stream);
// Rows from `from` on become the first; `count` of them, dense within a head.
void move_rows_up(const char* op, const TensorView& x, std::int64_t from, std::int64_t count,
                  cudaStream_t stream);

}  // namespace annulus::ring::cuda
