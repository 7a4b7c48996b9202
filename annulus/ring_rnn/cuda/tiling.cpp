#include "annulus/ring_rnn/cuda/tiling.h"

#include <algorithm>
#include <string>

#include "annulus/core/checked.h"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

// Choices are made as if K were 16, whatever it is: channels of zeros change no bit.
constexpr std::int64_t kUsualChannels = 17;
// The runtime keeps so much of a block's shared memory to itself.
constexpr std::size_t kReservedBytes = 1024;

[[noreturn]] void refuse(const Problem& problem, const std::string& why) {
  throw NotSupported("[" + std::string(problem.op) + "] " + why);
}

bool on_sm90(const Gpu& gpu) { return gpu.compute_major == 9; }

// Samples of a batch tile: the most that pad the batch little.
int rows_for(std::int64_t B, int most) {
  const std::int64_t least = round_up(B, 64);
  for (const int rows : {256, 128}) {
    if (rows <= most && round_up(B, rows) * 4 <= least * 5) return rows;
  }
  return 64;
}

void set_rows(StepTiling& step, Layout& layout, int rows) {
  step.rows = rows;
  step.batch_tiles = static_cast<int>(ceil_div(layout.B, rows));
  layout.padded_b = static_cast<std::int64_t>(step.batch_tiles) * rows;
}

// Splits the sum of a tile so that work items fill `room`: first the depth, then the channels. Returns
// chunks of a split.
std::int64_t fill(StepTiling& step, std::int64_t room) {
  const std::int64_t base = static_cast<std::int64_t>(step.batch_tiles) * step.tiles;
  step.chunk_splits = step.channel_splits = 1;
  const auto split = [&](std::int64_t limit) {
    return std::clamp<std::int64_t>(room / (base * step.splits()), 1, limit);
  };
  const std::int64_t each =
      ceil_div(step.chunks, split(std::min<std::int64_t>(step.chunks, kMaxSplits)));
  step.chunk_splits = static_cast<int>(ceil_div(step.chunks, each));
  const std::int64_t groups = split(std::min<std::int64_t>(8, kMaxSplits / step.chunk_splits));
  while (step.channel_splits * 2 <= groups) step.channel_splits *= 2;
  return each;
}

[[noreturn]] void refuse_items(const Problem& problem, const std::string& count) {
  refuse(problem, "B and N must leave fewer than 2^31 tiles of 64 neurons but leave " + count);
}

void check_items(const StepTiling& step, const Problem& problem) {
  if (step.items() > INT32_MAX) refuse_items(problem, std::to_string(step.items()));
}

Sm80Tiling tile_sm80(const Problem& problem, const Gpu& gpu, Layout& layout) {
  Sm80Tiling s;
  s.tiles = layout.tiles;
  s.chunks = layout.padded_n / depth_of(layout.terms);
  const auto block = static_cast<std::size_t>(block_bytes(layout.terms));
  // s lies in shared memory for the dot products.
  const auto beside_of = [&](int rows) {
    return problem.dots ? static_cast<std::size_t>(rows) * kTile * sizeof(float) : 0;
  };
  const auto shared_of = [&](int per_multiprocessor) {
    return gpu.shared_bytes / static_cast<std::size_t>(per_multiprocessor) - kReservedBytes;
  };
  // Where the stages do not fit, fewer blocks share a multiprocessor, then they have fewer rows.
  int rows = rows_for(layout.B, 256);
  int per_multiprocessor = rows == 256 ? 1 : 2;
  const auto fits = [&] {
    return kStages * block + beside_of(rows) <= shared_of(per_multiprocessor);
  };
  if (!fits()) per_multiprocessor = 1;
  while (!fits() && rows > 64) rows /= 2;
  if (!fits()) {
    refuse(problem, "the GPU must have " + std::to_string(kStages * block + beside_of(rows)) +
                        " bytes of shared memory a block but has " + std::to_string(shared_of(1)));
  }
  set_rows(s, layout, rows);
  const std::int64_t room = static_cast<std::int64_t>(gpu.multiprocessors) * per_multiprocessor;
  const std::int64_t each = fill(s, room);
  check_items(s, problem);
  s.resident_channels = static_cast<int>(ceil_div(layout.channels, s.channel_splits));
  s.launch.grid = static_cast<int>(std::min(s.items(), room));
  s.launch.threads = s.rows;  // a warp has 64 rows and half the columns

  const std::size_t shared = shared_of(per_multiprocessor);
  const std::size_t beside = beside_of(s.rows);
  const std::int64_t blocks = each * s.resident_channels;
  s.resident =
      s.items() <= s.launch.grid && blocks <= static_cast<std::int64_t>((shared - beside) / block);
  s.weight_blocks = s.resident ? static_cast<int>(blocks) : kStages;
  s.launch.shared_bytes = static_cast<std::size_t>(s.weight_blocks) * block + beside;
  s.launch.most_shared_bytes = shared;
  return s;
}

