// Host side of the tensor-core path: how a call is cut, where its scratch lies, what is launched.
#include "annulus/ring_rnn/cuda/tensor.cuh"

#include <algorithm>
#include <string>

#include "annulus/core/backend.h"
#include "annulus/core/checked.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/one_graph.h"
#include "annulus/ring_rnn/cuda/cluster/loop.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

constexpr int kSide = 128;  // of a block of the weights' gradient
// Choices are made as if K were 16, whatever it is: channels of zeros change no bit.
constexpr std::int64_t kUsualChannels = 17;

int attribute(cudaDeviceAttr which, const Plan& plan) {
  int value = 0;
  ANNULUS_CUDA_CHECK(plan.op, cudaDeviceGetAttribute(&value, which, plan.device.index));
  return value;
}

// Samples a block: the most that pad the batch little.
int rows_for(std::int64_t B, int most) {
  const std::int64_t least = round_up(B, 64);
  for (const int rows : {256, 128}) {
    if (rows <= most && round_up(B, rows) * 4 <= least * 5) return rows;
  }
  return 64;
}

Shape weights_shape(const Plan& plan) {
  Shape s;
  s.hopper = attribute(cudaDevAttrComputeCapabilityMajor, plan) == 9 && !plan.portable;
  s.N = plan.N;
  s.channels = static_cast<int>(plan.K) + 1;
  s.terms = terms_of(plan.precision);
  s.padded_n = static_cast<int>(round_up(plan.N, kTile));
  s.tiles = s.padded_n / kTile;
  s.chunks = s.padded_n / (s.hopper ? kHopperDepth : depth_of(s.terms));
  s.mask_words = static_cast<int>(ceil_div(s.channels, 32));
  return s;
}

// Splits the sum of a tile so that blocks fill `room`: first the depth, then the channels. Returns
// chunks of a split.
std::int64_t fill(Shape& s, std::int64_t room) {
  const std::int64_t base = static_cast<std::int64_t>(s.batch_tiles) * s.tiles;
  s.chunk_splits = s.channel_splits = 1;
  s.channel_split_bits = 0;
  const auto split = [&](std::int64_t limit) {
    return std::clamp<std::int64_t>(room / (base * s.splits()), 1, limit);
  };
  const std::int64_t each = ceil_div(s.chunks, split(std::min<std::int64_t>(s.chunks, kMaxSplits)));
  s.chunk_splits = static_cast<int>(ceil_div(s.chunks, each));
  const std::int64_t groups = split(std::min<std::int64_t>(8, kMaxSplits / s.chunk_splits));
  while (s.channel_splits * 2 <= groups) {
    s.channel_splits *= 2;
    ++s.channel_split_bits;
  }
  return each;
}

