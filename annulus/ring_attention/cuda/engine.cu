// On CUDA messages lie twice: in the device's memory, where kernels pack and unpack rows, and where the communicator takes host
// memory in pinned memory of the host. Copies have a stream of their own, so that rows are on their way while the parts before them
// are computed; the host waits for copies alone.

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/cuda/check.h"
#include "annulus/ring_attention/cuda/rows.h"
#include "annulus/ring_attention/engine.h"
#include "annulus/ring_attention/views.h"

namespace annulus::ring::cuda {

namespace {

using namespace annulus::cuda;

constexpr const char* kOp = "ring_attention";

// To have pinned memory takes longer than many a call: what one gives back the next one has.
class PinnedPool {
 public:
  // In powers of two, so that calls of many sizes share few blocks.
  std::pair<std::byte*, std::size_t> take(std::size_t bytes) {
    bytes = std::bit_ceil(bytes);
    const std::lock_guard lock(mutex_);
    const auto found = free_.find(bytes);
    if (found != free_.end()) {
      const std::pair<std::byte*, std::size_t> block{found->second, found->first};
      free_.erase(found);
      return block;
    }
    void* p = nullptr;
    const cudaError_t error = cudaMallocHost(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      throw DeviceError("[ring_attention] out of pinned host memory: " + std::to_string(bytes) +
                        " bytes for messages");
    }
    throw_on_error(error, kOp, "cudaMallocHost");
    return {static_cast<std::byte*>(p), bytes};
  }
  void give_back(std::byte* p, std::size_t bytes) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      free_.emplace(bytes, p);
    } catch (const std::exception&) {
      (void)cudaFreeHost(p);
    }
  }

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, std::byte*> free_;
};
PinnedPool& pinned_pool() {
  static auto* const pool = new PinnedPool;  // never destroyed: CUDA may be gone before it
  return *pool;
}

class CudaEngine final : public Engine {
 public:
  explicit CudaEngine(const Plan& hop) : Engine(hop) {}
  ~CudaEngine() override {
    if (copies_ == nullptr) return;
    // What is under way writes to memory that others will have. (The default stream is that of the device at hand.)
    int device = 0;
    (void)cudaGetDevice(&device);
    (void)cudaSetDevice(hop_.device.index);
    (void)cudaStreamSynchronize(copies_);
    (void)cudaStreamSynchronize(stream_);
    (void)cudaEventDestroy(ready_);
    (void)cudaEventDestroy(used_);
    (void)cudaEventDestroy(came_);
    (void)cudaStreamDestroy(copies_);
    (void)cudaSetDevice(device);
    if (host_ != nullptr) pinned_pool().give_back(host_, host_size_);
  }

  void lay_out(ScratchLayout&) override { host_bytes_ = 0; }
  void lay_out(ScratchLayout& scratch, Message& message, std::int64_t bytes) override {
    scratch(message.here, bytes);
    message.there = host_bytes_;
    host_bytes_ += ScratchLayout::padded(static_cast<std::size_t>(bytes));
  }

