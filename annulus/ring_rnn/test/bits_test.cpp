// Calls that must give the same bits: a sequence in pieces, checkpoints, padding, packed weights,
// resets and masks. In every dtype and precision a device has.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "annulus/ring_rnn/test/live.h"

namespace annulus::testing {
namespace {

constexpr std::array kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kActivations = {RingRnnActivation::kRelu, RingRnnActivation::kGelu,
                                     RingRnnActivation::kTanh, RingRnnActivation::kSilu};

class RingRnnBits : public EachDevice {
 protected:
  // f(problem, its inputs) for every dtype, precision and some activation.
  template <class F>
  void for_each_mode(std::int64_t B, std::int64_t T, std::int64_t K, std::int64_t N, F&& f) {
    std::size_t n = 0;
    for (const DType dtype : kDTypes) {
      for (const Precision precision : precisions_of(device(), dtype)) {
        RingRnnProblem p = live(dtype, B, T, K, N);
        p.precision = precision;
        p.activation = kActivations[n++ % 4];
        const Case c = ring_rnn_case(p);
        SCOPED_TRACE(c.params);
        f(p, draw(c));
      }
    }
  }
  Tensors run(const RingRnnProblem& p, const Tensors& in) {
    return testing::run(ring_rnn_case(p), device(), context, in);
  }
  Tensors run_forward(RingRnnProblem p, const Tensors& in) {
    p.gradients = 0;
    return run(p, in);
  }

  Context context;
};
ANNULUS_EACH_DEVICE(RingRnnBits);

// Steps first .. first + count - 1 of a tensor (B, T, ...).
Vector steps(const RingRnnProblem& p, const Vector& v, std::int64_t first, std::int64_t count) {
  const std::size_t width = v.size() / static_cast<std::size_t>(p.B * p.T);
  std::vector<double> cut;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const double* from = begin(v) + static_cast<std::size_t>(b * p.T + first) * width;
    cut.insert(cut.end(), from, from + static_cast<std::size_t>(count) * width);
  }
  return vector_of(cut);
}
Tensors steps(const RingRnnProblem& p, Tensors t, std::int64_t first, std::int64_t count) {
  for (const char* name : {"A", "drive", "reset", "mask"}) {
    t[name] = steps(p, t.at(name), first, count);
  }
  return t;
}

// h_n fed back as r0: nothing shows where a sequence was cut, not even at a reset or a mask.
TEST_P(RingRnnBits, ASequenceInPieces) {
  for_each_mode(19, 13, 3, 37, [&](const RingRnnProblem& p, const Tensors& in) {
    const Tensors whole = run_forward(p, in);
    for (const std::vector<std::int64_t>& cuts :
         {std::vector<std::int64_t>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {5, 8}, {2, 0, 7, 4}}) {
      Vector state = in.at("r0");
      std::int64_t t = 0;
      for (const std::int64_t count : cuts) {
        Tensors piece = steps(p, in, t, count);
        piece["r0"] = state;
        RingRnnProblem q = p;
        q.T = count;
        piece = run_forward(q, piece);
        EXPECT_TRUE(same_bits(piece["out"], steps(p, whole.at("out"), t, count))) << t;
        state = piece["h_n"];
        t += count;
      }
      EXPECT_TRUE(same_bits(state, whole.at("h_n"))) << cuts.size() << " pieces";
    }
  });
}

TEST_P(RingRnnBits, CheckpointsChangeNothing) {
  for_each_mode(9, 11, 2, 21, [&](RingRnnProblem p, const Tensors& in) {
    Tensors kept = run(p, in);
    kept.erase("saved");
    for (const std::int64_t checkpoint : {1, 2, 3, 4, 10, 11, 50}) {
      p.checkpoint = checkpoint;
      EXPECT_EQ(differing(kept, run(p, in)), "") << checkpoint;
    }
  });
}

// Nor does it change the output that the forward is asked for more than that.
TEST_P(RingRnnBits, OtherOutputsChangeNothing) {
  for_each_mode(5, 4, 2, 33, [&](const RingRnnProblem& p, const Tensors& in) {
    RingRnnProblem alone = p, all = p;
    alone.h_n = alone.dh_n = false;
    all.readout = true;
    EXPECT_EQ(differing(run_forward(alone, in), run(all, in)), "");
  });
}

// Channels of exact zeros at the end change no bit of anything that was there; on the CPU in between,
// too (on tensor cores even and odd channels have sums of their own, or parts of the GPU).
TEST_P(RingRnnBits, PaddedChannelsChangeNothing) {
  struct Padding {
    std::size_t N, K;
    std::size_t apart;  // channel k of the narrow one is channel `apart` k of the wide one
  };
  const std::size_t spread = device() == kCPU ? 2 : 1;
  const std::size_t many = device() == kCPU ? 96 : 320;  // several tiles of neurons
  for (const auto& [N, K, apart] : {Padding{29, 16, spread}, Padding{many, 40, 1}}) {
    const std::size_t matrix = N * N;
    for_each_mode(21, 3, 3, static_cast<std::int64_t>(N), [&](RingRnnProblem p, const Tensors& in) {
      const Tensors narrow = run(p, in);
      p.K = static_cast<std::int64_t>(K);
      Tensors wide = draw(ring_rnn_case(p));  // all other channels are zero, their weights are not
      wide["A"] = 0.0;
      for (const auto& [name, values] : in) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          const std::size_t at = name == "A"    ? i / 3 * K + i % 3 * apart
                                 : name == "Wa" ? i / matrix * apart * matrix + i % matrix
                                                : i;
          wide[name][at] = values[i];
        }
      }
      wide = run(p, wide);
      for (const char* name : {"out", "h_n", "dWo", "dr0", "ddrive", "dJ0"}) {
        EXPECT_TRUE(same_bits(narrow.at(name), wide[name])) << name;
      }
      const Vector &dA = narrow.at("dA"), &dWa = narrow.at("dWa");
      for (std::size_t i = 0; i < dA.size(); ++i) {
        ASSERT_EQ(dA[i], wide["dA"][i / 3 * K + i % 3 * apart]);
      }
      for (std::size_t i = 0; i < wide["dWa"].size(); ++i) {
        const std::size_t k = i / matrix;
        const bool there = k % apart == 0 && k / apart < 3;
        ASSERT_EQ(wide["dWa"][i], there ? dWa[k / apart * matrix + i % matrix] : 0.0)
            << "channel " << k;
      }
    });
  }
}