// Cuts a call so that it fills the GPU: first the batch and the columns, then the sum. K has no say, so
// that channels of zeros at the end change no bit.
Shape cut(const Plan& plan, bool dots) {
  Shape s = weights_shape(plan);
  s.B = plan.B;
  s.T = plan.T;
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, plan);
  const auto multiprocessor_shared =
      static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, plan));
  const auto set_rows = [&](int rows) {
    s.rows = rows;
    s.batch_tiles = static_cast<int>(ceil_div(plan.B, rows));
    s.padded_b = static_cast<std::int64_t>(s.batch_tiles) * rows;
  };
  // Fragments of more terms need more registers, which 128 samples a block leave.
  set_rows(rows_for(plan.B, s.hopper && s.terms > 1 ? 128 : 256));
  if (s.hopper && runs_in_clusters(s)) {
    fit_cluster(s, multiprocessor_shared - 1024, plan.op);
    if (s.padded_b / s.samples > INT32_MAX / s.cluster) {
      throw NotSupported("[" + std::string(plan.op) + "] B must be at most " +
                         std::to_string(std::int64_t{INT32_MAX} / s.cluster * s.samples) +
                         " with this N but is " + std::to_string(plan.B));
    }
    s.grid = static_cast<int>(s.padded_b / s.samples * s.cluster);
    return s;
  }
  const int per_multiprocessor = s.hopper || s.rows == 256 ? 1 : 2;
  const std::int64_t room = static_cast<std::int64_t>(multiprocessors) * per_multiprocessor;
  // Fewer samples a block leave fewer parts of a sum to be added up, if the weights of a block still
  // stay in shared memory and the GPU is nearly full. (B 256 on an H200, T 20: N 256 takes 145 us with 64
  // samples, 154 with 128 and 213 with 256; N 512 264, 196 and 250; N 384, whose sum can be split to
  // 72 blocks at most, 308, 243 and 223.)
  const int most = s.rows;
  std::int64_t each = 0;
  for (int rows = s.hopper && s.terms == 1 ? 64 : most;; rows *= 2) {
    set_rows(rows);
    each = fill(s, room);
    const bool full = s.items() <= room && s.items() * 8 >= room * 7;
    const bool stays = each * ceil_div(kUsualChannels, s.channel_splits) <= kUsualChannels;
    if (rows == most || (full && stays)) break;
  }
  s.grid = static_cast<int>(std::min(s.items(), room));
  s.resident_channels = static_cast<int>(ceil_div(s.channels, s.channel_splits));
  // Portable: a warp has 64 rows and half the columns. Hopper: 16 rows; four warps more, of which two
  // fetch and one fetches ahead.
  s.threads = s.hopper ? s.rows * 2 + 128 : s.rows;
  s.dot_parts = s.hopper ? 1 : 2;
  s.row_parts = s.tiles;
  if (s.hopper && s.terms == 1 && !dots) s.scale_bytes = sizeof(Scale);

  if (s.items() > INT32_MAX) {
    throw NotSupported("[" + std::string(plan.op) +
                       "] B and N must leave fewer than 2^31 tiles "
                       "of 64 neurons but leave " +
                       std::to_string(s.items()));
  }

  const std::size_t shared =
      multiprocessor_shared / static_cast<std::size_t>(per_multiprocessor) - 1024;
  const auto block =
      static_cast<std::size_t>(s.hopper ? hopper_block_bytes(s.terms) : block_bytes(s.terms));
  const std::int64_t blocks = each * s.resident_channels;
  // Portable: s lies there for the dot products; Hopper has it in registers.
  std::size_t beside =
      dots && !s.hopper ? static_cast<std::size_t>(s.rows) * kTile * sizeof(float) : 0;
  if (s.hopper && s.terms == 1 && dots) {
    s.row_major = true;
    s.x_buffers = each > kGroupChunks ? 2 : 1;
    beside += static_cast<std::size_t>(s.x_buffers * x_buffer_bytes(s.rows));
  }
  if (s.hopper) {
    // Alignment, c of a group, barriers: what is left is for the weights.
    beside +=
        1024 + static_cast<std::size_t>(hopper_barrier_bytes(kMostStages)) +
        static_cast<std::size_t>(std::min(kGroupChannels, s.channels) * s.rows * s.scale_bytes);
    const auto stage = block * static_cast<std::size_t>(hopper_stage_blocks(s.terms));
    const std::size_t room_for_weights = shared - std::min(shared, beside);
    if (room_for_weights / stage < kFetchers) {  // no GPU of this kind has so little
      throw NotSupported("[" + std::string(plan.op) + "] the GPU must have " +
                         std::to_string(beside + kFetchers * stage) +
                         " bytes of shared memory a block but has " + std::to_string(shared));
    }
    s.resident =
        s.items() <= s.grid && blocks <= static_cast<std::int64_t>(room_for_weights / block);
    s.ring = std::min(kMostStages, static_cast<int>(room_for_weights / stage));
    s.slots = s.resident ? static_cast<int>(blocks) : s.ring * hopper_stage_blocks(s.terms);
  } else {
    s.resident =
        s.items() <= s.grid && blocks <= static_cast<std::int64_t>((shared - beside) / block);
    s.slots = s.resident ? static_cast<int>(blocks) : kStages;
  }
  s.shared_bytes = static_cast<std::size_t>(s.slots) * block + beside;
  s.most_shared_bytes = shared;
  return s;
}

