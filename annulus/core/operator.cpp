#include "annulus/core/operator.h"

namespace annulus {

namespace {

thread_local ArgumentsRecorder* recorder = nullptr;

void check_rank(const char* op, const Argument& a) {
  const TensorView& v = a.view;
  if (v.rank == 0 && a.scalar_too) return;
  if (v.rank < 0 || v.rank > kMaxRank || static_cast<std::size_t>(v.rank) == a.shape.count) return;
  if (a.shape.count > 0 && !a.scalar_too) return;  // check_tensor says so
  invalid(
      op, a.name,
      a.shape.count == 0 ? "have rank 0" : "have rank 0 or shape " + shape_string(a.shape.all()),
      "has shape " + shape_string(v.sizes()));
}

void check_extents(const char* op, const Argument& a) {
  if (a.view.rank == 0) return;
  Few<std::int64_t, kMaxRank> want = a.shape;
  for (std::size_t i = 0; i < want.count; ++i) {
    if (want.value[i] == kAny) want.value[i] = a.view.shape[i];
  }
  check_shape(op, a.name, a.view, want.all());
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.defined() && b.defined() && a.data == b.data && a.stride == b.stride;
}

}  // namespace

void Arguments::check_each(bool with_data) const {
  for (const Argument& a : list_) {
    TensorView v = a.view;
    if (a.optional && !v.defined()) continue;
    // Where no data is needed an aligned address stands in for it.
    if (!with_data && v.data == nullptr) v.data = reinterpret_cast<void*>(std::uintptr_t{4096});
    check_rank(op_, a);
    check_tensor(op_, a.name, v, a.scalar_too && v.rank == 0 ? 0 : static_cast<int>(a.shape.count));
    check_dtype(op_, a.name, v, a.dtypes.all());
    check_extents(op_, a);
    check_device(op_, a.name, v, list_.front().name, list_.front().view);
    if (a.output) check_output_layout(op_, a.name, v);
  }
}

void Arguments::check_sizes() const { check_each(false); }

void Arguments::check(const Context& context) const {
  if (recorder != nullptr) recorder->calls.push_back({op_, list_});
  check_each(true);
  if (context.threads < 0) {
    invalid(op_, "threads", "be 0, for all there are, or more",
            "is " + std::to_string(context.threads));
  }
  // An output against all inputs, then against the outputs before it.
  for (auto out = list_.begin(); out != list_.end(); ++out) {
    if (!out->output) continue;
    for (auto other = list_.begin(); other != list_.end(); ++other) {
      if (other->output && other >= out) continue;
      if (out->same_as == other->name && same_view(out->view, other->view)) continue;
      check_no_overlap(op_, out->name, out->view, other->name, other->view);
    }
  }
}

ArgumentsRecorder::ArgumentsRecorder() : before_(recorder) { recorder = this; }
ArgumentsRecorder::~ArgumentsRecorder() { recorder = before_; }

}  // namespace annulus