// Made once, good for every B and T; Wa and Wo are then not read: other weights do.
TEST_P(RingRnnBits, PackedWeightsChangeNothing) {
  for_each_mode(17, 4, 3, 41, [&](const RingRnnProblem& p, const Tensors& in) {
    const RingRnnOptions options{.activation = p.activation, .precision = p.precision};
    Dense Wa(device(), p.dtype, {3, 41, 41}), Wo(device(), p.dtype, {41, 41});
    Wa.write(values_of(in.at("Wa")));
    Wo.write(values_of(in.at("Wo")));
    const Dense packed(device(), DType::kI32, {ring_rnn_pack_size(Wa.view(), Wo.view(), options)});
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(packed.view().data) % 256, 0u);
    const RingRnnPackedForm form =
        ring_rnn_pack(Wa.view(), Wo.view(), packed.view(), options, context);
    const Tensors whole = run_forward(p, in);
    for (const std::int64_t count : {4, 1}) {
      RingRnnProblem q = p;
      q.T = count;
      q.gradients = 0;
      Call call = ring_rnn_case(q).calls[0];
      call.run = [&](Views from, Views to, Context&) {
        RingRnnInputs inputs = ring_inputs(q, from, call.inputs);
        inputs.packed = packed.view();
        inputs.packed_form = form;
        ring_rnn_forward(inputs, ring_outputs(to, call.outputs), options, context);
      };
      Tensors t = steps(p, in, 0, count);
      for (const char* name : {"Wa", "Wo"}) t[name] = 1.0;
      testing::run(call, device(), context, t);
      EXPECT_TRUE(same_bits(t["out"], steps(p, whole.at("out"), 0, count))) << count;
    }
  });
}

// A reset of every sample before step t is the end of one call and the start of another.
TEST_P(RingRnnBits, AResetIsANewCall) {
  for_each_mode(7, 9, 2, 26, [&](RingRnnProblem p, Tensors in) {
    in["reset"] = 0.0;
    in["reset"][std::slice(4, 7, 9)] = 1.0;
    for (const bool own_state : {false, true}) {
      p.reset = true;
      p.reset_state = own_state;
      const Tensors whole = run_forward(p, in);
      RingRnnProblem q = p;
      q.reset = q.reset_state = false;
      Tensors piece;
      for (const auto& [first, count] : {std::pair{0, 4}, std::pair{4, 5}}) {
        piece = steps(p, in, first, count);
        if (first > 0 && own_state) piece["r0"] = in["reset_state"];
        q.T = count;
        piece = run_forward(q, piece);
        EXPECT_TRUE(same_bits(piece["out"], steps(p, whole.at("out"), first, count))) << own_state;
      }
      EXPECT_TRUE(same_bits(piece["h_n"], whole.at("h_n"))) << own_state;
    }
  });
}

// Sequences of different lengths: each sample as far as its mask is as it would be alone, then it
// stands still. (Gradients of masks: the cases.)
TEST_P(RingRnnBits, AMaskIsAShorterSequence) {
  for_each_mode(6, 8, 2, 23, [&](RingRnnProblem p, Tensors in) {
    const std::array<std::size_t, 6> length = {8, 1, 5, 3, 7, 0};
    for (std::size_t i = 0; i < 6 * 8; ++i) in["mask"][i] = i % 8 < length[i / 8] ? 1 : 0;
    p.reset = p.reset_state = false;
    const Tensors masked = run_forward(p, in);
    p.mask = false;
    const Tensors free = run_forward(p, in);
    const Vector &a = free.at("out"), &b = masked.at("out");
    for (std::size_t i = 0; i < b.size(); ++i) {
      const std::size_t s = i / 23 / 8, t = i / 23 % 8;
      if (length[s] == 0) continue;
      ASSERT_EQ(b[i], a[(s * 8 + std::min(t, length[s] - 1)) * 23 + i % 23]) << s << " " << t;
    }
  });
}

// Samples of a batch know nothing of each other.
TEST_P(RingRnnBits, PermutingTheBatchPermutesTheOutput) {
  for_each_mode(37, 4, 3, 18, [&](const RingRnnProblem& p, const Tensors& in) {
    const auto reversed = [](const Vector& v) {
      const std::size_t width = v.size() / 37;
      Vector turned(v.size());
      for (std::size_t i = 0; i < v.size(); ++i)
        turned[(36 - i / width) * width + i % width] = v[i];
      return turned;
    };
    Tensors turned = in;
    for (const char* name : {"A", "r0", "drive", "reset", "reset_state", "mask"}) {
      turned[name] = reversed(in.at(name));
    }
    const Tensors straight = run_forward(p, in);
    turned = run_forward(p, turned);
    EXPECT_TRUE(same_bits(straight.at("out"), reversed(turned["out"])));
    EXPECT_TRUE(same_bits(straight.at("h_n"), reversed(turned["h_n"])));
  });
}

}  // namespace
}  // namespace annulus::testing
