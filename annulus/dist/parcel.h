// A parcel: the parts of a shift as one block of device memory of ours, behind a message of message.h whose payload says
// what they are. Its memory, and the copies from and to the caller's buffers. Only for files compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "annulus/dist/communicator.h"
#include "annulus/dist/message.h"

namespace annulus::dist {

// Streams and memory of one rank. The memory comes from a pool, since cudaMalloc and cudaFree may wait for all that the
// device does, and that may wait for a lost rank.
class Staging {
 public:
  explicit Staging(int device);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  int device() const { return device_; }
  cudaStream_t transfers() const { return transfers_; }

  std::byte* take(std::size_t bytes);
  void give(std::byte* memory) noexcept;
  // From and to memory of any kind. Begun; finish() waits for what was begun, and for take(), but for no other rank.
  void copy(void* to, const void* from, std::size_t bytes);
  void finish();

 private:
  void make_pool();
  void release() noexcept;

  int device_;
  cudaStream_t copies_ = nullptr, transfers_ = nullptr;
  cudaMemPool_t pool_ = nullptr;
};

struct ToStaging {
  std::shared_ptr<Staging> staging;
  void operator()(std::byte* memory) const noexcept { staging->give(memory); }
};
struct Block {
  std::unique_ptr<std::byte, ToStaging> memory;
  std::size_t bytes = 0;
  std::byte* at(std::size_t offset) const { return memory.get() + offset; }
};
Block take(const std::shared_ptr<Staging>& staging, std::size_t bytes);

class Event {
 public:
  Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  void record(cudaStream_t stream);
  bool passed() const;

 private:
  cudaEvent_t event_ = nullptr;
};

constexpr std::size_t kFront = 256;  // bytes before the first part

// What is sent, complete when it returns. With `checksum` the parts are summed, on the host.
Block packed(const std::shared_ptr<Staging>& staging, Header header, std::span<const Part> parts,
             bool checksum);
// Room for what comes.
Block room_for(const std::shared_ptr<Staging>& staging, std::span<const Part> parts);
// Copies what came to the receive buffers, where it is what `due` (op, hop, ranks, sequence, agreement) and the parts say;
// else says why it is not, and copies nothing.
std::string unpack(Staging& staging, const Block& block, Header due, std::span<const Part> parts,
                   bool checksum);

}  // namespace annulus::dist
