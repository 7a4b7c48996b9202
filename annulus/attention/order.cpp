// The Hilbert curve of a cube of side 2^k, by Hamilton's rules (the curve of every dimension from Gray codes): a cell of
// side s is cut into 2^n of side s / 2, visited in the order of the Gray code, each turned so that its way in lies beside the
// way out of the one before. A cell outside the grid is left out with all that is in it, so the time is that of the cells
// there are, times the levels above them.

#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "annulus/attention/attention.h"
#include "annulus/core/operator.h"

namespace annulus {

namespace {

constexpr std::int64_t kMostAxes = 3;

class Curve {
 public:
  Curve(std::span<const std::int64_t> shape, const TensorView& order)
      : axes_(static_cast<unsigned>(shape.size())), order_(order) {
    for (std::size_t i = 0; i < shape.size(); ++i) size_[i] = shape[i];
  }

  // All of the smallest cube that holds the grid.
  void walk() {
    std::int64_t longest = 1;
    for (unsigned i = 0; i < axes_; ++i) longest = longest < size_[i] ? size_[i] : longest;
    visit({}, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(longest))), 0, 0);
  }

 private:
  using Cell = std::array<std::int64_t, kMostAxes>;

  // Bits of a corner are axes: rotated by so many of them.
  unsigned rotated(unsigned corner, unsigned by) const {
    const unsigned mask = (1u << axes_) - 1;
    return ((corner << by) | (corner >> (axes_ - by))) & mask;
  }

  // The curve enters a cell at the corner `entry` and leaves it along the axis `direction`.
  void visit(const Cell& first, std::int64_t side, unsigned entry, unsigned direction) {
    for (unsigned i = 0; i < axes_; ++i) {
      if (first[i] >= size_[i]) return;
    }
    if (side == 1) {
      std::int64_t number = 0;
      for (unsigned i = 0; i < axes_; ++i) number = number * size_[i] + first[i];
      static_cast<std::int64_t*>(order_.data)[next_++ * order_.stride[0]] = number;
      return;
    }
    for (unsigned w = 0; w < 1u << axes_; ++w) {
      const unsigned corner = rotated(w ^ (w >> 1), (direction + 1) % axes_) ^ entry;
      Cell part = first;
      for (unsigned i = 0; i < axes_; ++i) part[i] += corner >> i & 1 ? side / 2 : 0;
      visit(part, side / 2, entry ^ rotated(entry_of(w), (direction + 1) % axes_),
            (direction + turn_of(w) + 1) % axes_);
    }
  }
  // Of the w-th part, before the turn of the whole.
  static unsigned entry_of(unsigned w) {
    if (w == 0) return 0;
    const unsigned even = 2 * ((w - 1) / 2);
    return even ^ (even >> 1);
  }
  unsigned turn_of(unsigned w) const {
    if (w == 0) return 0;
    const unsigned odd = w % 2 == 0 ? w - 1 : w;
    return static_cast<unsigned>(std::countr_one(odd)) % axes_;
  }

  unsigned axes_;
  std::array<std::int64_t, kMostAxes> size_{};
  TensorView order_;
  std::int64_t next_ = 0;
};

}  // namespace

void hilbert_order(std::span<const std::int64_t> shape, const TensorView& order) {
  constexpr const char* op = "hilbert_order";
  if (shape.empty() || shape.size() > static_cast<std::size_t>(kMostAxes)) {
    invalid(op, "shape", "have 1 to 3 axes", "has " + std::to_string(shape.size()));
  }
  std::int64_t cells = 1;
  for (const std::int64_t n : shape) {
    if (n < 0 || __builtin_mul_overflow(cells, n, &cells)) {
      invalid(op, "shape", "have sizes of at least 0 and a product below 2^63",
              "is " + shape_string(shape));
    }
  }
  Arguments list(op);
  list.output("order", order, {DType::kI64}, {cells});
  const Context context;
  list.check(context);
  if (order.device.type != DeviceType::kCPU) {
    invalid(op, "order", "be on the CPU", "is not");
  }
  if (cells > 0) Curve(shape, order).walk();
}

}  // namespace annulus
