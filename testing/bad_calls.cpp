#include "testing/bad_calls.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/operator.h"
#include "annulus/cuda/memory.h"
#include "testing/reference.h"

namespace annulus::testing {

TensorView AttemptTensors::input(const char* name, std::vector<std::int64_t> shape, DType t) {
  const TensorSpec spec{name, t, std::move(shape)};
  return input_of(spec, std::vector<double>(static_cast<std::size_t>(numel_of(spec)), 0.25));
}

TensorView AttemptTensors::input_of(const TensorSpec& spec, const std::vector<double>& values) {
  return tensors_.emplace_back(spec, Layout::kContiguous, device_, &values).view();
}

TensorView AttemptTensors::output(const char* name, std::vector<std::int64_t> shape, DType t) {
  const TensorSpec spec{name, t, std::move(shape)};
  return tensors_.emplace_back(spec, Layout::kContiguous, device_).view();
}

void AttemptTensors::verify_untouched() {
  for (TestTensor& t : tensors_) t.fetch();
  finish(device_);
  for (TestTensor& t : tensors_) {
    std::vector<std::uint64_t> bits;
    const std::string fault = t.collect(&bits);
    if (!fault.empty()) throw std::logic_error("a refused call wrote: " + fault);
    const auto written = [&](std::uint64_t b) { return b != poison_bits(t.spec().dtype); };
    if (!t.is_input() && std::any_of(bits.begin(), bits.end(), written)) {
      throw std::logic_error("a refused call wrote to " + t.spec().name);
    }
  }
}

namespace {

// Where a list's argument stands among a call's tensors.
struct Place {
  bool output;
  std::size_t index;
};

// A call of a case on tensors of its own.
class Trial {
 public:
  // Integers as the case has them: those that say where to read may have rules of their own.
  Trial(const Values& values, const Call& call, Device device) : call_(call), tensors_(device) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const TensorSpec& s = call.inputs[i];
      in_.push_back(is_floating(s.dtype) ? tensors_.input(s.name.c_str(), s.shape, s.dtype)
                                         : tensors_.input_of(s, values[i]));
    }
    for (const TensorSpec& s : call.outputs)
      out_.push_back(tensors_.output(s.name.c_str(), s.shape, s.dtype));
  }

  TensorView& at(Place p) { return (p.output ? out_ : in_)[p.index]; }
  // By its memory. Not there: empty, or made inside the call.
  std::optional<Place> find(const Argument& a) const {
    if (!a.view.defined() || a.view.numel() == 0) return std::nullopt;
    for (const bool output : {true, false}) {
      const std::vector<TensorView>& views = output ? out_ : in_;
      for (std::size_t i = 0; i < views.size(); ++i) {
        if (views[i].data == a.view.data) return Place{output, i};
      }
    }
    return std::nullopt;
  }
  void move_to(Device device) {
    for (TensorView& v : in_) v.device = device;
    for (TensorView& v : out_) v.device = device;
  }
  void run() {
    Context context;
    context.threads = threads;
    call_.run(in_, out_, context);
  }
  void run_refused() {
    tensors_.attempt([&] { run(); });
  }

  int threads = 0;

 private:
  const Call& call_;
  AttemptTensors tensors_;
  std::vector<TensorView> in_, out_;
};

using Fault = std::function<void(TensorView&)>;

// Every way in which one argument can be wrong whatever the others are.
std::vector<std::pair<std::string, Fault>> faults_of(const Argument& a, bool leads, Device other) {
  std::vector<std::pair<std::string, Fault>> all;
  const auto add = [&](std::string what, Fault f) {
    all.emplace_back(std::move(what), std::move(f));
  };
  const int rank = a.view.rank;
  if (!a.optional) add("is missing", [](TensorView& v) { v = {}; });
  if (rank > (a.scalar_too ? 1 : 0)) add("has a dimension less", [](TensorView& v) { --v.rank; });
  const int more = a.scalar_too && rank == 0 ? 2 : 1;  // one more would be right
  if (rank + more <= kMaxRank) {
    add("has a dimension more", [more](TensorView& v) {
      for (int i = 0; i < more; ++i) {
        const auto last = static_cast<std::size_t>(v.rank++);
        v.shape[last] = v.stride[last] = 1;
      }
    });
  }
  for (const int forged : {kMaxRank + 1, 100'000}) {
    add("says it has " + std::to_string(forged) + " dimensions",
        [forged](TensorView& v) { v.rank = forged; });
  }
  const auto allowed = a.dtypes.all();
  for (const DType t : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI32,
                        DType::kI64, DType::kBool}) {
    if (std::find(allowed.begin(), allowed.end(), t) != allowed.end()) continue;
    add(std::string("is ") + name_of(t), [t](TensorView& v) { v.dtype = t; });
  }
  add("has a dtype that is none", [](TensorView& v) { v.dtype = static_cast<DType>(99); });
  if (!leads) add("is on another device", [other](TensorView& v) { v.device = other; });
  add("is a null pointer", [](TensorView& v) { v.data = nullptr; });
  if (size_of(a.view.dtype) > 1) {
    add("is not aligned to its elements", [](TensorView& v) { shift_bytes(v, 1); });
  }
  if (rank > 1) {
    add("has sizes whose product is beyond 2^63", [](TensorView& v) { v.shape.fill(1ll << 40); });
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(rank); ++i) {
    const std::string where = " in dimension " + std::to_string(i);
    add("has a negative size" + where, [i](TensorView& v) { v.shape[i] = -2; });
    if (i < a.shape.count && a.shape.value[i] != kAny) {
      add("is longer" + where, [i](TensorView& v) { ++v.shape[i]; });
      add("is shorter" + where, [i](TensorView& v) { --v.shape[i]; });
    }
    if (a.view.shape[i] < 2) continue;
    add("reaches beyond 2^63" + where, [i](TensorView& v) { v.stride[i] = INT64_MAX; });
    if (a.output) add("has stride 0" + where, [i](TensorView& v) { v.stride[i] = 0; });
  }
  return all;
}