Sm90Tiling tile_sm90(const Problem& problem, const Gpu& gpu, Layout& layout) {
  Sm90Tiling s;
  const int terms = layout.terms;
  s.tiles = layout.tiles;
  s.chunks = layout.padded_n / kHopperDepth;
  const std::int64_t room = gpu.multiprocessors;
  // Products that wait for their c, and fragments of more terms, need registers that 128 samples leave.
  const int most = rows_for(layout.B, layout.factors_on_x() ? 256 : 128);
  // Fewer samples leave fewer parts of a sum to be added up, if the weights of a block of threads still
  // stay in shared memory and the GPU is nearly full. (B 256 on an H200, T 20: N 256 takes 145 us with 64
  // samples, 154 with 128 and 213 with 256; N 512 264, 196 and 250; N 384, whose sum can be split to
  // 72 items at most, 308, 243 and 223.)
  std::int64_t each = 0;
  for (int rows = layout.factors_on_x() ? 64 : most;; rows *= 2) {
    set_rows(s, layout, rows);
    each = fill(s, room);
    const bool full = s.items() <= room && s.items() * 8 >= room * 7;
    const bool stays = each * ceil_div(kUsualChannels, s.channel_splits) <= kUsualChannels;
    if (rows == most || (full && stays)) break;
  }
  check_items(s, problem);
  while (1 << s.channel_split_bits < s.channel_splits) ++s.channel_split_bits;
  s.resident_channels = static_cast<int>(ceil_div(layout.channels, s.channel_splits));
  s.launch.grid = static_cast<int>(std::min(s.items(), room));
  // A warp has 16 rows; four warps more, of which two fetch weights and one prefetches.
  s.launch.threads = s.rows * 2 + 128;
  if (layout.factors_on_x() && !problem.dots) s.factor_bytes = kPairFactorBytes;
  if (layout.factors_on_x() && problem.dots) s.x_buffers = each > kGroupChunks ? 2 : 1;

  // X, alignment, c of a group, barriers: what is left is for the weights.
  const std::size_t shared = gpu.shared_bytes - kReservedBytes;
  const std::size_t beside =
      static_cast<std::size_t>(s.x_buffers * x_buffer_bytes(s.rows)) + 1024 +
      static_cast<std::size_t>(hopper_barrier_bytes(most_stages(layout.f16))) +
      static_cast<std::size_t>(std::min(kGroupChannels, layout.channels) * s.rows * s.factor_bytes);
  const auto block = static_cast<std::size_t>(hopper_block_bytes(terms));
  const std::size_t stage =
      block * static_cast<std::size_t>(hopper_stage_blocks(layout.factors_on_x()));
  const std::size_t left = shared - std::min(shared, beside);
  if (left / stage < kProducers) {  // no GPU of this kind has so little
    refuse(problem, "the GPU must have " + std::to_string(beside + kProducers * stage) +
                        " bytes of shared memory a block but has " + std::to_string(shared));
  }
  const std::int64_t blocks = each * s.resident_channels;
  s.resident = s.items() <= s.launch.grid && blocks <= static_cast<std::int64_t>(left / block);
  s.stages = std::min(most_stages(layout.f16), static_cast<int>(left / stage));
  s.weight_blocks =
      s.resident ? static_cast<int>(blocks) : s.stages * hopper_stage_blocks(layout.factors_on_x());
  s.launch.shared_bytes = static_cast<std::size_t>(s.weight_blocks) * block + beside;
  s.launch.most_shared_bytes = shared;
  return s;
}

ClusterTiling tile_cluster(const Problem& problem, const Gpu& gpu, const Layout& layout) {
  ClusterTiling s;
  const int terms = layout.terms;
  s.blocks = cluster_blocks(problem, gpu);
  // Half as many samples make a step shorter, if all clusters still run at once.
  s.samples = layout.padded_b / 8 <= gpu.clusters ? 8 : 16;
  if (layout.padded_b / s.samples > INT32_MAX / s.blocks) {
    refuse(problem, "B must be at most " +
                        std::to_string(std::int64_t{INT32_MAX} / s.blocks * s.samples) +
                        " with this N but is " + std::to_string(problem.B));
  }
  const std::size_t shared = gpu.shared_bytes - kReservedBytes;
  const std::size_t beside = cluster_shared_bytes(terms, s.samples);
  const auto channel = static_cast<std::size_t>(cluster_channel_bytes(terms));
  s.shared_channels = std::clamp(layout.channels - held_channels(terms), 0,
                                 static_cast<int>((shared - beside) / channel));
  s.launch.grid = static_cast<int>(layout.padded_b / s.samples * s.blocks);
  s.launch.threads = kClusterThreads;
  s.launch.shared_bytes = beside + static_cast<std::size_t>(s.shared_channels) * channel;
  s.launch.most_shared_bytes = shared;
  return s;
}

}  // namespace

// Networks whose weights a cluster holds at K = 16, or most of them with three terms. K itself has no
// say. Tried on an H200: 256 neurons in clusters of 8 with one term, 0.244 ms for B 256, K 16, T 20,
// where the loop for all sizes takes 0.188 even with two terms; more terms in clusters, with a part of
// the weights in L2, take 1.7 to 8 times as long as that loop.
int cluster_blocks(const Problem& problem, const Gpu& gpu) {
  if (!on_sm90(gpu) || problem.f16 || problem.N > kClusterNeurons * kMostBlocks) return 0;
  const auto padded_n = static_cast<int>(round_up(problem.N, kTile));
  return padded_n * problem.terms <= 256 ? padded_n / kClusterNeurons : 0;
}

