#include "annulus/core/backend.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "annulus/cpu/features.h"

namespace annulus {

namespace {

// An operator's slot, once taken, is its own; more operators than slots would go unrecorded.
struct Slot {
  std::atomic<const char*> op{nullptr};
  std::atomic<const char*> how{nullptr};
  std::atomic<DeviceType> device{DeviceType::kCPU};
};
constexpr int kSlots = 64;
Slot slots[kSlots];

Slot* slot_of(const char* op) {
  for (Slot& s : slots) {
    const char* taken = s.op.load(std::memory_order_acquire);
    if (taken == nullptr && s.op.compare_exchange_strong(taken, op, std::memory_order_acq_rel)) {
      return &s;
    }
    if (std::string_view(taken) == op) return &s;
  }
  return nullptr;
}

std::string text_of(DeviceType device, const char* how) {
  return std::string(device == DeviceType::kCPU ? "cpu, " : "cuda, ") + how;
}

bool logs() {
  static const bool asked = [] {
    const char* text = std::getenv("ANNULUS_LOG");
    return text != nullptr && std::string_view(text) == "1";
  }();
  return asked;
}

}  // namespace

void ran_on(const char* op, DeviceType device, const char* how) {
  Slot* const s = slot_of(op);
  if (s == nullptr) return;
  const DeviceType device_before = s->device.exchange(device, std::memory_order_relaxed);
  const char* const how_before = s->how.exchange(how, std::memory_order_acq_rel);
  if (logs() && (how_before != how || device_before != device)) {
    std::fprintf(stderr, "annulus: %s runs on %s\n", op, text_of(device, how).c_str());
  }
}

void ran_on(const char* op, DeviceType device) {
  static const std::string* const cpu = new std::string(cpu::simd_description());  // never freed
  ran_on(op, device, device == DeviceType::kCPU ? cpu->c_str() : "ordinary cores");
}

std::vector<std::pair<std::string, std::string>> last_backends() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Slot& s : slots) {
    const char* const op = s.op.load(std::memory_order_acquire);
    const char* const how = s.how.load(std::memory_order_acquire);
    if (op != nullptr && how != nullptr) {
      all.emplace_back(op, text_of(s.device.load(std::memory_order_relaxed), how));
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::string last_backend(std::string_view op) {
  for (auto& [name, backend] : last_backends()) {
    if (name == op) return backend;
  }
  return {};
}

}  // namespace annulus