const char* kernels_of(const Shape& s) {
  return s.cluster > 0 ? "tensor cores in clusters"
         : s.hopper    ? "tensor cores by wgmma"
                       : "tensor cores by mma.sync";
}

// What either loop needs, besides the weights.
Loop take_loop(ScratchLayout& scratch, const Shape& s) {
  Loop loop;
  loop.shape = s;
  if (s.cluster > 0) {  // between launches alone: nothing else leaves the clusters
    loop.state = scratch.take<float>(s.padded_b * s.padded_n);
    return loop;
  }
  loop.operand = scratch.take<std::uint32_t>(s.terms * s.padded_b * s.padded_n);  // two of halves
  loop.state = scratch.take<float>(s.padded_b * s.padded_n);
  loop.row_sums = scratch.take<float>(2 * s.tiles * s.padded_b);
  loop.partial = scratch.take<float>(s.items() * s.rows * kTile);
  loop.counters = scratch.take<unsigned>(counters_of(s));
  return loop;
}

struct Coefficients {
  float* c;
  std::uint32_t* active;
  Scale* scales;
  std::uint32_t* two_terms;
};
Coefficients take_coefficients(ScratchLayout& scratch, const Shape& s) {
  Coefficients c{};
  const std::int64_t masks = s.T * s.batch_tiles * s.mask_words;
  c.c = scratch.take<float>(s.T * s.channels * s.padded_b);
  c.active = scratch.take<std::uint32_t>(masks);
  if (s.scale_bytes == sizeof(Scale)) {
    c.scales = scratch.take<Scale>(s.T * s.channels * s.padded_b);
    c.two_terms = scratch.take<std::uint32_t>(masks);
  }
  return c;
}

struct ForwardScratch {
  uint4* weights = nullptr;
  Coefficients coefficients{};
  Loop loop;
};
ForwardScratch take_forward(ScratchLayout& scratch, const Plan& plan, const Shape& s) {
  ForwardScratch f;
  if (!plan.in.packed.defined() && !holds_all_weights(s)) {
    f.weights = scratch.take<uint4>(weight_bytes(s) / 16);
  }
  if (s.cluster == 0) f.coefficients = take_coefficients(scratch, s);  // clusters read A itself
  f.loop = take_loop(scratch, s);
  if (plan.out.angle.defined())
    f.loop.vectors = scratch.take<float>(s.T * s.row_parts * s.padded_b * 2);
  return f;
}

bool needs_dots(const Plan& plan) { return plan.grad.dA.defined() || plan.grad.dJ1.defined(); }

// Clusters leave s . u_k to the launch after the loop.
bool dots_come_late(const Plan& plan, const Shape& s) { return s.cluster > 0 && needs_dots(plan); }

struct BackwardScratch {
  Loop loop;
  uint4* weights = nullptr;
  Coefficients coefficients{};
  std::uint32_t* active_rows = nullptr;
  std::uint32_t* stretch_c = nullptr;
  std::uint16_t* states = nullptr;
  float* parts = nullptr;
  int depth_splits = 1;  // of the weights' gradient: how many parts
  // With checkpoints: the forward loop again, and y of a stretch of steps.
  ForwardScratch again;
  float* y = nullptr;
};

