// Calls that must give the same bits: a sequence in pieces, checkpoints, padding, packed
// weights, resets and masks. In every dtype and precision a device has.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "annulus/ring_rnn/test/calls.h"

namespace annulus::testing {
namespace {

constexpr std::array kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kActivations = {RingRnnActivation::kRelu, RingRnnActivation::kGelu,
                                     RingRnnActivation::kTanh, RingRnnActivation::kSilu};

class RingRnnBits : public EachDevice {
 protected:
  // f(dtype, options) for every dtype, precision and some activation.
  template <class F>
  void for_each_mode(F&& f) {
    std::size_t n = 0;
    for (const DType dtype : kDTypes) {
      for (const Precision precision : precisions_of(device(), dtype)) {
        RingRnnOptions options;
        options.precision = precision;
        options.activation = kActivations[n++ % 4];
        SCOPED_TRACE(std::string(name_of(dtype)) + ", precision " +
                     std::to_string(static_cast<int>(precision)) + ", activation " +
                     std::to_string(static_cast<int>(options.activation)));
        f(dtype, options);
      }
    }
  }
  Context context;
};
ANNULUS_EACH_DEVICE(RingRnnBits);

// h_n fed back as r0: nothing shows where a sequence was cut, not even at a reset or a mask.
TEST_P(RingRnnBits, ASequenceInPieces) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    const RingNetwork n(device(), dtype, 19, 13, 3, 37);
    const RingRnnInputs in = n.all_inputs();
    const RingResults whole = run_forward(n, in, options, context), parts(n);
    for (const std::vector<std::int64_t>& cuts :
         {std::vector<std::int64_t>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {5, 8}, {2, 0, 7, 4}}) {
      Dense state(device(), wide(dtype), {n.B, n.N});
      state.write(n.r0.values());
      std::int64_t t = 0;
      for (const std::int64_t count : cuts) {
        RingRnnInputs piece = in;
        piece.r0 = state.view();
        RingRnnOutputs to = parts.outputs();
        for (TensorView* v : {&piece.A, &piece.drive, &piece.reset, &piece.mask, &to.out}) {
          *v = steps(*v, t, count);
        }
        ring_rnn_forward(piece, to, options, context);
        state.write(parts.h_n.values());
        t += count;
      }
      ASSERT_EQ(t, n.T);
      EXPECT_TRUE(whole.same_states(parts)) << cuts.size() << " pieces";
    }
  });
}

TEST_P(RingRnnBits, CheckpointsChangeNothing) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    const RingNetwork n(device(), dtype, 9, 11, 2, 21);
    const RingResults kept = run_both(n, n.all_inputs(), options, context);
    for (const std::int64_t checkpoint : {1, 2, 3, 4, 10, 11, 50}) {
      options.checkpoint = checkpoint;
      EXPECT_TRUE(kept.same_bits(run_both(n, n.all_inputs(), options, context))) << checkpoint;
    }
  });
}

// Nor does it change the output that the forward is asked for more than that.
TEST_P(RingRnnBits, OtherOutputsChangeNothing) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    const RingNetwork n(device(), dtype, 5, 4, 2, 33);
    const RingResults alone(n), beside(n);
    const Dense saved(device(), wide(dtype), {n.T, n.B, n.N});
    RingRnnOutputs one, all = beside.outputs_and_readout();
    one.out = alone.out.view();
    all.saved = saved.view();
    ring_rnn_forward(n.inputs(), one, options, context);
    ring_rnn_forward(n.inputs(), all, options, context);
    EXPECT_TRUE(alone.out.bytes() == beside.out.bytes());
  });
}

// Channels of exact zeros at the end change no bit of anything that was there; on the CPU in between,
// too (on tensor cores even and odd channels have sums of their own, or parts of the GPU).
TEST_P(RingRnnBits, PaddedChannelsChangeNothing) {
  struct Padding {
    std::int64_t N, wide;
    std::size_t apart;  // channel k of the narrow one is channel `apart` k of the wide one
  };
  const std::size_t spread = device() == kCPU ? 2 : 1;
  for (const Padding& padding : {Padding{29, 16, spread}, Padding{320, 40, 1}}) {
    const std::int64_t N = padding.N;
    const auto K = static_cast<std::size_t>(padding.wide);
    const std::size_t apart = padding.apart;
    for_each_mode([&](DType dtype, RingRnnOptions options) {
      const RingNetwork n(device(), dtype, 21, 3, 3, N);
      RingNetwork wide(device(), dtype, 21, 3, padding.wide, N);
      // All other channels are zero, their weights are not.
      const std::vector<double> A = n.A.values(), Wa = n.Wa.values();
      std::vector<double> wide_A(21 * 3 * K, 0.0), wide_Wa = wide.Wa.values();
      for (std::size_t i = 0; i < A.size(); ++i) wide_A[i / 3 * K + i % 3 * apart] = A[i];
      const auto matrix = static_cast<std::size_t>(N * N);
      for (std::size_t i = 0; i < Wa.size(); ++i) {
        wide_Wa[i / matrix * apart * matrix + i % matrix] = Wa[i];
      }
      wide.A.write(wide_A);
      wide.Wa.write(wide_Wa);
      using R = RingNetwork;
      wide.copy(
          n, {&R::Wo, &R::r0, &R::drive, &R::reset, &R::reset_state, &R::mask, &R::dout, &R::dh_n});
      const RingResults narrow = run_both(n, n.all_inputs(), options, context);
      const RingResults padded = run_both(wide, wide.all_inputs(), options, context);
      EXPECT_TRUE(narrow.same_states(padded));
      for (const auto t :
           {&RingResults::dWo, &RingResults::dr0, &RingResults::ddrive, &RingResults::dJ0}) {
        EXPECT_TRUE((narrow.*t).bytes() == (padded.*t).bytes());
      }
      const std::vector<double> dA = narrow.dA.values(), wide_dA = padded.dA.values();
      for (std::size_t i = 0; i < dA.size(); ++i) {
        ASSERT_EQ(dA[i], wide_dA[i / 3 * K + i % 3 * apart]);
      }
      const std::vector<double> dWa = narrow.dWa.values(), wide_dWa = padded.dWa.values();
      for (std::size_t i = 0; i < wide_dWa.size(); ++i) {
        const std::size_t k = i / matrix;
        const bool there = k % apart == 0 && k / apart < 3;
        ASSERT_EQ(wide_dWa[i], there ? dWa[k / apart * matrix + i % matrix] : 0.0)
            << "channel " << k;
      }
    });
  }
}

