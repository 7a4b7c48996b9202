// What a device does for a rank of a ring: parts of attention, and rows on their way into messages and out of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "annulus/core/scratch.h"
#include "annulus/core/tensor.h"
#include "annulus/dist/communicator.h"
#include "annulus/ring_attention/rows.h"

namespace annulus::ring {

// A buffer of rows one behind the other, (b, head, row), in the device's memory, and where it is in the communicator's if that
// has memory of its own.
struct Message {
  std::byte* here = nullptr;
  std::size_t there = 0;
};

// Where rows that are packed come from: inputs, which have been there since the pass began; sums, which may still be in the
// making; or inputs that stay on this rank, and go through a message like those of others.
enum class Origin : std::uint8_t { kInputs, kSums, kStay };

class Engine {
 public:
  // `hop`: the plan of the part at hand, which every call reads anew.
  explicit Engine(const Plan& hop) : hop_(hop) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  virtual void lay_out(ScratchLayout& scratch) = 0;
  virtual void lay_out(ScratchLayout& scratch, Message& message, std::int64_t bytes) = 0;
  // Around everything below: close() returns when all of it is done.
  virtual void open(Context& context, Communicator& group) = 0;
  virtual void close() = 0;

  // --- attention, of the part of `hop` ---
  virtual void begin() = 0;  // its state and acc: nothing was seen
  virtual void forward() = 0;
  virtual void end() = 0;         // its o and lse
  virtual void fill_delta() = 0;  // <do, o> - dlse
  virtual void backward() = 0;
  // Sums in fp32 as the device has them, as (B, rows, heads, columns); floats they take; zeros in them; and rounded.
  virtual TensorView sums(float* data, std::int64_t rows, std::int64_t heads,
                          std::int64_t columns) const = 0;
  virtual std::int64_t floats_of(std::int64_t rows, std::int64_t columns) const = 0;
  virtual void clear(float* sums, std::int64_t floats) = 0;
  virtual void store(const float* sums, const TensorView& to) = 0;

  // --- rows on their way; row 0 of a tensor is row `first` of the sequence ---
  virtual void start_pass() {}
  virtual void pack(std::span<const TensorView> from, std::int64_t first, const Rows& rows,
                    std::span<const Message> to, Origin origin) = 0;
  // stayed: they were packed with kStay. Rows of `piece` that do not come become zeros.
  virtual void unpack(std::span<const Message> from, const Rows& rows, Range piece,
                      std::span<const TensorView> to, std::int64_t first, bool stayed) = 0;
  virtual void add(std::span<const Message> from, const Rows& rows, std::span<const TensorView> to,
                   std::int64_t first) = 0;
  // What was packed is in the communicator's memory, and what was unpacked or added is no longer needed there.
  virtual void settle() {}
  virtual std::byte* memory(const Message& message) const = 0;  // the communicator's
  // Rows of (B, rows, heads, columns) from row `from` on become the first.
  virtual void move_up(const TensorView& x, std::int64_t from, std::int64_t count) = 0;
  // (B, rows, H, 1) as (B, H, rows), one behind the other.
  virtual void copy_lanes(const TensorView& from, float* to) = 0;

 protected:
  const Plan& hop_;
};

// f(head, line, where the line begins among the rows of the message)
template <class F>
void for_each_line(const Rows& rows, F&& f) {
  std::int64_t at = 0;
  for (std::size_t h = 0; h < rows.size(); ++h) {
    for (const Line& line : rows[h]) {
      f(static_cast<std::int64_t>(h), line, at);
      at += line.count;
    }
  }
}

// This rank's call comes to nothing, which the others have to know; they do where it was lost. Where all ranks refuse, each for
// its own reason, nothing is lost.
void refuse(Communicator& group, const char* op, const std::exception& why);

// Ranks wait for each other on the host: a CUDA stream whose work is being captured is refused.
void check_stream(const char* op, Device device, const Context& context);

namespace cpu {
std::unique_ptr<Engine> make_engine(const Plan& hop, bool backward);
}
namespace cuda {
std::unique_ptr<Engine> make_engine(const Plan& hop);
void check_stream(const char* op, Device device, const Context& context);
// NaN everywhere.
void poison(const TensorView& v, Context& context);
// The numbers of a tensor, with its strides from the returned address on, in `memory`.
TensorView on_host(const TensorView& v, std::vector<std::byte>& memory, Context& context);
}  // namespace cuda

// Of the plan's device. Of a backward where `backward`, and of a forward where not.
std::unique_ptr<Engine> make_engine(const Plan& hop, bool backward);

// Rows that deterministic parts have together: no cell is ever divided.
std::int64_t cell_of(const Plan& plan, Side side);

}  // namespace annulus::ring