  void open(Context& context, Communicator& group) override {
    context_ = &context;
    stream_ = static_cast<cudaStream_t>(context.stream);
    if (copies_ != nullptr) return;
    const DeviceGuard guard(hop_.device.index);
    ANNULUS_CUDA_CHECK(kOp, cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&ready_, &used_, &came_}) {
      ANNULUS_CUDA_CHECK(kOp, cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    if (host_bytes_ == 0 || group.sends_device_memory()) return;
    std::tie(host_, host_size_) = pinned_pool().take(host_bytes_);
  }
  void close() override {
    const DeviceGuard guard(hop_.device.index);
    ANNULUS_CUDA_CHECK(kOp, cudaStreamSynchronize(copies_));
    ANNULUS_CUDA_CHECK(kOp, cudaStreamSynchronize(stream_));
  }

  // --- attention ---
  void begin() override {
    const std::int64_t rows = hop_.B * hop_.H * hop_.Tq;
    zero(hop_.part->state, rows * static_cast<std::int64_t>(sizeof(attention::RowState)));
    clear(hop_.part->acc, floats_of(rows, hop_.Dv));
  }
  void forward() override {
    for_each_cell([&](const Plan& part) { attention::cuda::forward_part(part, *context_); });
  }
  void end() override { attention::cuda::end_parts(hop_, *context_); }
  void fill_delta() override { attention::cuda::delta_of_part(hop_, *context_); }
  void backward() override {
    for_each_cell([&](const Plan& part) { attention::cuda::backward_part(part, *context_); });
  }
  TensorView sums(float* data, std::int64_t rows, std::int64_t heads,
                  std::int64_t columns) const override {
    const std::int64_t pitch = attention::cuda::part_columns(columns);
    const std::int64_t shape[] = {hop_.B, rows, heads, columns},
                       stride[] = {rows * heads * pitch, heads * pitch, pitch, 1};
    return strided(data, DType::kF32, shape, stride, hop_.device);
  }
  std::int64_t floats_of(std::int64_t rows, std::int64_t columns) const override {
    return rows * attention::cuda::part_columns(columns);
  }
  void clear(float* sums, std::int64_t floats) override {
    zero(sums, floats * static_cast<std::int64_t>(sizeof(float)));
  }
  void store(const float* sums, const TensorView& to) override {
    attention::cuda::sums_to(hop_, sums, to, *context_);
  }

  // --- rows ---
  void start_pass() override {
    const DeviceGuard guard(hop_.device.index);
    ANNULUS_CUDA_CHECK(kOp, cudaEventRecord(ready_, stream_));
    ANNULUS_CUDA_CHECK(kOp, cudaStreamWaitEvent(copies_, ready_, 0));
    ANNULUS_CUDA_CHECK(kOp, cudaEventRecord(used_, stream_));
    // Who writes to the device's memory by itself knows no stream: whatever had that memory before is done.
    if (host_ == nullptr) ANNULUS_CUDA_CHECK(kOp, cudaEventSynchronize(ready_));
  }
  void pack(std::span<const TensorView> from, std::int64_t first, const Rows& rows,
            std::span<const Message> to, Origin origin) override {
    const DeviceGuard guard(hop_.device.index);
    if (origin == Origin::kSums) {
      ANNULUS_CUDA_CHECK(kOp, cudaEventRecord(ready_, stream_));
      ANNULUS_CUDA_CHECK(kOp, cudaStreamWaitEvent(copies_, ready_, 0));
    }
    // Rows that stay are packed where those before them are read.
    if (origin == Origin::kStay) ANNULUS_CUDA_CHECK(kOp, cudaStreamWaitEvent(copies_, used_, 0));
    const std::vector<RowLine> lines = lines_of(rows);
    for (std::size_t i = 0; i < to.size(); ++i) {
      move_rows(kOp, Move::kPack, from[i], first, lines, to[i].here, copies_);
      if (origin == Origin::kStay || host_ == nullptr) continue;
      ANNULUS_CUDA_CHECK(kOp, cudaMemcpyAsync(memory(to[i]), to[i].here, bytes_of(from[i], rows),
                                              cudaMemcpyDeviceToHost, copies_));
    }
  }
  void unpack(std::span<const Message> from, const Rows& rows, Range piece,
              std::span<const TensorView> to, std::int64_t first, bool stayed) override {
    const DeviceGuard guard(hop_.device.index);
    bring(from, to, rows, stayed);
    const std::vector<RowLine> lines = lines_of(rows);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const TensorView& x = to[i];
      const auto element = static_cast<std::size_t>(size_of(x.dtype));
      if (count_of(rows) != piece.count() * x.shape[2]) {
        ANNULUS_CUDA_CHECK(
            kOp, cudaMemset2DAsync(x.data, static_cast<std::size_t>(x.stride[2]) * element, 0,
                                   static_cast<std::size_t>(piece.count() * x.shape[3]) * element,
                                   static_cast<std::size_t>(hop_.B * x.shape[2]), stream_));
      }
      move_rows(kOp, Move::kUnpack, x, first, lines, from[i].here, stream_);
    }
    ANNULUS_CUDA_CHECK(kOp, cudaEventRecord(used_, stream_));
  }
  void add(std::span<const Message> from, const Rows& rows, std::span<const TensorView> to,
           std::int64_t first) override {
    const DeviceGuard guard(hop_.device.index);
    bring(from, to, rows, false);
    const std::vector<RowLine> lines = lines_of(rows);
    for (std::size_t i = 0; i < from.size(); ++i) {
      move_rows(kOp, Move::kAdd, to[i], first, lines, from[i].here, stream_);
    }
    ANNULUS_CUDA_CHECK(kOp, cudaEventRecord(used_, stream_));
  }
  void settle() override {
    ANNULUS_CUDA_CHECK(kOp, cudaStreamSynchronize(copies_));
    if (host_ == nullptr) ANNULUS_CUDA_CHECK(kOp, cudaEventSynchronize(used_));
  }
  std::byte* memory(const Message& message) const override {
    return host_ == nullptr ? message.here : host_ + message.there;
  }
  void move_up(const TensorView& x, std::int64_t from, std::int64_t count) override {
    const DeviceGuard guard(hop_.device.index);
    move_rows_up(kOp, x, from, count, stream_);
  }
  void copy_lanes(const TensorView& from, float* to) override {
    const DeviceGuard guard(hop_.device.index);
    const auto width = static_cast<std::size_t>(from.shape[1]) * sizeof(float);
    ANNULUS_CUDA_CHECK(
        kOp, cudaMemcpy2DAsync(to, width, from.data,
                               static_cast<std::size_t>(from.stride[2]) * sizeof(float), width,
                               static_cast<std::size_t>(hop_.B * from.shape[2]),
                               cudaMemcpyDeviceToDevice, stream_));
  }