// Into how many parts the sum over B T rows is cut so that its tiles fill the GPU: the count with the
// shortest time, which is that of the busiest multiprocessor and of writing and reading the parts (by
// about an H200's rates, on every GPU). Parts beyond what an idle multiprocessor asks for take memory, a copy
// of dWa and dWo each: for 5 % at least. K has no say here either.
int depth_splits_for(const Plan& plan, const Shape& s) {
  if (plan.N >= 65536) return 1;              // gather counts N^2 in 32 bits
  constexpr double kRate = 4e12;              // flops of a multiprocessor
  constexpr double kBytesPerSecond = 3.5e12;  // of memory
  const std::int64_t sides = ceil_div(plan.N, kSide);
  const std::int64_t tiles = s.hopper
                                 ? s.tiles * sides * hopper_dweights_groups(s.terms, kUsualChannels)
                                 : sides * sides * kUsualChannels;
  const std::int64_t room =
      static_cast<std::int64_t>(attribute(cudaDevAttrMultiProcessorCount, plan)) *
      (s.terms == 1 && !s.hopper ? 2 : 1);
  const std::int64_t deep = s.T * (s.padded_b / 32);
  const double area = static_cast<double>(sides * sides * kSide * kSide * kUsualChannels);
  const double tile_time = 64.0 * static_cast<double>(deep) * products_of(s.terms) * area /
                           static_cast<double>(tiles) / kRate;
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

BackwardScratch take_backward(ScratchLayout& scratch, const Plan& plan, const Shape& s,
                              const Shape& forward_shape) {
  BackwardScratch b;
  const RingRnnGradients& grad = plan.grad;
  const std::int64_t plane = s.padded_b * s.padded_n;
  b.weights = scratch.take<uint4>(weight_bytes(s) / 16);
  b.coefficients = take_coefficients(scratch, s);
  b.loop = take_loop(scratch, s);
  if (needs_dots(plan)) {
    b.loop.dots =
        scratch.take<float>(s.T * s.tiles * s.splits() * s.dot_parts * s.channels * s.padded_b);
  }
  if (needs_dots(plan) || plan.needs_dweights()) {
    b.states = scratch.take<std::uint16_t>(s.terms * s.T * plane);
  }
  if (plan.needs_dweights() || dots_come_late(plan, s)) {
    b.loop.g = scratch.take<std::byte>(g_bytes(s));
  }
  if (plan.needs_dweights()) {
    if (s.hopper) b.stretch_c = scratch.take<std::uint32_t>(stretch_c_words(s));
    b.active_rows = scratch.take<std::uint32_t>(s.T * (s.padded_b / 32) * s.mask_words);
    b.depth_splits = depth_splits_for(plan, s);
    const std::int64_t side = round_up(plan.N, kSide);
    if (b.depth_splits > 1) {
      b.parts = scratch.take<float>(b.depth_splits * s.channels * side * side);
    }
  }
  b.loop.slice_sums = scratch.take<double>(3 * Loop::kSlices);
  b.loop.slice_counters = scratch.take<unsigned>(3);
  if (grad.dalpha.defined()) b.loop.alpha_sums = scratch.take<float>(plane);
  if (plan.in.reset.defined()) b.loop.reset_sums = scratch.take<float>(plane);
  if (grad.dJ0.defined()) {
    b.loop.g_sums = scratch.take<float>(s.T * s.row_parts * s.padded_b);
    b.loop.s_sums = scratch.take<float>(s.T * s.row_parts * s.padded_b);
  }
  if (plan.checkpoint > 0) {
    b.again = take_forward(scratch, plan, forward_shape);
    b.y = scratch.take<float>(std::min(plan.checkpoint, plan.T) * plan.B * plan.N);
  }
  return b;
}

Prepare preparation(const Args& args, const Shape& s, uint4* weights, const Coefficients& c,
                    const Loop& loop) {
  Prepare p;
  p.args = args;
  p.shape = s;
  p.weights = weights;
  p.c = c.c;
  p.active = c.active;
  p.scales = c.scales;
  p.two_terms = c.two_terms;
  p.counters = loop.counters;
  if (loop.counters != nullptr) p.counter_count = counters_of(s);
  return p;
}

void complete(Loop& loop, const Args& args, const Plan& plan, const uint4* weights,
              const Coefficients& c) {
  loop.args = args;
  loop.dtype = plan.dtype;
  loop.weights = weights;
  loop.c = c.c;
  loop.active = c.active;
  loop.scales = c.scales;
  loop.two_terms = c.two_terms;
  loop.first = 0;
  loop.last = plan.T;
  loop.own_reset_state = plan.in.reset_state.defined();
  loop.together = !plan.stepwise;
}

// Clusters need nothing prepared where they hold all weights, or find them packed.
void prepare_forward(const Args& args, const ForwardScratch& f, DType dtype, const char* op,
                     cudaStream_t stream) {
  if (f.weights == nullptr && f.loop.shape.cluster > 0) return;
  run_prepare(preparation(args, f.loop.shape, f.weights, f.coefficients, f.loop), dtype, op,
              stream);
}

void run_forward(const Loop& loop, const char* op, cudaStream_t stream) {
  if (loop.shape.cluster > 0) return run_cluster_forward(loop, op, stream);
  if (loop.shape.hopper) return run_hopper_forward(loop, op, stream);
  run_portable_forward(loop, op, stream);
}

void run_backward(const Loop& loop, bool dots, const char* op, cudaStream_t stream) {
  if (loop.shape.cluster > 0) return run_cluster_backward(loop, op, stream);
  if (!loop.shape.hopper) return run_portable_backward(loop, dots, op, stream);
  if (dots) return run_hopper_dots(loop, op, stream);
  run_hopper_backward(loop, op, stream);
}

void clear_counters(const Loop& loop, const char* op, cudaStream_t stream) {
  if (loop.counters == nullptr) return;
  ANNULUS_CUDA_CHECK(
      op, cudaMemsetAsync(loop.counters, 0,
                          static_cast<std::size_t>(counters_of(loop.shape)) * sizeof(unsigned),
                          stream));
}

// Both loops by turns, from the last kept state to the first: forward again for y, which is all that
// loop writes, then backward.
void backward_from_checkpoints(const Plan& plan, const Args& args, BackwardScratch& b, bool dots,
                               cudaStream_t stream) {
  ForwardScratch& again = b.again;
  prepare_forward(args, again, plan.dtype, plan.op, stream);
  Loop& loop = b.loop;
  for (std::int64_t i = plan.saved_steps(); i-- > 0;) {
    const std::int64_t first = i * plan.checkpoint;
    const std::int64_t last = std::min(first + plan.checkpoint, plan.T);
    Ref<2> state;
    state.data = static_cast<float*>(args.saved.data) + i * args.saved.stride[0];
    state.stride[0] = args.saved.stride[1];
    state.stride[1] = args.saved.stride[2];
    complete(again.loop, args, plan, again.weights, again.coefficients);
    again.loop.y_again = b.y;
    again.loop.y_first = first;
    again.loop.restart = state;
    again.loop.first = first;
    again.loop.last = last;
    clear_counters(again.loop, plan.op, stream);
    run_forward(again.loop, plan.op, stream);
    loop.first = first;
    loop.last = last;
    loop.leave_at = first;
    loop.y = b.y;
    loop.y_first = first;
    loop.y_stride[0] = plan.B * plan.N;
    loop.y_stride[1] = plan.N;
    loop.y_stride[2] = 1;
    clear_counters(loop, plan.op, stream);
    run_backward(loop, dots, plan.op, stream);
  }
}

}  // namespace

