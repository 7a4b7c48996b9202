// On the CPU rows are copied where they are, and messages are the communicator's.

#include <algorithm>
#include <cstring>
#include <optional>

#include "annulus/attention/cpu/backward.h"
#include "annulus/attention/cpu/forward.h"
#include "annulus/cpu/rows.h"
#include "annulus/ring_attention/engine.h"

namespace annulus::ring::cpu {

namespace {

std::byte* row_of(const TensorView& x, std::int64_t b, std::int64_t row, std::int64_t head) {
  return static_cast<std::byte*>(x.data) +
         (b * x.stride[0] + row * x.stride[1] + head * x.stride[2]) * size_of(x.dtype);
}
std::size_t row_bytes(const TensorView& x) {
  return static_cast<std::size_t>(x.shape[3] * size_of(x.dtype));
}
bool is_dense(const TensorView& x) { return x.stride[3] == 1 || x.shape[3] == 1; }

class CpuEngine final : public Engine {
 public:
  CpuEngine(const Plan& hop, bool backward) : Engine(hop) {
    if (backward) {
      backward_.emplace(hop);
    } else {
      forward_.emplace(hop);
    }
  }

  void lay_out(ScratchLayout& scratch) override {
    forward_ ? forward_->lay_out(scratch) : backward_->lay_out(scratch);
  }
  void lay_out(ScratchLayout& scratch, Message& message, std::int64_t bytes) override {
    scratch(message.here, bytes);
  }
  void open(Context& context, Communicator&) override { context_ = &context; }
  void close() override {}

  void begin() override { forward_->begin(); }
  void forward() override { forward_->run(*context_); }
  void end() override { forward_->end(*context_); }
  void fill_delta() override { backward_->fill_delta(*context_); }
  void backward() override { backward_->run(*context_); }

  TensorView sums(float* data, std::int64_t rows, std::int64_t heads,
                  std::int64_t columns) const override {
    const std::int64_t shape[] = {hop_.B, rows, heads, columns},
                       stride[] = {heads * rows * columns, columns, rows * columns, 1};
    return strided(data, DType::kF32, shape, stride);
  }
  std::int64_t floats_of(std::int64_t rows, std::int64_t columns) const override {
    return rows * columns;
  }
  void clear(float* sums, std::int64_t floats) override { std::fill_n(sums, floats, 0.0f); }
  void store(const float* sums, const TensorView& to) override {
    const std::int64_t rows = to.shape[1], heads = to.shape[2], columns = to.shape[3];
    for (std::int64_t b = 0; b < to.shape[0]; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t t = 0; t < rows; ++t) {
          annulus::cpu::rows<float>().store(sums + ((b * heads + h) * rows + t) * columns, columns,
                                            annulus::cpu::row_at(to, b, t, h));
        }
      }
    }
  }

  void pack(std::span<const TensorView> from, std::int64_t first, const Rows& rows,
            std::span<const Message> to, Origin) override {
    const std::int64_t all = count_of(rows);
    for (std::size_t i = 0; i < to.size(); ++i) {
      const TensorView& x = from[i];
      const auto element = static_cast<std::size_t>(size_of(x.dtype));
      for (std::int64_t b = 0; b < hop_.B; ++b) {
        for_each_line(rows, [&](std::int64_t h, const Line& line, std::int64_t at) {
          std::byte* out = to[i].here + static_cast<std::size_t>(b * all + at) * row_bytes(x);
          for (std::int64_t r = 0; r < line.count; ++r, out += row_bytes(x)) {
            const std::byte* row = row_of(x, b, line.at(r) - first, h);
            if (is_dense(x)) {
              std::memcpy(out, row, row_bytes(x));
              continue;
            }
            for (std::int64_t c = 0; c < x.shape[3]; ++c) {
              std::memcpy(out + static_cast<std::size_t>(c) * element,
                          row + c * x.stride[3] * size_of(x.dtype), element);
            }
          }
        });
      }
    }
  }

  void unpack(std::span<const Message> from, const Rows& rows, Range piece,
              std::span<const TensorView> to, std::int64_t first, bool) override {
    const std::int64_t all = count_of(rows);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const TensorView& x = to[i];
      const std::size_t bytes = row_bytes(x);
      for (std::int64_t b = 0; b < hop_.B; ++b) {
        for (std::int64_t h = 0; h < x.shape[2]; ++h) {
          if (count_of(rows[static_cast<std::size_t>(h)]) == piece.count()) continue;
          std::memset(row_of(x, b, piece.first - first, h), 0,
                      static_cast<std::size_t>(piece.count()) * bytes);
        }
        for_each_line(rows, [&](std::int64_t h, const Line& line, std::int64_t at) {
          const std::byte* in = from[i].here + static_cast<std::size_t>(b * all + at) * bytes;
          if (line.step == 1) {
            std::memcpy(row_of(x, b, line.first - first, h), in,
                        static_cast<std::size_t>(line.count) * bytes);
            return;
          }
          for (std::int64_t r = 0; r < line.count; ++r, in += bytes) {
            std::memcpy(row_of(x, b, line.at(r) - first, h), in, bytes);
          }
        });
      }
    }
  }

  void add(std::span<const Message> from, const Rows& rows, std::span<const TensorView> to,
           std::int64_t first) override {
    const std::int64_t all = count_of(rows);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const std::int64_t columns = to[i].shape[3];
      for (std::int64_t b = 0; b < hop_.B; ++b) {
        for_each_line(rows, [&](std::int64_t h, const Line& line, std::int64_t at) {
          const auto* in = reinterpret_cast<const float*>(from[i].here) + (b * all + at) * columns;
          for (std::int64_t r = 0; r < line.count; ++r, in += columns) {
            auto* sum = reinterpret_cast<float*>(row_of(to[i], b, line.at(r) - first, h));
            for (std::int64_t c = 0; c < columns; ++c) sum[c] += in[c];
          }
        });
      }
    }
  }

  std::byte* memory(const Message& message) const override { return message.here; }
  void move_up(const TensorView& x, std::int64_t from, std::int64_t count) override {
    for (std::int64_t b = 0; b < hop_.B; ++b) {
      for (std::int64_t h = 0; h < x.shape[2]; ++h) {
        std::memmove(row_of(x, b, 0, h), row_of(x, b, from, h),
                     static_cast<std::size_t>(count) * row_bytes(x));
      }
    }
  }
  void copy_lanes(const TensorView& from, float* to) override {
    const std::int64_t rows = from.shape[1], heads = from.shape[2];
    for (std::int64_t b = 0; b < hop_.B; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        std::memcpy(to + (b * heads + h) * rows, row_of(from, b, 0, h),
                    static_cast<std::size_t>(rows) * sizeof(float));
      }
    }
  }

 private:
  Context* context_ = nullptr;
  std::optional<attention::cpu::Forward> forward_;
  std::optional<attention::cpu::Backward> backward_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(const Plan& hop, bool backward) {
  return std::make_unique<CpuEngine>(hop, backward);
}

}  // namespace annulus::ring::cpu
