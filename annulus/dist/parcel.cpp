#include "annulus/dist/parcel.h"

#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "annulus/cuda/check.h"

namespace annulus::dist {

namespace {

void check(cudaError_t error, const char* what) {
  cuda::throw_on_error(error, "communicator", what);
}

// The payload of the message.
struct Manifest {
  std::uint64_t parts = 0;
  std::uint64_t bytes = 0;
  std::uint64_t sizes = 0;   // XXH64 of the sizes
  std::uint64_t summed = 0;  // 1 where the next is there
  std::uint64_t sum = 0;     // XXH64 of the XXH64s of the parts
};
static_assert(sizeof(Header) + sizeof(Manifest) <= kFront);

constexpr std::size_t kAlign = 256;  // where parts begin
std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

using Size = std::size_t Part::*;

std::size_t bytes_of(std::span<const Part> parts, Size size) {
  std::size_t bytes = kFront;
  for (const Part& part : parts) bytes += aligned(part.*size);
  return bytes;
}

Manifest manifest_of(std::span<const Part> parts, Size size) {
  std::vector<std::uint64_t> sizes;
  Manifest manifest;
  for (const Part& part : parts) {
    sizes.push_back(part.*size);
    manifest.bytes += part.*size;
  }
  manifest.parts = parts.size();
  manifest.sizes = xxh64(std::as_bytes(std::span(sizes)));
  return manifest;
}

// Of what lies in the block, not of the caller's buffers: what travels is what was summed.
std::uint64_t sum_of(Staging& staging, const Block& block, std::span<const Part> parts, Size size) {
  std::vector<std::uint64_t> sums;
  std::size_t offset = kFront;
  for (const Part& part : parts) {
    std::vector<std::byte> here(part.*size);
    staging.copy(here.data(), block.at(offset), here.size());
    staging.finish();
    sums.push_back(xxh64(here));
    offset += aligned(here.size());
  }
  return xxh64(std::as_bytes(std::span(sums)));
}

}  // namespace

// --- memory ---

Staging::Staging(int device) : device_(device) {
  const cuda::DeviceGuard guard(device_);
  try {
    int least = 0, most = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange");
    for (cudaStream_t* stream : {&copies_, &transfers_}) {
      check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, most),
            "cudaStreamCreateWithPriority");
    }
    make_pool();
  } catch (...) {
    release();
    throw;
  }
}
Staging::~Staging() { release(); }

void Staging::make_pool() {
  cudaMemPoolProps what = {};
  what.allocType = cudaMemAllocationTypePinned;
  what.location.type = cudaMemLocationTypeDevice;
  what.location.id = device_;
  check(cudaMemPoolCreate(&pool_, &what), "cudaMemPoolCreate");
  std::uint64_t all = std::numeric_limits<std::uint64_t>::max();  // kept for the next shift
  check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &all),
        "cudaMemPoolSetAttribute");
  // Between ranks that are threads NCCL writes right into the other's memory, which a pool does not allow by itself.
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  for (int other = 0; other < devices; ++other) {
    int can = 0;
    if (other == device_) continue;
    check(cudaDeviceCanAccessPeer(&can, other, device_), "cudaDeviceCanAccessPeer");
    if (can == 0) continue;
    cudaMemAccessDesc access = {};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = other;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    check(cudaMemPoolSetAccess(pool_, &access, 1), "cudaMemPoolSetAccess");
  }
}

void Staging::release() noexcept {
  if (pool_ != nullptr) (void)cudaMemPoolDestroy(pool_);
  for (cudaStream_t stream : {copies_, transfers_}) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
}

std::byte* Staging::take(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMallocFromPoolAsync(&memory, bytes, pool_, copies_), "cudaMallocFromPoolAsync");
  return static_cast<std::byte*>(memory);
}
void Staging::give(std::byte* memory) noexcept { (void)cudaFreeAsync(memory, copies_); }

void Staging::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, copies_), "cudaMemcpyAsync");
}
void Staging::finish() { check(cudaStreamSynchronize(copies_), "cudaStreamSynchronize"); }

Block take(const std::shared_ptr<Staging>& staging, std::size_t bytes) {
  return {{staging->take(bytes), ToStaging{staging}}, bytes};
}

Event::Event() {
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}
Event::~Event() { (void)cudaEventDestroy(event_); }
void Event::record(cudaStream_t stream) {
  check(cudaEventRecord(event_, stream), "cudaEventRecord");
}
bool Event::passed() const {
  const cudaError_t state = cudaEventQuery(event_);
  if (state == cudaErrorNotReady) return false;
  check(state, "a transfer");
  return true;
}

// --- parcels ---

Block packed(const std::shared_ptr<Staging>& staging, Header header, std::span<const Part> parts,
             bool checksum) {
  Block block = take(staging, bytes_of(parts, &Part::send_bytes));
  std::size_t offset = kFront;
  for (const Part& part : parts) {
    staging->copy(block.at(offset), part.send, part.send_bytes);
    offset += aligned(part.send_bytes);
  }
  Manifest manifest = manifest_of(parts, &Part::send_bytes);
  if (checksum) {
    manifest.summed = 1;
    manifest.sum = sum_of(*staging, block, parts, &Part::send_bytes);
  }
  const Message message = make_message(header, std::as_bytes(std::span(&manifest, 1)), true);
  std::array<std::byte, kFront> front{};
  std::memcpy(front.data(), message.bytes().data(), message.bytes().size());
  staging->copy(block.at(0), front.data(), front.size());
  staging->finish();
  return block;
}

Block room_for(const std::shared_ptr<Staging>& staging, std::span<const Part> parts) {
  return take(staging, bytes_of(parts, &Part::receive_bytes));
}

std::string unpack(Staging& staging, const Block& block, Header due, std::span<const Part> parts,
                   bool checksum) {
  Message message(sizeof(Manifest));
  staging.copy(message.bytes().data(), block.at(0), message.bytes().size());
  staging.finish();
  due.bytes = sizeof(Manifest);
  due.has_sum = 1;
  const std::string wrong = why_not(message, due);
  if (!wrong.empty()) return wrong;
  Manifest came;
  std::memcpy(&came, message.payload().data(), sizeof came);
  const Manifest expected = manifest_of(parts, &Part::receive_bytes);
  if (came.parts != expected.parts || came.bytes != expected.bytes) {
    return "it sent " + std::to_string(came.bytes) + " bytes in " + std::to_string(came.parts) +
           " parts where " + std::to_string(expected.bytes) + " in " +
           std::to_string(expected.parts) + " were due";
  }
  if (came.sizes != expected.sizes) return "its parts have other sizes than were due";
  if (checksum &&
      (came.summed == 0 || came.sum != sum_of(staging, block, parts, &Part::receive_bytes))) {
    return "the payload of its message is damaged (checksum)";
  }
  std::size_t offset = kFront;
  for (const Part& part : parts) {
    staging.copy(part.receive, block.at(offset), part.receive_bytes);
    offset += aligned(part.receive_bytes);
  }
  staging.finish();
  return "";
}

}  // namespace annulus::dist
