#include "testing/memory/memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/cuda/memory.h"

#if ANNULUS_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "annulus/cuda/check.h"
#endif

namespace annulus::testing {

namespace {

using Kind = TestMemory::Kind;

#if ANNULUS_HAVE_CUDA
// nullptr where there is no room.
void* allocate_pinned(std::size_t bytes) {
  void* p = nullptr;
  const cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  cuda::throw_on_error(error, "memory", "cudaHostAlloc");
  return p;
}
void free_pinned(void* p) noexcept { (void)cudaFreeHost(p); }
void copy_queued(void* to, const void* from, std::size_t bytes) {
  cuda::throw_on_error(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, nullptr), "memory",
                       "cudaMemcpyAsync");
}
#else
void* allocate_pinned(std::size_t) {
  throw NotSupported("[memory] device must be cpu: this build has no CUDA backend");
}
void free_pinned(void*) noexcept {}
void copy_queued(void* to, const void* from, std::size_t bytes) { cuda::copy(to, from, bytes); }
#endif

void* allocate_of(Kind kind, int device, std::size_t bytes) {
  return kind == Kind::kHost ? allocate_pinned(bytes) : cuda::allocate(bytes, device);
}
void free_of(Kind kind, int device, void* p) noexcept {
  if (kind == Kind::kHost) {
    free_pinned(p);
  } else {
    cuda::free(p, device);
  }
}

// The pieces of CUDA that nobody has now.
class Store {
 public:
  std::byte* take(Kind kind, Device device, std::size_t bytes) {
    const std::size_t size = size_of_piece(kind, bytes);
    Piece piece = find(kind, device.index, size);
    if (piece.data == nullptr) {
      piece.data = allocate_of(kind, device.index, size);
      if (piece.data == nullptr) {
        drop_all();
        piece.data = allocate_of(kind, device.index, size);
      }
      if (piece.data == nullptr) {
        throw DeviceError("[memory] could not allocate " + std::to_string(bytes) + " bytes on " +
                          to_string(device));
      }
    } else if (kind == Kind::kHost) {
      finish(
          device,
          piece.ticket);  // a copy may still be reading it; who writes now is no part of the stream
    }
    return static_cast<std::byte*>(piece.data);
  }

  void give_back(Kind kind, Device device, std::size_t bytes, void* data) noexcept {
    const std::size_t size = size_of_piece(kind, bytes);
    try {
      const std::lock_guard lock(mutex_);
      std::size_t& kept = kept_bytes_[static_cast<std::size_t>(kind)];
      if (!(exact_ && kind == Kind::kDevice) && size <= kLargest && kept + size <= kMostKept) {
        kept_[{kind, device.index, size}].push_back({data, queued_});
        kept += size;
        return;
      }
    } catch (const std::bad_alloc&) {  // of the list: then it is not kept
    }
    try {
      finish(device);
    } catch (const std::exception&) {  // a fault of the device, which who asks next is told
    }
    free_of(kind, device.index, data);
  }

  // Before any piece is taken: those that are out have the size of their time.
  void allocate_exactly() {
    drop_all();
    exact_ = true;
  }

  Ticket queue(void* to, const void* from, std::size_t bytes) {
    copy_queued(to, from, bytes);
    return ++queued_;
  }
  void finish(Device device) {
    const Ticket all = queued_;
    cuda::synchronize(device.index);
    Ticket before = done_;
    while (before < all && !done_.compare_exchange_weak(before, all)) {
    }
  }
  void finish(Device device, Ticket ticket) {
    if (ticket > done_) finish(device);
  }

 private:
  struct Piece {
    void* data = nullptr;
    Ticket ticket = 0;  // the last copy that may have to do with it
  };
  static constexpr std::size_t kSmallest = 4096, kLargest = std::size_t{64} << 20,
                               kMostKept = std::size_t{256} << 20;  // of a kind

  std::size_t size_of_piece(Kind kind, std::size_t bytes) const {
    if ((exact_ && kind == Kind::kDevice) || bytes > kLargest) return bytes;
    return std::max(kSmallest, std::bit_ceil(bytes));
  }

  Piece find(Kind kind, int device, std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto found = kept_.find({kind, device, size});
    if (found == kept_.end() || found->second.empty()) return {};
    const Piece piece = found->second.back();
    found->second.pop_back();
    kept_bytes_[static_cast<std::size_t>(kind)] -= size;
    return piece;
  }

  void drop_all() {
    const std::lock_guard lock(mutex_);
    for (auto& [key, pieces] : kept_) {
      const auto& [kind, device, size] = key;
      if (!pieces.empty()) finish({DeviceType::kCUDA, device});
      for (const Piece& p : pieces) free_of(kind, device, p.data);
    }
    kept_.clear();
    kept_bytes_[0] = kept_bytes_[1] = 0;
  }

  std::mutex mutex_;
  std::map<std::tuple<Kind, int, std::size_t>, std::vector<Piece>> kept_;
  std::size_t kept_bytes_[2] = {};
  std::atomic<Ticket> queued_ = 0, done_ = 0;
  bool exact_ = false;
};

// Never destroyed: CUDA may be gone before static variables are.
Store& store() {
  static Store& s = *new Store;
  return s;
}

}  // namespace

TestMemory::TestMemory(Device device, Kind kind, std::size_t bytes)
    : device_(device), kind_(kind), bytes_(bytes) {
  if (bytes == 0) return;
  if (device.type == DeviceType::kCPU) {
    own_ = Buffer(kCPU, bytes);
    data_ = static_cast<std::byte*>(own_.data());
  } else {
    data_ = store().take(kind, device, bytes);
  }
}

TestMemory::~TestMemory() {
  if (data_ == nullptr || device_.type == DeviceType::kCPU) return;
  store().give_back(kind_, device_, bytes_, data_);
}

Ticket queue_copy(Device device, void* to, const void* from, std::size_t bytes) {
  if (device.type == DeviceType::kCUDA) return store().queue(to, from, bytes);
  copy_bytes(to, kCPU, from, kCPU, bytes);
  return 0;
}

void finish(Device device) {
  if (device.type == DeviceType::kCUDA) store().finish(device);
}

void finish(Device device, Ticket ticket) {
  if (device.type == DeviceType::kCUDA) store().finish(device, ticket);
}

void allocate_exactly() { store().allocate_exactly(); }

}  // namespace annulus::testing
