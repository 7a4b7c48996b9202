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
  void* data = memory_.data();
  if (whole.device != kCPU && whole.numel() > 0) {
    on_device_ = Buffer(whole.device, memory_.size());
    data = on_device_.data();
    std::int64_t highest = 0;
    for (std::size_t a = 0; a < shape.size(); ++a) {
      const std::int64_t reach = (whole.shape[a] - 1) * whole.stride[a];
      (reach < 0 ? lowest_ : highest) += reach;
    }
    copy_.resize(static_cast<std::size_t>((highest - lowest_ + 1) * size_of(whole.dtype)));
  }
  view_ = contiguous(data, whole.dtype, shape, whole.device);
}

// f(element of the whole, element of the shard), both on the host.
template <class F>
void TensorShard::each(F&& f) {
  const auto rank = static_cast<std::size_t>(view_.rank);
  std::array<std::int64_t, kMaxRank> at = {};
  const std::int64_t size = size_of(view_.dtype);
  char* const whole =
      copy_.empty() ? static_cast<char*>(whole_.data) : copy_.data() - lowest_ * size;
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
    f(whole + there * size, memory_.data() + i * size, static_cast<std::size_t>(size));
    for (std::size_t a = rank; a-- > 0 && ++at[a] == view_.shape[a];) at[a] = 0;
  }
}

// The whole, from its device or to it.
void TensorShard::copy_whole(bool to_host) {
  if (copy_.empty()) return;
  synchronize(whole_.device);
  char* const there = static_cast<char*>(whole_.data) + lowest_ * size_of(whole_.dtype);
  if (to_host) return copy_bytes(copy_.data(), kCPU, there, whole_.device, copy_.size());
  copy_bytes(there, whole_.device, copy_.data(), kCPU, copy_.size());
}

void TensorShard::cut() {
  if (!view_.defined() || view_.numel() == 0) return;
  copy_whole(true);
  each([](char* whole, char* own, std::size_t n) { std::memcpy(own, whole, n); });
  if (!copy_.empty()) {
    copy_bytes(view_.data, view_.device, memory_.data(), kCPU, memory_.size());
  }
}
void TensorShard::join() {
  if (!view_.defined() || view_.numel() == 0) return;
  copy_whole(true);  // there may be others between its elements
  if (!copy_.empty()) {
    copy_bytes(memory_.data(), kCPU, view_.data, view_.device, memory_.size());
  }
  each([](char* whole, char* own, std::size_t n) { std::memcpy(whole, own, n); });
  copy_whole(false);
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
    const std::vector<char> zeros(static_cast<std::size_t>(v.numel() * size_of(v.dtype)));
    copy_bytes(v.data, v.device, zeros.data(), kCPU, zeros.size());
  }
}

}  // namespace annulus::testing
