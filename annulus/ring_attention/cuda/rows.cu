#include "annulus/ring_attention/cuda/rows.h"

#include <algorithm>
#include <cstring>

#include "annulus/cuda/check.h"
#include "annulus/cuda/memory.h"

namespace annulus::ring::cuda {

namespace {

using namespace annulus::cuda;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr std::size_t kMostLines = 48;  // of a launch: they are its arguments

// Strides are in units of what is moved at once.
struct MoveArgs {
  RowLine line[kMostLines];
  std::int64_t batch, row, head, column, first;
  std::int64_t B, all, units;  // rows of a message's batch, and units of a row
  void *x, *message;
};

// A warp a row: of line blockIdx.y.
template <class Unit, Move kMove>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveArgs a) {
  const RowLine& line = a.line[blockIdx.y];
  const std::int64_t rows = a.B * line.rows.count;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < rows;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t b = i / line.rows.count, r = i - b * line.rows.count;
    Unit* const x = static_cast<Unit*>(a.x) + b * a.batch + (line.rows.at(r) - a.first) * a.row +
                    line.head * a.head;
    Unit* const message = static_cast<Unit*>(a.message) + (b * a.all + line.at + r) * a.units;
    for (std::int64_t c = threadIdx.x % 32; c < a.units; c += 32) {
      if constexpr (kMove == Move::kPack) {
        message[c] = x[c * a.column];
      } else if constexpr (kMove == Move::kUnpack) {
        x[c * a.column] = message[c];
      } else {
        x[c * a.column] += message[c];
      }
    }
  }
}

template <class Unit, Move kMove>
void launch_move(const char* op, MoveArgs a, const std::vector<RowLine>& lines,
                 cudaStream_t stream) {
  for (std::size_t from = 0; from < lines.size(); from += kMostLines) {
    const std::size_t count = std::min(kMostLines, lines.size() - from);
    std::int64_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      a.line[i] = lines[from + i];
      most = std::max(most, a.line[i].rows.count);
    }
    if (most == 0) continue;
    const std::int64_t blocks = std::min<std::int64_t>((a.B * most + kWarps - 1) / kWarps, 1024);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
    move_kernel<Unit, kMove><<<grid, kThreads, 0, stream>>>(a);
    check_launch(op, "move_kernel");
  }
}

template <class Unit>
void launch_move(const char* op, Move move, const MoveArgs& a, const std::vector<RowLine>& lines,
                 cudaStream_t stream) {
  if (move == Move::kPack) return launch_move<Unit, Move::kPack>(op, a, lines, stream);
  launch_move<Unit, Move::kUnpack>(op, a, lines, stream);
}

// A block a head. Ascending, so that rows which lie over each other are read before they are written.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    move_up_kernel(Unit* x, std::int64_t batch, std::int64_t head, std::int64_t from,
                   std::int64_t units) {
  Unit* const to = x + blockIdx.y * batch + blockIdx.x * head;
  for (std::int64_t i = 0; i < units; i += kThreads) {
    const std::int64_t own = i + threadIdx.x;
    Unit v{};
    if (own < units) v = to[from + own];
    __syncthreads();
    if (own < units) to[own] = v;
    __syncthreads();
  }
}

struct FillArgs {
  void* data;
  std::int64_t shape[4], stride[4];
};
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(const __grid_constant__ FillArgs a, Unit value) {
  const std::int64_t all = a.shape[0] * a.shape[1] * a.shape[2] * a.shape[3];
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
       i += std::int64_t{gridDim.x} * kThreads) {
    std::int64_t left = i, at = 0;
    for (int axis = 3; axis >= 0; --axis) {
      at += left % a.shape[axis] * a.stride[axis];
      left /= a.shape[axis];
    }
    static_cast<Unit*>(a.data)[at] = value;
  }
}

}  // namespace