int terms_of(Precision precision) {
  if (precision == Precision::kTf32) return 2;  // see why_not in dispatch.cu
  const PrecisionFacts& facts = facts_of(precision);
  return facts.element == DType::kBF16 ? facts.terms : 0;
}

std::size_t pack_bytes(const Plan& plan) {
  return static_cast<std::size_t>(weight_bytes(weights_shape(plan)));
}

void pack(const Plan& plan, Context& context) {
  Prepare p;
  p.args = make_args(plan);
  p.shape = weights_shape(plan);
  p.weights = static_cast<uint4*>(plan.in.packed.data);
  run_prepare(p, plan.dtype, plan.op, static_cast<cudaStream_t>(context.stream));
}

std::size_t forward_workspace(const Plan& plan) {
  const Shape s = cut(plan, false);
  return scratch_bytes([&](ScratchLayout& scratch) { (void)take_forward(scratch, plan, s); });
}

std::size_t backward_workspace(const Plan& plan) {
  const Shape s = cut(plan, needs_dots(plan)), forward_shape = cut(plan, false);
  return scratch_bytes(
      [&](ScratchLayout& scratch) { (void)take_backward(scratch, plan, s, forward_shape); });
}

void forward(const Plan& plan, Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Shape s = cut(plan, false);
  ForwardScratch f;
  const Workspace workspace(context, plan.op, plan.device,
                            [&](ScratchLayout& scratch) { f = take_forward(scratch, plan, s); });
  const Args args = make_args(plan);
  prepare_forward(args, f, plan.dtype, plan.op, stream);
  const uint4* weights =
      f.weights != nullptr ? f.weights : static_cast<const uint4*>(plan.in.packed.data);
  complete(f.loop, args, plan, weights, f.coefficients);
  run_forward(f.loop, plan.op, stream);
  if (f.loop.vectors != nullptr) run_readout(f.loop, plan.op, stream);
  ran_on(plan.op, DeviceType::kCUDA, kernels_of(s));
}