 private:
  void zero(void* p, std::int64_t bytes) {
    if (bytes == 0) return;
    const DeviceGuard guard(hop_.device.index);
    ANNULUS_CUDA_CHECK(kOp, cudaMemsetAsync(p, 0, static_cast<std::size_t>(bytes), stream_));
  }
  std::size_t bytes_of(const TensorView& x, const Rows& rows) const {
    return static_cast<std::size_t>(hop_.B * count_of(rows) * x.shape[3] * size_of(x.dtype));
  }
  // Messages into the device's memory, when those before them have been read there; the kernels that follow wait for them.
  void bring(std::span<const Message> messages, std::span<const TensorView> of, const Rows& rows,
             bool stayed) {
    ANNULUS_CUDA_CHECK(kOp, cudaStreamWaitEvent(copies_, used_, 0));
    for (std::size_t i = 0; i < messages.size() && !stayed && host_ != nullptr; ++i) {
      ANNULUS_CUDA_CHECK(
          kOp, cudaMemcpyAsync(messages[i].here, memory(messages[i]), bytes_of(of[i], rows),
                               cudaMemcpyHostToDevice, copies_));
    }
    ANNULUS_CUDA_CHECK(kOp, cudaEventRecord(came_, copies_));
    ANNULUS_CUDA_CHECK(kOp, cudaStreamWaitEvent(stream_, came_, 0));
  }
  // Of a deterministic call, the cells of the rows that come, one after the other: keys where dq or o is made, queries where dk is.
  template <class F>
  void for_each_cell(F&& f) {
    if (!hop_.part->fixed) return f(hop_);
    constexpr std::int64_t kCell = attention::cuda::kPartCell;
    const bool of_queries = hop_.part->dk != nullptr;
    const std::int64_t first = of_queries ? hop_.part->first_query : hop_.part->first_key,
                       end = first + (of_queries ? hop_.Tq : hop_.Tk);
    for (std::int64_t at = first; at < end;) {
      const std::int64_t next = std::min(end, (at / kCell + 1) * kCell);
      Plan part = hop_;
      (of_queries ? part.Tq : part.Tk) = next - at;
      (of_queries ? part.part->first_query : part.part->first_key) = at;
      if (of_queries) {
        part.q = narrow(hop_.q, 1, at - first, next - at);
        part.do_ = narrow(hop_.do_, 1, at - first, next - at);
        part.lse = narrow(hop_.lse, 2, at - first, next - at);
        part.part->delta += at - first;
        part.part->delta_rows = hop_.Tq;
      } else {
        part.k = narrow(hop_.k, 1, at - first, next - at);
        part.v = narrow(hop_.v, 1, at - first, next - at);
      }
      f(part);
      at = next;
    }
  }

  Context* context_ = nullptr;
  cudaStream_t stream_ = nullptr, copies_ = nullptr;
  // Inputs and sums are there; messages in the device's memory have been read; and have come.
  cudaEvent_t ready_ = nullptr, used_ = nullptr, came_ = nullptr;
  std::size_t host_bytes_ = 0, host_size_ = 0;
  std::byte* host_ = nullptr;
};

}  // namespace

void check_stream(const char* op, Device device, const Context& context) {
  const DeviceGuard guard(device.index);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ANNULUS_CUDA_CHECK(op, cudaStreamIsCapturing(static_cast<cudaStream_t>(context.stream), &status));
  if (status == cudaStreamCaptureStatusNone) return;
  throw NotSupported(std::string("[") + op +
                     "] must not be captured in a CUDA graph: its ranks wait for each other on the "
                     "host");
}

std::unique_ptr<Engine> make_engine(const Plan& hop) { return std::make_unique<CudaEngine>(hop); }

}  // namespace annulus::ring::cuda