void move_rows(const char* op, Move move, const TensorView& x, std::int64_t first,
               const std::vector<RowLine>& lines, std::byte* message, cudaStream_t stream) {
  if (lines.empty() || x.shape[0] == 0 || x.shape[3] == 0) return;
  MoveArgs a{};
  a.batch = x.stride[0];
  a.row = x.stride[1];
  a.head = x.stride[2];
  a.column = x.stride[3];
  a.first = first;
  a.B = x.shape[0];
  a.units = x.shape[3];
  for (const RowLine& line : lines) a.all += line.rows.count;
  a.x = x.data;
  a.message = message;
  if (move == Move::kAdd) return launch_move<float, Move::kAdd>(op, a, lines, stream);
  // 16 bytes at a time where rows allow it.
  const std::int64_t width = 16 / size_of(x.dtype);
  const bool whole = (a.column == 1 || a.units == 1) && a.units % width == 0 &&
                     a.batch % width == 0 && a.row % width == 0 && a.head % width == 0 &&
                     reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  if (whole) {
    a.batch /= width;
    a.row /= width;
    a.head /= width;
    a.units /= width;
    a.column = 1;
    launch_move<uint4>(op, move, a, lines, stream);
  } else if (size_of(x.dtype) == 2) {
    launch_move<std::uint16_t>(op, move, a, lines, stream);
  } else {
    launch_move<std::uint32_t>(op, move, a, lines, stream);
  }
}

void move_rows_up(const char* op, const TensorView& x, std::int64_t from, std::int64_t count,
                  cudaStream_t stream) {
  const std::int64_t row = x.shape[3];
  const dim3 grid(static_cast<unsigned>(x.shape[2]), static_cast<unsigned>(x.shape[0]));
  if (x.shape[0] * x.shape[2] * count * row == 0) return;
  const auto launch = [&]<class Unit>() {
    move_up_kernel<<<grid, kThreads, 0, stream>>>(static_cast<Unit*>(x.data), x.stride[0],
                                                  x.stride[2], from * row, count * row);
    check_launch(op, "move_up_kernel");
  };
  if (size_of(x.dtype) == 2) return launch.template operator()<std::uint16_t>();
  launch.template operator()<std::uint32_t>();
}

void poison(const TensorView& v, Context& context) {
  if (v.numel() == 0) return;
  const DeviceGuard guard(v.device.index);
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  FillArgs a{v.data, {1, 1, 1, 1}, {}};
  for (int i = 0; i < v.rank; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    a.shape[i] = v.shape[axis];
    a.stride[i] = v.stride[axis];
  }
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>((v.numel() + kThreads - 1) / kThreads, 4096));
  if (size_of(v.dtype) == 2) {  // a NaN of f16 and of bf16
    fill_kernel<std::uint16_t><<<blocks, kThreads, 0, stream>>>(a, 0x7fff);
  } else {
    fill_kernel<std::uint32_t><<<blocks, kThreads, 0, stream>>>(a, 0x7fffffff);
  }
  check_launch("ring_attention", "fill_kernel");
  ANNULUS_CUDA_CHECK("ring_attention", cudaStreamSynchronize(stream));
}

TensorView on_host(const TensorView& v, std::vector<std::byte>& memory, Context& context) {
  TensorView host = v;
  host.device = kCPU;
  if (v.numel() == 0) return host;
  std::int64_t low = 0, high = 0;
  for (std::size_t i = 0; i < v.sizes().size(); ++i) {
    const std::int64_t reach = (v.shape[i] - 1) * v.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const DeviceGuard guard(v.device.index);
  const std::int64_t element = size_of(v.dtype);
  memory.resize(static_cast<std::size_t>((high - low + 1) * element));
  ANNULUS_CUDA_CHECK("ring_attention",
                     cudaStreamSynchronize(static_cast<cudaStream_t>(context.stream)));
  copy(memory.data(), static_cast<const std::byte*>(v.data) + low * element, memory.size());
  host.data = memory.data() - low * element;
  return host;
}

}  // namespace annulus::ring::cuda
