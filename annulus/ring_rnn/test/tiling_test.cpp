// How the tensor-core path divides a call: on the CPU, with GPUs as facts.
#include "annulus/ring_rnn/cuda/tiling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/core/errors.h"

namespace annulus::ring_rnn::cuda::tensor {
namespace {

const Gpu kH200{9, 132, 233472, 30};
const Gpu kA100{8, 108, 167936, 0};
const Gpu kRtx4090{8, 128, 102400, 0};

const std::vector<std::int64_t> kBatches = {1, 7, 64, 65, 128, 200, 256, 257, 1000, 5000};
const std::vector<std::int64_t> kNeurons = {1,   3,   64,  65,   128,  129,
                                            256, 384, 500, 1024, 2048, 4100};

template <class F>
void for_each_problem(F&& f) {
  for (const std::int64_t B : kBatches) {
    for (const std::int64_t N : kNeurons) {
      for (const int terms : {0, 1, 2, 3}) {  // 0: one of f16
        for (const bool dots : {false, true}) {
          SCOPED_TRACE("B " + std::to_string(B) + ", N " + std::to_string(N) + ", terms " +
                       std::to_string(terms) + (dots ? ", dots" : ""));
          f(Problem{"ring_rnn", B, 20, 16, N, std::max(terms, 1), terms == 0, dots});
        }
      }
    }
  }
}

void expect_padded(const Tiling& t, const Problem& p) {
  EXPECT_EQ(t.layout.padded_n, t.layout.tiles * kTile);
  EXPECT_GE(t.layout.padded_n, p.N);
  EXPECT_LT(t.layout.padded_n, p.N + kTile);
  EXPECT_GE(t.layout.padded_b, p.B);
  EXPECT_EQ(t.layout.padded_b, static_cast<std::int64_t>(t.batch_tiles()) * t.rows);
  EXPECT_LE(t.layout.padded_b * 4, (p.B + 63) / 64 * 64 * 5) << "pads the batch by over a quarter";
  EXPECT_EQ(t.layout.padded_b % 32, 0) << "not whole row tiles";
}

void expect_items(const StepTiling& s) {
  EXPECT_LE(s.chunk_splits, s.chunks) << "a split without a chunk";
  EXPECT_LE(s.splits(), kMaxSplits);
  EXPECT_EQ(s.channel_splits & (s.channel_splits - 1), 0);
  EXPECT_LE(s.channel_splits, 8);
}

void expect_launch(const LaunchSize& launch, std::size_t shared) {
  EXPECT_GT(launch.grid, 0);
  EXPECT_LE(launch.shared_bytes, launch.most_shared_bytes);
  EXPECT_LE(launch.most_shared_bytes, shared - 1024);
}

TEST(RingRnnTiling, Sm90FitsTheGpu) {
  for_each_problem([](const Problem& p) {
    const Tiling t = tile(p, kH200);
    expect_padded(t, p);
    EXPECT_TRUE(t.layout.row_tiles);
    const bool bf16 = p.terms == 1 && !p.f16;
    EXPECT_EQ(t.layout.narrow_g, bf16);
    EXPECT_EQ(t.layout.state_terms, p.f16 ? 2 : p.terms) << "s would lose bits";
    EXPECT_EQ(t.in_clusters(),
              !p.f16 && t.layout.padded_n <= 128 && t.layout.padded_n * p.terms <= 256);
    if (const auto* c = std::get_if<ClusterTiling>(&t.kernels)) {
      EXPECT_EQ(c->blocks * kClusterNeurons, t.layout.padded_n);
      EXPECT_EQ(t.layout.row_parts, c->blocks);
      EXPECT_EQ(std::int64_t{c->launch.grid} * c->samples, t.layout.padded_b * c->blocks);
      if (c->samples == 8) {
        EXPECT_LE(c->launch.grid / c->blocks, kH200.clusters);
      }
      expect_launch(c->launch, kH200.shared_bytes);
      return;
    }
    const auto& s = std::get<Sm90Tiling>(t.kernels);
    expect_items(s);
    expect_launch(s.launch, kH200.shared_bytes);
    EXPECT_LE(s.rows, bf16 ? 256 : 128) << "registers";
    EXPECT_LE(s.launch.grid, kH200.multiprocessors) << "blocks that wait would never run";
    EXPECT_EQ(s.launch.threads, s.rows * 2 + 128);
    EXPECT_EQ(1 << s.channel_split_bits, s.channel_splits);
    EXPECT_GE(s.stages, kProducers);
    EXPECT_LE(s.stages, most_stages(p.f16));
    EXPECT_EQ(s.x_buffers > 0, p.dots && bf16);
    EXPECT_EQ(s.factor_bytes, bf16 && !p.dots ? kPairFactorBytes : kFactorBytes);
    if (s.resident) {
      EXPECT_LE(s.items(), s.launch.grid) << "a block of threads has weights of one item alone";
      const int chunks = (s.chunks + s.chunk_splits - 1) / s.chunk_splits;
      EXPECT_EQ(s.weight_blocks, chunks * s.resident_channels);
    } else {
      EXPECT_EQ(s.weight_blocks, s.stages * hopper_stage_blocks(bf16));
    }
  });
}

void expect_sm80_fits(const Gpu& gpu) {
  for_each_problem([&](const Problem& p) {
    const Tiling t = tile(p, gpu);
    expect_padded(t, p);
    EXPECT_FALSE(t.layout.row_tiles || t.layout.narrow_g);
    const auto& s = std::get<Sm80Tiling>(t.kernels);
    expect_items(s);
    expect_launch(s.launch, gpu.shared_bytes);
    const int each = static_cast<int>(gpu.shared_bytes / (s.launch.most_shared_bytes + 1024));
    EXPECT_LE(each, s.rows == 256 ? 1 : 2) << "registers";
    EXPECT_LE(s.launch.grid, gpu.multiprocessors * each) << "blocks that wait would never run";
    EXPECT_EQ(s.launch.threads, s.rows);
    EXPECT_EQ(s.chunks * depth_of(p.terms), t.layout.padded_n);
    if (!s.resident) {
      EXPECT_EQ(s.weight_blocks, kStages);
    }
  });
}

TEST(RingRnnTiling, Sm80FitsTheGpu) {
  expect_sm80_fits(kA100);
  expect_sm80_fits(kRtx4090);  // whose stages leave room for one block and, with dots, 128 rows
}

// Channels of zeros at the end change no bit: the order of the sums does not know K.
TEST(RingRnnTiling, ChannelsHaveNoSay) {
  for (const Gpu& gpu : {kH200, kA100, kRtx4090}) {
    for_each_problem([&](Problem p) {
      const Tiling usual = tile(p, gpu);
      for (const std::int64_t K : {0, 1, 5, 40, 300}) {
        p.K = K;
        const Tiling t = tile(p, gpu);
        ASSERT_EQ(t.kernels.index(), usual.kernels.index());
        EXPECT_EQ(t.layout.channels, K + 1);
        EXPECT_EQ(t.layout.mask_words, (K + 32) / 32);
        EXPECT_EQ(t.rows, usual.rows);
        EXPECT_EQ(depth_splits(t.layout, gpu), depth_splits(usual.layout, gpu));
        if (t.in_clusters()) {
          EXPECT_EQ(std::get<ClusterTiling>(t.kernels).samples,
                    std::get<ClusterTiling>(usual.kernels).samples);
          continue;
        }
        EXPECT_EQ(t.step()->chunk_splits, usual.step()->chunk_splits);
        EXPECT_EQ(t.step()->channel_splits, usual.step()->channel_splits);
      }
    });
  }
}

// What was measured to be fastest on an H200 (B 256, T 20): rows 64 at N 256, 128 at N 512, 256 at N 384
// and from N 1024 on; clusters of four blocks with 16 samples at N 128.
TEST(RingRnnTiling, AsMeasuredOnAnH200) {
  const auto rows = [](std::int64_t N) {
    return tile({"ring_rnn", 256, 20, 16, N, 1, false, false}, kH200).rows;
  };
  EXPECT_EQ(rows(256), 64);
  EXPECT_EQ(rows(512), 128);
  EXPECT_EQ(rows(384), 256);
  EXPECT_EQ(rows(1024), 256);
  EXPECT_EQ(rows(2048), 256);
  const Tiling small = tile({"ring_rnn", 256, 20, 16, 128, 1, false, false}, kH200);
  EXPECT_EQ(std::get<ClusterTiling>(small.kernels).blocks, 4);
  EXPECT_EQ(std::get<ClusterTiling>(small.kernels).samples, 16);
  EXPECT_STREQ(small.name(), "tensor cores in clusters");
  // A forward in clusters prepares nothing up to K 23.
  for (const std::int64_t K : {0, 16, 23, 24}) {
    const Tiling t = tile({"ring_rnn", 256, 20, K, 128, 1, false, false}, kH200);
    EXPECT_EQ(std::get<ClusterTiling>(t.kernels).holds_all_weights(t.layout), K <= 23) << K;
  }
  // The weights' gradients: a split where tiles are fewer than multiprocessors, none where they fill it.
  EXPECT_GT(depth_splits(small.layout, kH200), 1);
  EXPECT_EQ(
      depth_splits(tile({"ring_rnn", 256, 20, 16, 2048, 1, false, true}, kH200).layout, kH200), 1);
}

TEST(RingRnnTiling, WhichKernels) {
  const Problem p{"ring_rnn", 256, 20, 16, 1024, 2, false, true};
  EXPECT_STREQ(tile(p, kH200).name(), "tensor cores by wgmma");
  EXPECT_STREQ(tile(p, kA100).name(), "tensor cores by mma.sync");
  Gpu later = kH200;
  later.compute_major = 10;  // wgmma is 9.0's alone
  EXPECT_STREQ(tile(p, later).name(), "tensor cores by mma.sync");
  EXPECT_EQ(tile(p, kH200).dot_parts().warps, 1);
  EXPECT_EQ(tile(p, kA100).dot_parts().warps, 2);
}

// Packed weights: every term of every channel, in whole tiles.
TEST(RingRnnTiling, WeightBytes) {
  const Problem p{"ring_rnn_pack", 0, 0, 2, 65, 3, false, false};
  EXPECT_EQ(weight_bytes(weights_layout(p, kH200)), 3 * 128 * 128 * 3 * 2);
  EXPECT_EQ(weight_bytes(weights_layout(p, kA100)), 3 * 128 * 128 * 3 * 2);
}

TEST(RingRnnTiling, RefusesWhatKernelsCannotCount) {
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  Gpu little = kH200, little_sm80 = kA100;
  little.shared_bytes = little_sm80.shared_bytes = 32 << 10;
  struct Refusal {
    std::int64_t B, N;
    bool dots;
    Gpu gpu;
    const char* reason;
  };
  for (const auto& [B, N, dots, gpu, reason] :
       {Refusal{kMany, 2048, false, kH200, "2^31 tiles"},
        Refusal{kMany >> 4, 2048, false, kH200, "2^31 tiles"},
        Refusal{kMany, 128, false, kH200, "B must be at most"},
        Refusal{256, 2048, false, little, "shared memory"},
        Refusal{256, 2048, true, little_sm80, "shared memory"}}) {
    try {
      (void)tile({"ring_rnn", B, 1, 1, N, 1, false, dots}, gpu);
      ADD_FAILURE() << "not refused for " << reason;
    } catch (const NotSupported& e) {
      EXPECT_NE(std::string(e.what()).find(reason), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace annulus::ring_rnn::cuda::tensor
