// The ring of stages: what consumers find in a stage is what the producer of that round put there.
#include "annulus/cuda/pipeline.cuh"

#include <vector>

#include "annulus/cuda/tma.cuh"
#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

constexpr int kWords = 64;  // of a stage

enum class Fill { kBulk, kStores };

// Warps 0 .. consumers - 1 consume, the last one produces. Every consumer counts the words that are
// not those of its round, and adds up what it read.
__global__ void ring_kernel(const unsigned* from, int rounds, int stages, int consumers, Fill fill,
                            bool by_warp, unsigned* wrong, unsigned long long* sums) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned words[];  // [stage][kWords], barriers
  const Pipeline ring(words + stages * kWords, stages);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    ring.init(stages, fill == Fill::kBulk ? 1 : 32,
              static_cast<unsigned>(by_warp ? consumers : consumers * 32));
    fence_barriers();
  }
  __syncthreads();
  if (warp == consumers) {
    PipelineStage to = Pipeline::producer();
    for (int round = 0; round < rounds; ++round, to.next(stages)) {
      unsigned* const stage = words + to.at * kWords;
      if (fill == Fill::kBulk) {
        if (lane != 0) continue;
        ring.acquire(to);
        ring.expect(to, kWords * 4);
        copy_bulk(stage, from + round * kWords, kWords * 2, ring.full + to.at);
        copy_bulk(stage + kWords / 2, from + round * kWords + kWords / 2, kWords * 2,
                  ring.full + to.at, read_once());
      } else {
        ring.acquire(to);
        for (int i = lane; i < kWords; i += 32) stage[i] = from[round * kWords + i];
        ring.commit(to);
      }
    }
    return;
  }
  PipelineStage at;
  unsigned long long sum = 0;
  for (int round = 0; round < rounds; ++round, at.next(stages)) {
    if (round % (warp + 2) == 0) __nanosleep(200);  // consumers drift apart
    ring.wait(at);
    for (int i = lane; i < kWords; i += 32) {
      const unsigned word = words[at.at * kWords + i];
      if (word != static_cast<unsigned>(round * kWords + i)) atomicAdd(wrong, 1u);
      sum += word;
    }
    if (by_warp) {
      ring.release_by_warp(at.at);
    } else {
      ring.release(at.at);
    }
  }
  atomicAdd(sums + warp, sum);
#else
  __trap();
#endif
}

using CudaPipeline = HopperTest;

TEST_F(CudaPipeline, ConsumersSeeEveryRoundOnce) {
  constexpr int kRounds = 501;
  std::vector<unsigned> words(kRounds * kWords);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<unsigned>(i);
  const unsigned long long total = 1ull * words.size() * (words.size() - 1) / 2;
  const DeviceArray<unsigned> from(words);
  for (const Fill fill : {Fill::kBulk, Fill::kStores}) {
    for (const bool by_warp : {false, true}) {
      for (const int stages : {1, 2, 3, 5, 7, 12}) {
        for (const int consumers : {1, 3, 4}) {
          const DeviceArray<unsigned> wrong(1);
          const DeviceArray<unsigned long long> sums(consumers);
          ring_kernel<<<1, (consumers + 1) * 32, stages * kWords * 4 + Pipeline::bytes(stages)>>>(
              from.get(), kRounds, stages, consumers, fill, by_warp, wrong.get(), sums.get());
          finish();
          EXPECT_EQ(wrong.values()[0], 0u) << stages << " stages, " << consumers << " consumers";
          for (const unsigned long long sum : sums.values()) EXPECT_EQ(sum, total);
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
