// Scratch of a call: one block, laid out front to back by one function that both counts it and hands
// it out, so that what a workspace query says and what a call takes cannot disagree:
//
//   void Forward::lay_out(ScratchLayout& scratch) { state = scratch.take<float>(B * N); ... }
//
//   scratch_bytes([&](ScratchLayout& s) { f.lay_out(s); })                    // the query
//   Workspace block(context, op, device, [&](ScratchLayout& s) { f.lay_out(s); });  // the call
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "annulus/core/context.h"
#include "annulus/core/device.h"

namespace annulus {

class ScratchLayout {
 public:
  static constexpr std::size_t kAlignment = 256;

  // Without a base it only counts, and all pieces are nullptr.
  explicit ScratchLayout(std::byte* base = nullptr) : base_(base) {}

  // The next piece; it starts on a 256-byte boundary.
  template <class T>
  T* take(std::int64_t count) {
    T* const p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += padded(static_cast<std::size_t>(count) * sizeof(T));
    return p;
  }
  // The same for a list of members: scratch(state, B * N).
  template <class T>
  void operator()(T*& p, std::int64_t count) {
    p = take<T>(count);
  }
  std::size_t bytes() const { return bytes_; }

  static constexpr std::size_t padded(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

// Of a block that may begin at any address: room to align its first piece is counted, too.
template <class LayOut>
std::size_t scratch_bytes(LayOut&& lay_out) {
  ScratchLayout count;
  lay_out(count);
  return count.bytes() == 0 ? 0 : count.bytes() + ScratchLayout::kAlignment;
}

// One block of scratch for the length of a call. Throws DeviceError, naming the operator and the
// size, when the allocator has none. Zero bytes ask the allocator for nothing. What the allocator
// returns need not be aligned.
class Workspace {
 public:
  Workspace(Context& context, const char* op, Device device, std::size_t bytes);
  // As large as lay_out(ScratchLayout&) counts, and laid out by it. It is called twice.
  template <class LayOut>
  requires requires(LayOut& f, ScratchLayout& s) { f(s); }
  Workspace(Context& context, const char* op, Device device, LayOut&& lay_out)
      : Workspace(context, op, device, scratch_bytes(lay_out)) {
    ScratchLayout scratch(data());
    lay_out(scratch);
  }
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::byte* data() const;  // the first address in the block that is aligned

 private:
  Context& context_;
  Device device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace annulus
