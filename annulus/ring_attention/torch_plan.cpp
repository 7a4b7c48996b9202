// annulus.plan_ring: figures alone, so it is an op without tensors that gives them as JSON.
#include <array>
#include <charconv>
#include <string>

#include "annulus/ring_attention/ring_attention_plan.h"
#include "python/csrc/torch_glue.h"

namespace annulus::torch_glue {
namespace {

constexpr const char* kOp = "plan_ring";
constexpr std::array<Choice<Balance>, 2> kBalances{
    {{"zigzag", Balance::kZigzag}, {"contiguous", Balance::kContiguous}}};
constexpr std::array<Choice<DType>, 3> kDtypes{
    {{"float32", DType::kF32}, {"float16", DType::kF16}, {"bfloat16", DType::kBF16}}};

// An object's members, one after another.
class Object {
 public:
  Object& add(const char* name, const std::string& json) {
    text_ += std::string(text_.empty() ? "\"" : ",\"") + name + "\":" + json;
    return *this;
  }
  Object& add(const char* name, const Object& object) { return add(name, object.text()); }
  Object& add(const char* name, bool v) { return add(name, std::string(v ? "true" : "false")); }
  Object& add(const char* name, std::int64_t v) { return add(name, std::to_string(v)); }
  // Every digit, and not by printf, whose decimal point is the process's.
  Object& add(const char* name, double v) {
    char digits[32];
    return add(name, std::string(digits, std::to_chars(digits, digits + sizeof digits, v).ptr));
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

Object memory_of(const RingMemory& m) {
  return Object().add("tensors", m.tensors).add("carried", m.carried).add("messages", m.messages);
}
Object pass_of(const RingPassPlan& p) {
  const std::string from = p.hides_from ? std::to_string(*p.hides_from) : "null";
  return Object()
      .add("bytes_sent", p.bytes.max)
      .add("mean_bytes_sent", p.bytes.mean)
      .add("hop_bytes", p.hop_bytes)
      .add("flops", p.flops.max)
      .add("work_balance", p.work_balance())
      .add("compute_s", p.compute_s.max)
      .add("transfer_s", p.transfer_s.max)
      .add("time_s", p.time_s)
      .add("hops", std::int64_t{p.hops})
      .add("hidden_hops", std::int64_t{p.hidden_hops})
      .add("hides_from", from)
      .add("memory", memory_of(p.memory));
}
Object gather_of(const GatherPlan& g) {
  return Object()
      .add("bytes_sent", g.bytes)
      .add("time_s", g.time_s)
      .add("memory", memory_of(g.memory));
}

std::string plan_json(std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads,
                      std::int64_t head_dim, std::int64_t world_size, double link_gbs,
                      std::string dtype, bool causal, std::string balance, std::int64_t window_left,
                      std::int64_t window_right, std::int64_t batch, double tflops,
                      double memory_gib, std::int64_t slice) {
  return typed_errors([&] {
    const RingPlan plan = plan_ring({.tokens = tokens,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = head_dim,
                                     .ranks = static_cast<int>(world_size),
                                     .link_bytes_per_s = link_gbs * 1e9,
                                     .flops_per_s = tflops * 1e12,
                                     .batch = batch,
                                     .dtype = chosen(kOp, "dtype", dtype, kDtypes),
                                     .causal = causal,
                                     .window_left = window_left,
                                     .window_right = window_right,
                                     .balance = chosen(kOp, "balance", balance, kBalances),
                                     .slice = slice,
                                     .memory_bytes = memory_gib * (1 << 30)});
    return Object()
        .add("forward", pass_of(plan.forward))
        .add("backward", pass_of(plan.backward))
        .add("gather_forward", gather_of(plan.gather_forward))
        .add("gather_backward", gather_of(plan.gather_backward))
        .add("queries_travel", plan.queries_travel)
        .add("fits", plan.fits)
        .add("gather_fits", plan.gather_fits)
        .text();
  });
}

}  // namespace
}  // namespace annulus::torch_glue

STABLE_TORCH_LIBRARY_FRAGMENT(annulus, m) {
  m.def(
      "_plan_ring_json(int tokens, int heads, int kv_heads, int head_dim, int world_size, float "
      "link_gbs, str dtype, bool causal, str balance, int window_left, int window_right, int "
      "batch, float tflops, float memory_gib, int slice) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("_plan_ring_json", TORCH_BOX(&annulus::torch_glue::plan_json));
}
