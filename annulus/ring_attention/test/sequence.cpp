#include "annulus/ring_attention/test/sequence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "annulus/attention/test/parts.h"
#include "annulus/core/values.h"
#include "annulus/ring_attention/test/shard.h"
#include "testing/memory/tensors.h"
#include "testing/reference.h"

namespace annulus::testing {

namespace {

using P = AttentionProblem;
using Form = P::Form;

// The options of the problem, as the operator of its form takes them.
template <class F>
void with_options(const P& p, const RingTensors& t, F&& f) {
  switch (p.form) {
    case Form::kDilated:
      return f(dilated_options(p), dilated_attention_forward, dilated_attention_backward);
    case Form::kBlocks:
      return f(block_options(p, t.row_ptr, t.col_idx, {}), block_sparse_attention_forward,
               block_sparse_attention_backward);
    default:
      return f(dense_options(p, {}, {}), attention_forward, attention_backward);
  }
}

}  // namespace

RingSequence::RingSequence(const AttentionProblem& p, Device device) : problem_(p) {
  Rng rng(p.seed);
  const auto keep = [&](const std::vector<char>& values, DType t,
                        const std::vector<std::int64_t>& shape) {
    memory_.emplace_back(device, values.size());
    copy_bytes(memory_.back().data(), device, values.data(), kCPU, values.size());
    return contiguous(memory_.back().data(), t, shape, device);
  };
  const auto make = [&](const std::vector<std::int64_t>& shape, DType t, bool drawn) {
    std::int64_t n = 1;
    for (const std::int64_t s : shape) n *= s;
    std::vector<char> values(static_cast<std::size_t>(n * size_of(t)));
    for (std::int64_t i = 0; i < n && drawn; ++i) {
      const std::uint64_t bits = encode(rng.normal(), t);
      std::memcpy(values.data() + i * size_of(t), &bits, static_cast<std::size_t>(size_of(t)));
    }
    return keep(values, t, shape);
  };
  const std::vector<std::int64_t> q = {p.B, p.Tq, p.H, p.D}, k = {p.B, p.Tq, p.Hkv, p.D},
                                  v = {p.B, p.Tq, p.Hkv, p.Dv}, o = {p.B, p.Tq, p.H, p.Dv},
                                  lse = {p.B, p.H, p.Tq};
  whole_.q = make(q, p.dtype, true);
  whole_.k = make(k, p.dtype, true);
  whole_.v = make(v, p.dtype, true);
  whole_.do_ = make(o, p.dtype, true);
  whole_.dlse = p.dlse ? make(lse, DType::kF32, true) : TensorView{};
  whole_.o = make(o, p.dtype, false);
  whole_.lse = make(lse, DType::kF32, false);
  whole_.dq = make(q, p.dtype, false);
  whole_.dk = make(k, p.dtype, false);
  whole_.dv = make(v, p.dtype, false);
  for (const NamedIntegers& i : integers_of(p)) {
    std::vector<char> values(i.values.size() * static_cast<std::size_t>(size_of(i.dtype)));
    for (std::size_t e = 0; e < i.values.size(); ++e) {
      const auto narrow = static_cast<std::int32_t>(i.values[e]);
      if (i.dtype == DType::kI64) std::memcpy(values.data() + 8 * e, &i.values[e], 8);
      if (i.dtype == DType::kI32) std::memcpy(values.data() + 4 * e, &narrow, 4);
    }
    const TensorView view = keep(values, i.dtype, i.shape);
    (std::string(i.name) == "row_ptr" ? whole_.row_ptr : whole_.col_idx) = view;
  }
}

std::string RingSequence::run(int ranks, Balance balance, bool deterministic, std::int64_t slice) {
  const RingProblem ring{problem_, ranks, balance, deterministic, slice};
  run_ranks(ring, whole_, false);
  run_ranks(ring, whole_, true);
  std::string bytes;
  for (const TensorView* t : {&whole_.o, &whole_.lse, &whole_.dq, &whole_.dk, &whole_.dv}) {
    std::string values(static_cast<std::size_t>(t->numel() * size_of(t->dtype)), '\0');
    copy_bytes(values.data(), kCPU, t->data, t->device, values.size());
    bytes += values;
  }
  return bytes;
}

std::string RingSequence::apart(const std::string& one, const std::string& two) const {
  std::string text;
  std::size_t at = 0;
  const std::pair<const char*, TensorView> all[] = {{"o", whole_.o},
                                                    {"lse", whole_.lse},
                                                    {"dq", whole_.dq},
                                                    {"dk", whole_.dk},
                                                    {"dv", whole_.dv}};
  for (const auto& [name, t] : all) {
    const auto size = static_cast<std::size_t>(size_of(t.dtype));
    std::int64_t count = 0, first = -1;
    for (std::int64_t i = 0; i < t.numel(); ++i, at += size) {
      if (one.compare(at, size, two, at, size) == 0) continue;
      if (count++ == 0) first = i;
    }
    if (count > 0) {
      text += std::string(" ") + name + ": " + std::to_string(count) + " of " +
              std::to_string(t.numel()) + ", the first " + std::to_string(first);
    }
  }
  return text;
}

void RingSequence::run_alone() {
  const RingTensors& t = whole_;
  Context context;
  context.threads = 1;
  with_options(problem_, t, [&](const auto& options, auto forward, auto backward) {
    forward(t.q, t.k, t.v, t.o, t.lse, options, context);
    backward(t.do_, t.dlse, t.q, t.k, t.v, t.o, t.lse, t.dq, t.dk, t.dv, options, context);
  });
}

void RingSequence::run_as_rank(const RingProblem& ring, Communicator& group, bool same_bits) const {
  RingShard shard(ring, group.rank(), whole_);
  const RingShard before(ring, group.rank(), whole_);
  shard.clear_outputs();
  const RingTensors& t = shard.view();
  Context context;
  context.threads = 1;
  const auto values = [](const TensorView& v) {
    std::vector<char> bytes(static_cast<std::size_t>(v.numel() * size_of(v.dtype)));
    copy_bytes(bytes.data(), kCPU, v.data, v.device, bytes.size());
    return load_values<double>(contiguous(bytes.data(), v.dtype, v.sizes()));
  };
  const auto call = [&](bool backward, const std::vector<TensorView RingTensors::*>& outputs) {
    try {
      backward ? ring_backward(ring, t, group, context) : ring_forward(ring, t, group, context);
    } catch (const std::exception&) {
      for (const auto member : outputs) {
        for (const double x : values(t.*member)) {
          if (!std::isnan(x)) throw std::logic_error("WRONG VALUE: an output is not poisoned");
        }
      }
      for (const auto member :
           {&RingTensors::q, &RingTensors::k, &RingTensors::v, &RingTensors::do_}) {
        if (values(t.*member) != values(before.view().*member)) {
          throw std::logic_error("WRONG VALUE: an input has changed");
        }
      }
      throw;
    }
    for (const auto member : outputs) {
      const std::vector<double> got = values(t.*member), want = values(before.view().*member);
      if (same_bits && got != want) throw std::logic_error("WRONG VALUE: bits differ");
      // On CUDA fp32 is three products of bf16.
      const double limit = problem_.dtype != DType::kF32 ? 2e-2 : t.q.device == kCPU ? 1e-5 : 4e-5;
      if (const double error = relative_error(got, want); !(error <= limit)) {
        throw std::logic_error("WRONG VALUE: a result differs by " + std::to_string(error));
      }
    }
  };
  call(false, {&RingTensors::o, &RingTensors::lse});
  call(true, {&RingTensors::dq, &RingTensors::dk, &RingTensors::dv});
}

}  // namespace annulus::testing
