// Barriers of co-resident blocks, and the launches that make them so.
#include "annulus/cuda/persistent.cuh"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

// Every block writes the round into its slot, waits, and looks at the slots of its group: between
// two barriers none may be of another round. Only the first half of the threads takes part where
// `half`.
__global__ void rounds_kernel(unsigned* counters, GroupedGrid grid, int rounds, bool half,
                              volatile int* slots, int* wrong) {
  const unsigned group = blockIdx.x / grid.members, member = blockIdx.x % grid.members;
  GroupBarrier barrier(counters + group * GroupBarrier::kStride, grid.members);
  if (half && threadIdx.x >= blockDim.x / 2) return;
  const auto wait = [&] {
    if (half) {
      barrier.wait([] { asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x / 2) : "memory"); });
    } else {
      barrier.wait();
    }
  };
  for (int round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 1) slots[blockIdx.x] = round;
    wait();
    for (unsigned m = threadIdx.x; m < grid.members; m += blockDim.x) {
      if (slots[group * grid.members + m] != round) atomicAdd(wrong, 1);
    }
    wait();
    if (member == 0 && threadIdx.x == 0) __nanosleep(300);  // blocks come at different times
  }
}

using CudaPersistent = DeviceTest;

TEST_F(CudaPersistent, NobodyIsARoundAhead) {
  const int resident = co_resident_blocks(rounds_kernel, 128, 0);
  ASSERT_GT(resident, 1);
  for (const bool half : {false, true}) {
    for (const std::int64_t columns : {1, 3, 7, resident}) {
      const GroupedGrid grid = grouped_grid(1000, columns, resident, 64);
      const DeviceArray<unsigned> counters(64 * GroupBarrier::kStride);
      const DeviceArray<int> slots(grid.blocks()), wrong(1);
      ASSERT_TRUE(launch_together("test", "rounds", rounds_kernel, grid.blocks(), 128, 0, nullptr,
                                  counters.get(), grid, 200, half, slots.get(), wrong.get()));
      finish();
      EXPECT_EQ(wrong.values()[0], 0) << grid.groups << " groups of " << grid.members;
    }
  }
}

TEST_F(CudaPersistent, SaysWhenTheBlocksDoNotFit) {
  const auto resident = static_cast<unsigned>(co_resident_blocks(rounds_kernel, 128, 0));
  const DeviceArray<unsigned> counters(GroupBarrier::kStride);
  const DeviceArray<int> slots(resident + 1), wrong(1);
  const auto launch = [&](unsigned blocks, unsigned threads) {
    return launch_together("test", "rounds", rounds_kernel, blocks, threads, 0, nullptr,
                           counters.get(), GroupedGrid{1, blocks}, 1, false, slots.get(),
                           wrong.get());
  };
  EXPECT_FALSE(launch(resident + 1, 128));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(launch(1, 4096), DeviceError);
}

// Stage s adds s + 1 to every element of its tile that stage s - 1 has been at: in every order but
// the right one the sums differ.
__global__ void stages_kernel(const Stages stages, int rows, int columns, unsigned* counters,
                              int* sums) {
  const unsigned group = blockIdx.x / stages.grid.members;
  const unsigned member = blockIdx.x % stages.grid.members;
  GroupBarrier barrier(counters + group * GroupBarrier::kStride, stages.grid.members);
  for (unsigned row = group; row < static_cast<unsigned>(rows); row += stages.grid.groups) {
    for (std::int64_t stage = stages.first; stage <= stages.last; ++stage) {
      for (unsigned c = member; c < static_cast<unsigned>(columns); c += stages.grid.members) {
        // The neighbour's number of the stage before, in the half of the buffer that nobody writes
        // now.
        const unsigned next = (c + 1) % static_cast<unsigned>(columns);
        const int* const before = sums + (stage & 1) * rows * columns + row * columns;
        int* const after = sums + ((stage + 1) & 1) * rows * columns + row * columns;
        if (threadIdx.x == 0) after[c] = __ldcg(before + next) + static_cast<int>(stage) + 1;
      }
      if (stage < stages.last) barrier.wait();
    }
  }
}

TEST_F(CudaPersistent, StagesTogetherAndOneByOneAreTheSame) {
  constexpr int kRows = 5, kColumns = 37, kStages = 9;
  for (const bool one_by_one : {false, true}) {
    const DeviceArray<unsigned> counters(64 * GroupBarrier::kStride);
    const DeviceArray<int> sums(2 * kRows * kColumns);
    launch_stages("test", "stages", stages_kernel, 64, kRows, kColumns, 64, 0, kStages - 1,
                  one_by_one, nullptr, kRows, kColumns, counters.get(), sums.get());
    finish();
    const std::vector<int> v = sums.values();
    for (std::size_t i = 0; i < kRows * kColumns; ++i) {
      EXPECT_EQ(v[(kStages & 1) * kRows * kColumns + i], kStages * (kStages + 1) / 2);
    }
  }
}

TEST(GroupedGrid, FitsAndCoversTheTiles) {
  for (const std::int64_t resident : {1, 2, 7, 132, 264}) {
    for (const std::int64_t rows : {1, 2, 5, 40, 5000}) {
      for (const std::int64_t columns : {1, 3, 32, 133, 1000}) {
        const GroupedGrid grid = grouped_grid(rows, columns, resident, 1024);
        EXPECT_GE(grid.groups, 1u);
        EXPECT_GE(grid.members, 1u);
        EXPECT_LE(grid.blocks(), resident);
        EXPECT_LE(grid.groups, std::min<std::int64_t>(rows, 1024));
        EXPECT_LE(grid.members, columns);
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
