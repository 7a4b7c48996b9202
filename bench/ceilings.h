// What this machine can do at most, measured on the spot, and the floor that follows for a problem.
#pragma once

#include "annulus/core/device.h"
#include "bench/record.h"

namespace annulus::bench {

struct Ceilings {
  Ceiling figures;
  double latency_ms = 0;  // an empty launch; 0 on the CPU
};

// CPU: a copy far larger than the caches on all threads, and OpenBLAS's sgemm. CUDA: a copy kernel
// and cuBLAS's bf16 GEMM. Takes a second or two.
Ceilings measure_ceilings(DeviceType device);

struct Floor {
  double ms = 0;
  FloorKind kind = FloorKind::kBandwidth;
};
// No implementation can be faster: the largest of bytes / copy, flops / gemm and the launch itself.
Floor floor_of(double bytes, double flops, const Ceilings& ceilings);

}  // namespace annulus::bench