// Of a call of a case, which `of` keeps: what its list says, where `seen` has not had it.
void add_derived(const std::shared_ptr<const Case>& of, const Call& call, Device device,
                 std::set<std::string>& seen, std::vector<BadCall>& calls) {
  const Device other = device.type == DeviceType::kCPU ? cuda_device(0) : kCPU;
  const auto values = std::make_shared<const Values>(draw_inputs(*of, call));
  Trial trial(*values, call, device);
  ArgumentsRecorder recorder;
  trial.run();
  if (recorder.calls.empty()) return;
  const auto& [op, list] = recorder.calls.back();
  using Expect = BadCall::Expect;
  const auto push = [&](std::string what, const char* argument, auto spoil,
                        Expect expect = Expect::kInvalidArgument) {
    calls.push_back({std::move(what), expect, argument, [of, values, &call, spoil](Device d) {
                       Trial t(*values, call, d);
                       spoil(t);
                       t.run_refused();
                     }});
  };
  for (const Argument& a : list) {
    const auto place = trial.find(a);
    if (!place) continue;
    const std::string name = op + ": " + a.name + " ";
    // What is right depends on the dtype and, for a parameter, on the rank.
    if (seen.insert(name + name_of(a.view.dtype) + std::to_string(a.view.rank)).second) {
      for (auto& [what, fault] : faults_of(a, &a == list.data(), other)) {
        push(name + what, a.name, [p = *place, f = fault](Trial& t) { f(t.at(p)); });
      }
    }
    for (const Argument& b : list) {
      const auto beside = trial.find(b);
      const bool itself = a.same_as == b.name;
      if (!a.output || &a == &b || itself || !beside) continue;
      if (!seen.insert(name + "over " + b.name).second) continue;
      push(name + "overlaps " + b.name, a.name,
           [p = *place, q = *beside](Trial& t) { t.at(p).data = t.at(q).data; });
    }
  }
  if (!seen.insert(op).second) return;
  push(op + ": a negative number of threads", "threads", [](Trial& t) { t.threads = -2; });
  if (device.type == DeviceType::kCPU && !cuda::built()) {
    push(
        op + ": CUDA tensors in a build without CUDA", "CUDA",
        [](Trial& t) { t.move_to(cuda_device(0)); }, Expect::kNotSupported);
  }
}

}  // namespace

std::vector<BadCall> all_bad_calls(const OperatorCases& op, Device device) {
  constexpr std::int64_t kSmall = 1 << 13;  // elements of calls that are quickly tried
  std::vector<BadCall> all;
  if (op.bad_calls) all = op.bad_calls(device);
  std::set<std::string> seen;
  for (Case& c : op.named()) {
    const auto of = std::make_shared<const Case>(std::move(c));
    for (const Call& call : of->calls) {
      std::int64_t elements = 0;
      for (const TensorSpec& s : call.inputs) elements += numel_of(s);
      for (const TensorSpec& s : call.outputs) elements += numel_of(s);
      if (elements <= kSmall) add_derived(of, call, device, seen, all);
    }
  }
  return all;
}

void set_shape(TensorView& v, std::initializer_list<std::int64_t> shape) {
  v = contiguous(v.data, v.dtype, {shape.begin(), shape.size()}, v.device);
}

void shift_bytes(TensorView& v, int bytes) { v.data = static_cast<std::byte*>(v.data) + bytes; }

}  // namespace annulus::testing