TEST_P(RingRnnBits, PackedWeightsChangeNothing) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    const RingNetwork n(device(), dtype, 17, 4, 3, 41), other(device(), dtype, 17, 4, 3, 41, 9);
    const std::int64_t words = ring_rnn_pack_size(n.Wa.view(), n.Wo.view(), options);
    const Dense packed(device(), DType::kI32, {words});
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(packed.view().data) % 256, 0u);
    ring_rnn_pack(n.Wa.view(), n.Wo.view(), packed.view(), options, context);
    const RingResults plain = run_forward(n, n.all_inputs(), options, context), from_packed(n);
    // Good for every B and T, and then Wa and Wo are not read: those of another network do.
    for (const std::int64_t count : {4, 1}) {
      RingRnnInputs in = n.all_inputs();
      in.Wa = other.Wa.view();
      in.Wo = other.Wo.view();
      in.packed = packed.view();
      RingRnnOutputs out = from_packed.outputs();
      for (TensorView* v : {&in.A, &in.drive, &in.reset, &in.mask, &out.out}) {
        *v = steps(*v, 0, count);
      }
      ring_rnn_forward(in, out, options, context);
    }
    EXPECT_TRUE(plain.out.bytes() == from_packed.out.bytes());
  });
}

// A reset of every sample before step t is the end of one call and the start of another.
TEST_P(RingRnnBits, AResetIsANewCall) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    const RingNetwork n(device(), dtype, 7, 9, 2, 26);
    std::vector<double> flags(7 * 9, 0.0);
    for (std::size_t b = 0; b < 7; ++b) flags[b * 9 + 4] = 1;
    Dense reset(device(), DType::kBool, {7, 9});
    reset.write(flags);
    for (const bool own_state : {false, true}) {
      RingRnnInputs in = n.inputs();
      in.drive = n.drive.view();
      in.reset = reset.view();
      if (own_state) in.reset_state = n.reset_state.view();
      const RingResults whole = run_forward(n, in, options, context), parts(n);
      in.reset = in.reset_state = {};
      for (const auto& [first, count] : {std::pair{0, 4}, std::pair{4, 5}}) {
        RingRnnInputs piece = in;
        if (first > 0 && own_state) piece.r0 = n.reset_state.view();
        RingRnnOutputs to = parts.outputs();
        for (TensorView* v : {&piece.A, &piece.drive, &to.out}) *v = steps(*v, first, count);
        ring_rnn_forward(piece, to, options, context);
      }
      EXPECT_TRUE(whole.same_states(parts)) << own_state;
    }
  });
}

// Sequences of different lengths: each sample as far as its mask is as it would be alone, then it
// stands still. (Gradients of masks: the cases.)
TEST_P(RingRnnBits, AMaskIsAShorterSequence) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    RingNetwork n(device(), dtype, 6, 8, 2, 23);
    const std::array<std::size_t, 6> length = {8, 1, 5, 3, 7, 0};
    std::vector<double> mask;
    for (std::size_t i = 0; i < 6 * 8; ++i) mask.push_back(i % 8 < length[i / 8] ? 1 : 0);
    n.mask.write(mask);
    RingRnnInputs in = n.inputs();
    in.drive = n.drive.view();
    const RingResults free = run_forward(n, in, options, context);
    in.mask = n.mask.view();
    const RingResults masked = run_forward(n, in, options, context);
    const std::vector<double> a = free.out.values(), b = masked.out.values();
    for (std::size_t i = 0; i < b.size(); ++i) {
      const std::size_t s = i / 23 / 8, t = i / 23 % 8;
      if (length[s] == 0) continue;
      ASSERT_EQ(b[i], a[(s * 8 + std::min(t, length[s] - 1)) * 23 + i % 23]) << s << " " << t;
    }
  });
}

// Samples of a batch know nothing of each other.
TEST_P(RingRnnBits, PermutingTheBatchPermutesTheOutput) {
  for_each_mode([&](DType dtype, RingRnnOptions options) {
    const RingNetwork n(device(), dtype, 37, 4, 3, 18);
    RingRnnInputs in = n.all_inputs();
    const RingResults straight = run_forward(n, in, options, context), turned(n);
    // Batch entries in reverse, by strides alone.
    const auto reversed = [](TensorView v) {
      v.data = static_cast<std::byte*>(v.data) + (v.shape[0] - 1) * v.stride[0] * size_of(v.dtype);
      v.stride[0] = -v.stride[0];
      return v;
    };
    RingRnnOutputs out = turned.outputs();
    for (TensorView* v :
         {&in.A, &in.r0, &in.drive, &in.reset, &in.reset_state, &in.mask, &out.out, &out.h_n}) {
      *v = reversed(*v);
    }
    ring_rnn_forward(in, out, options, context);
    EXPECT_TRUE(straight.same_states(turned));
  });
}

}  // namespace
}  // namespace annulus::testing
