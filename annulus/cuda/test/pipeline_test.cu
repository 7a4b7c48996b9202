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

// --- copies by threads that do not wait for them -----------------------------------------------------------------

constexpr int kCopiers = 64, kReaders = 64;
constexpr int kCopies = 4;                            // of 16 bytes, by a thread and round
constexpr int kCopiedWords = kCopiers * kCopies * 4;  // of a stage

enum class Arrive { kWhenCopied, kAtOnce };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Whether the phase is over within a tenth of a second or so: a test of arrivals that do not come must end.
__device__ bool is_over(SharedBarrier& barrier, unsigned parity) {
  for (int i = 0; i < 1 << 20; ++i) {
    unsigned done;
    asm volatile(
        "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p;}"
        : "=r"(done)
        : "r"(shared_address(&barrier.word)), "r"(parity)
        : "memory");
    if (done != 0) return true;
  }
  return false;
}
#endif

// The first threads copy, the others read: every word that is not its round's counts as wrong.
__global__ void copied_kernel(const uint4* from, int rounds, int stages, Arrive arrive,
                              unsigned* wrong, unsigned* stuck) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned words[];  // [stage][kCopiedWords], barriers
  const Pipeline ring(words + stages * kCopiedWords, stages);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < stages * kCopiedWords; i += kCopiers + kReaders) words[i] = ~0u;
  if (thread == 0) {
    ring.init(stages, kCopiers, kReaders);
    fence_barriers();
  }
  __syncthreads();
  if (thread < kCopiers) {
    PipelineStage to = Pipeline::producer();
    for (int round = 0; round < rounds; ++round, to.next(stages)) {
      if (!is_over(ring.empty[to.at], to.parity)) {
        atomicAdd(stuck, 1u);
        break;
      }
      // A phase that does not count every thread is over without this one's.
      if ((round + thread) % 61 == 0) __nanosleep(1000);
      for (int i = thread; i < kCopiers * kCopies; i += kCopiers) {
        copy_async_16(words + to.at * kCopiedWords + 4 * i, from + round * kCopiers * kCopies + i);
      }
      if (arrive == Arrive::kWhenCopied) {
        ring.full[to.at].arrive_when_copied();
      } else {
        ring.full[to.at].arrive();
      }
    }
    copy_async_wait_all();
    return;
  }
  PipelineStage at;
  for (int round = 0; round < rounds; ++round, at.next(stages)) {
    if (!is_over(ring.full[at.at], at.parity)) {
      atomicAdd(stuck, 1u);
      return;
    }
    unsigned own = 0;
    for (int i = thread - kCopiers; i < kCopiedWords; i += kReaders) {
      own += words[at.at * kCopiedWords + i] != static_cast<unsigned>(round * kCopiedWords + i);
    }
    if (own > 0) atomicAdd(wrong, own);
    ring.release(at.at);
  }
#else
  __trap();
#endif
}

// Arrivals at once are what arrive_when_copied() must not be: that they are found shows that the words tell.
TEST_F(CudaPipeline, ArrivesWhenThreadsHaveCopied) {
  constexpr int kRounds = 301;
  std::vector<unsigned> words(kRounds * kCopiedWords);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<unsigned>(i);
  const DeviceArray<unsigned> from(words);
  for (const Arrive arrive : {Arrive::kWhenCopied, Arrive::kAtOnce}) {
    for (const int stages : {1, 2, 5}) {
      const DeviceArray<unsigned> wrong(1), stuck(1);
      copied_kernel<<<1, kCopiers + kReaders,
                      stages * kCopiedWords * 4 + Pipeline::bytes(stages)>>>(
          reinterpret_cast<const uint4*>(from.get()), kRounds, stages, arrive, wrong.get(),
          stuck.get());
      finish();
      EXPECT_EQ(stuck.values()[0], 0u) << stages << " stages";
      if (arrive == Arrive::kWhenCopied) {
        EXPECT_EQ(wrong.values()[0], 0u) << stages << " stages";
      } else {
        EXPECT_GT(wrong.values()[0], 0u) << stages << " stages";
      }
    }
  }
}

// --- barriers of some warps --------------------------------------------------------------------------------------

constexpr int kGroups = 3, kGroupThreads = 64;

// Whether a thread of a group says so: in turn none, one, all of every other group, one of one group.
__device__ bool votes(int round, int group, int thread) {
  const bool chosen = thread == (round * 7 + group * 5) % kGroupThreads;
  switch (round % 4) {
    case 0:
      return false;
    case 1:
      return chosen;
    case 2:
      return (round / 4 + group) % 2 == 0;
    default:
      return chosen && group == round / 4 % kGroups;
  }
}
__device__ bool any_votes(int round, int group) {
  bool any = false;
  for (int i = 0; i < kGroupThreads; ++i) any = any || votes(round, group, i);
  return any;
}

// Every group on a barrier of its own. `wrong`: threads that heard other than what their group said; `early`: those that went on
// before the others of the group had come.
__global__ void votes_kernel(int rounds, unsigned* wrong, unsigned* early) {
  __shared__ int came[kGroups][kGroupThreads];
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  came[group][thread] = -1;
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const bool expected = any_votes(round, group);
    if ((round + static_cast<int>(threadIdx.x) / 32) % 5 == 0) __nanosleep(1000);
    came[group][thread] = round;
    const bool any = sync_threads_or(1 + group, kGroupThreads, votes(round, group, thread));
    const int other = came[group][kGroupThreads - 1 - thread];  // of the other warp
    if (any != expected) atomicAdd(wrong, 1u);
    if (other != round) atomicAdd(early, 1u);
    sync_threads(1 + group, kGroupThreads);
  }
}

using CudaNamedBarrier = DeviceTest;

TEST_F(CudaNamedBarrier, SaysWhetherAnyThreadOfTheGroupSaysSo) {
  const DeviceArray<unsigned> wrong(1), early(1);
  votes_kernel<<<2, kGroups * kGroupThreads>>>(400, wrong.get(), early.get());
  finish();
  EXPECT_EQ(wrong.values()[0], 0u);
  EXPECT_EQ(early.values()[0], 0u);
}

}  // namespace
}  // namespace annulus::testing