Layout weights_layout(const Problem& problem, const Gpu& gpu) {
  Layout layout;
  layout.N = problem.N;
  layout.channels = static_cast<int>(problem.K) + 1;
  layout.terms = problem.terms;
  layout.f16 = problem.f16;
  layout.state_terms = problem.f16 ? 2 : problem.terms;
  layout.padded_n = static_cast<int>(round_up(problem.N, kTile));
  layout.tiles = layout.padded_n / kTile;
  layout.mask_words = static_cast<int>(ceil_div(layout.channels, 32));
  layout.row_tiles = on_sm90(gpu);
  layout.narrow_g = layout.row_tiles && layout.factors_on_x();
  return layout;
}

std::int64_t weight_bytes(const Layout& layout) {
  return std::int64_t{layout.padded_n} * layout.padded_n * layout.channels * layout.terms * 2;
}

Tiling tile(const Problem& problem, const Gpu& gpu) {
  Tiling t;
  t.layout = weights_layout(problem, gpu);
  t.layout.B = problem.B;
  t.layout.T = problem.T;
  t.layout.row_parts = t.layout.tiles;
  if (cluster_blocks(problem, gpu) > 0) {
    t.rows = rows_for(problem.B, problem.terms > 1 ? 128 : 256);
    t.layout.padded_b = round_up(problem.B, t.rows);
    const ClusterTiling s = tile_cluster(problem, gpu, t.layout);
    t.layout.row_parts = s.blocks;
    t.kernels = s;
    return t;
  }
  if (ceil_div(problem.B, 64) > INT32_MAX) refuse_items(problem, "2^31 or more");
  if (on_sm90(gpu)) {
    t.kernels = tile_sm90(problem, gpu, t.layout);
  } else {
    t.kernels = tile_sm80(problem, gpu, t.layout);
  }
  t.rows = t.step()->rows;
  return t;
}

const StepTiling* Tiling::step() const {
  if (const auto* s = std::get_if<Sm80Tiling>(&kernels)) return s;
  return std::get_if<Sm90Tiling>(&kernels);
}

DotParts Tiling::dot_parts() const {
  const StepTiling* s = step();
  if (s == nullptr) return {};
  return {s->splits(), s->channel_splits, std::holds_alternative<Sm80Tiling>(kernels) ? 2 : 1};
}

const char* Tiling::name() const {
  return in_clusters()                                 ? "tensor cores in clusters"
         : std::holds_alternative<Sm90Tiling>(kernels) ? "tensor cores by wgmma"
                                                       : "tensor cores by mma.sync";
}

// The count with the shortest time, which is that of the busiest multiprocessor and of writing and
// reading the parts (by about an H200's rates, on every GPU). Parts beyond what an idle multiprocessor
// asks for take memory, a copy of dWa and dWo each: for 5 % at least. K has no say here either.
int depth_splits(const Layout& layout, const Gpu& gpu) {
  if (layout.N >= 65536) return 1;            // gather counts N^2 in 32 bits
  constexpr double kRate = 4e12;              // flops of a multiprocessor
  constexpr double kBytesPerSecond = 3.5e12;  // of memory
  const bool sm90 = on_sm90(gpu);
  const std::int64_t sides = ceil_div(layout.N, kSide);
  const std::int64_t tiles =
      sm90 ? layout.tiles * sides * hopper_dweights_groups(layout.state_terms, kUsualChannels)
           : sides * sides * kUsualChannels;
  const std::int64_t room =
      static_cast<std::int64_t>(gpu.multiprocessors) * (layout.state_terms == 1 && !sm90 ? 2 : 1);
  const std::int64_t deep = layout.T * (layout.padded_b / 32);
  const double area = static_cast<double>(sides * sides * kSide * kSide * kUsualChannels);
  const double tile_time = 64.0 * static_cast<double>(deep) * products_of(layout.state_terms) *
                           area / static_cast<double>(tiles) / kRate;
  const double part_time = 8 * area / kBytesPerSecond;
  const std::int64_t most =
      std::clamp<std::int64_t>(deep / 8, 1, std::max<std::int64_t>(room / tiles, 4));
  const auto time_of = [&](std::int64_t splits) {
    const double waves = static_cast<double>(ceil_div(tiles * splits, room));
    return waves * tile_time / static_cast<double>(splits) +
           (splits > 1 ? static_cast<double>(splits) * part_time : 0.0);
  };
  std::int64_t best = 1, splits = 2;
  for (; splits <= std::min(most, room / tiles); ++splits) {
    if (time_of(splits) < time_of(best)) best = splits;
  }
  const double enough = 0.95 * time_of(best);
  for (; splits <= most; ++splits) {
    if (time_of(splits) < std::min(enough, time_of(best))) best = splits;
  }
  return static_cast<int>(best);
}

}  // namespace annulus::ring_rnn::cuda::tensor
