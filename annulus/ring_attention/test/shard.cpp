#include "annulus/ring_attention/test/shard.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace annulus::testing {

TensorShard::TensorShard(const RingProblem& p, int rank, const TensorView& whole, std::size_t axis)
    : whole_(whole), axis_(axis), chunks_(ring_shard(p.attention.Tq, p.ranks, rank, p.balance)) {
  if (!whole.defined()) return;
  std::vector<std::int64_t> shape(whole.sizes().begin(), whole.sizes().end());
  shape[axis] = chunks_[0].count() + chunks_[1].count();
  std::int64_t numel = 1;
  for (const std::int64_t s : shape) numel *= s;
  memory_.resize(static_cast<std::size_t>(numel * size_of(whole.dtype)));
  view_ = contiguous(memory_.data(), whole.dtype, shape);
}

// f(element of the whole, element of the shard)
template <class F>
void TensorShard::each(F&& f) {
  if (!view_.defined() || view_.numel() == 0) return;
  const auto rank = static_cast<std::size_t>(view_.rank);
  std::array<std::int64_t, kMaxRank> at = {};
  const auto size = static_cast<std::size_t>(size_of(view_.dtype));
  for (std::int64_t i = 0; i < view_.numel(); ++i) {
    std::int64_t there = 0;
    for (std::size_t a = 0; a < rank; ++a) {
      std::int64_t index = at[a];
      if (a == axis_) {
        const std::int64_t first = chunks_[0].count();
        index += index < first ? chunks_[0].first : chunks_[1].first - first;
      }
      there += index * whole_.stride[a];
    }
    f(static_cast<char*>(whole_.data) + there * static_cast<std::int64_t>(size),
      memory_.data() + static_cast<std::size_t>(i) * size, size);
    for (std::size_t a = rank; a-- > 0 && ++at[a] == view_.shape[a];) at[a] = 0;
  }
}

void TensorShard::cut() {
  each([](char* whole, char* own, std::size_t n) { std::memcpy(own, whole, n); });
}
void TensorShard::join() {
  each([](char* whole, char* own, std::size_t n) { std::memcpy(whole, own, n); });
}

namespace {

using T = RingTensors;
bool of_forward(TensorView T::*member) { return member == &T::o || member == &T::lse; }
bool of_backward(TensorView T::*member) {
  return member == &T::dq || member == &T::dk || member == &T::dv;
}

}  // namespace

RingShard::RingShard(const RingProblem& p, int rank, const RingTensors& whole) : view_(whole) {
  for (const auto member :
       {&T::q, &T::k, &T::v, &T::o, &T::lse, &T::do_, &T::dlse, &T::dq, &T::dk, &T::dv}) {
    const bool lanes = member == &T::lse || member == &T::dlse;
    all_.emplace_back(member, TensorShard(p, rank, whole.*member, lanes ? 2 : 1));
    all_.back().second.cut();
    view_.*member = all_.back().second.view();
  }
}

void RingShard::join(bool backward) {
  for (auto& [member, shard] : all_) {
    if (backward ? of_backward(member) : of_forward(member)) shard.join();
  }
}

void RingShard::clear_outputs() {
  for (auto& [member, shard] : all_) {
    const TensorView& v = shard.view();
    if (!(of_forward(member) || of_backward(member)) || v.numel() == 0) continue;
    std::memset(v.data, 0, static_cast<std::size_t>(v.numel() * size_of(v.dtype)));
  }
}

}  // namespace annulus::testing