void backward(const Plan& plan, Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const bool dots = needs_dots(plan);
  const Shape s = cut(plan, dots);
  const Shape forward_shape = cut(plan, false);
  BackwardScratch b;
  const Workspace workspace(context, plan.op, plan.device, [&](ScratchLayout& scratch) {
    b = take_backward(scratch, plan, s, forward_shape);
  });
  const Args args = make_args(plan);

  Prepare p = preparation(args, s, b.weights, b.coefficients, b.loop);
  p.backward = true;
  p.all_channels = dots;
  p.states = b.states;
  p.active_rows = b.active_rows;
  p.stretch_c = b.stretch_c;
  p.slice_counters = b.loop.slice_counters;

  Loop& loop = b.loop;
  complete(loop, args, plan, b.weights, b.coefficients);
  loop.backward = true;
  loop.states = b.states;
  if (plan.checkpoint == 0) {
    run_prepare(p, plan.dtype, plan.op, stream);
    loop.y = static_cast<const float*>(plan.out.saved.data);
    for (int i = 0; i < 3; ++i) loop.y_stride[i] = args.saved.stride[i];
    run_backward(loop, dots, plan.op, stream);
  } else {
    annulus::cuda::record_as_one_node(plan.op, stream, [&](cudaStream_t recorded) {
      run_prepare(p, plan.dtype, plan.op, recorded);
      backward_from_checkpoints(plan, args, b, dots, recorded);
    });
  }

  WeightGradients w;
  w.args = args;
  w.shape = s;
  w.dtype = plan.dtype;
  w.g = loop.g;
  w.states = b.states;
  if (dots_come_late(plan, s)) {
    w.dots = loop.dots;
    w.weights = loop.weights;
  }
  if (plan.needs_dweights()) {
    w.c = loop.c;
    w.stretch_c = b.stretch_c;
    w.active_rows = b.active_rows;
    w.parts = b.parts;
    w.sides = static_cast<int>(ceil_div(plan.N, kSide));
    w.depth_splits = b.depth_splits;
    w.first_channel = plan.grad.dWo.defined() ? 0 : 1;
    w.last_channel = plan.grad.dWa.defined() ? s.channels : 1;
  }
  if (s.hopper) {
    run_hopper_dweights(w, plan.op, stream);
  } else {
    run_dweights(w, plan.op, stream);
  }
  const RingRnnGradients& grad = plan.grad;
  if (dots || grad.dJ0.defined() || grad.dalpha.defined() || w.depth_splits > 1) {
    run_gather(loop, w, plan.dtype, plan.op, stream);
  }
  ran_on(plan.op, DeviceType::kCUDA, kernels_of(s));
}

}  // namespace annulus::ring_rnn::cuda::tensor
