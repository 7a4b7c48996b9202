// Calls that break one rule of lrpe_cosine.h each, beyond those that the argument lists say.

#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/bad_calls.h"

namespace annulus::testing {

namespace {

// Good arguments of every function, B = 2, H = 4 (k: 2), L = 6, D = 8, E = 8; a bad call spoils
// one.
class Attempt : public AttemptTensors {
 public:
  explicit Attempt(Device device) : AttemptTensors(device) {
    x = input("x", {2, 4, 6, 8});
    k = input("k", {2, 2, 6, 8});
    theta = input("theta", {4, 8});
    theta_k = input("theta", {2, 8});
    dy = input("dy", {2, 4, 6, 16});
    dyk = input("dyk", {2, 2, 6, 16});
    dr = input("dy of rotate", {2, 4, 6, 8});
    y = output("y", {2, 4, 6, 16});
    yk = output("yk", {2, 2, 6, 16});
    yr = output("y of rotate", {2, 4, 6, 8});
    dx = output("dx", {2, 4, 6, 8});
    dk = output("dk", {2, 2, 6, 8});
    dtheta = output("dtheta", {4, 8});
    dtheta_k = output("dtheta", {2, 8});
    offsets = input("offsets", {2}, DType::kI64);
    ids = input("position_ids", {2, 6, 1}, DType::kI64);
    cosine.shape = rotate.shape = LrpeGrid{6};
  }

  void forward() { lrpe_cosine_forward(x, theta, y, cosine, context); }
  void backward() { lrpe_cosine_backward(dy, x, theta, dx, dtheta, cosine, context); }
  void qk() { lrpe_cosine_qk_forward(x, k, theta_k, y, yk, cosine, context); }
  void qk_backward() {
    lrpe_cosine_qk_backward(dy, dyk, x, k, theta_k, dx, dk, dtheta_k, cosine, context);
  }
  void rotate_forward() { lrpe_rotate_forward(x, theta, yr, rotate, context); }
  void rotate_backward() { lrpe_rotate_backward(dr, x, theta, dx, dtheta, rotate, context); }

  TensorView x, k, theta, theta_k, dy, dyk, dr, y, yk, yr, dx, dk, dtheta, dtheta_k, offsets, ids;
  LrpeCosineOptions cosine;
  LrpeRotateOptions rotate;
  Context context;
};

using BadCalls = BadCallsOf<Attempt>;

void add_shape_rules(BadCalls& b) {
  b.add("dy has another head count than theta", "theta",
        [](Attempt& a) { a.dy.shape[1] = a.x.shape[1] = a.dx.shape[1] = 3, a.backward(); });
  b.add("dy has an odd width", "dy", [](Attempt& a) { a.dy.shape[3] = 15, a.backward(); });
  b.add("theta has a wrong head count", "theta",
        [](Attempt& a) { a.theta.shape[0] = 3, a.forward(); });
  b.add("m * E < D", "theta", [](Attempt& a) { a.theta.shape[1] = 7, a.forward(); });
  b.add("an axis longer than 1 owns no column", "theta", [](Attempt& a) {
    a.cosine.shape = {3, 2}, a.forward();
  });
  b.add("the third axis owns no column (the original's 3-D rows)", "theta", [](Attempt& a) {
    a.theta.shape[1] = 4;
    a.cosine.shape = {1, 3, 2};
    a.forward();
  });
  b.add("shape does not multiply to L - prefix", "shape",
        [](Attempt& a) { a.cosine.shape = {7}, a.forward(); });
  b.add("shape forgets the prefix", "shape", [](Attempt& a) { a.cosine.prefix = 1, a.forward(); });
  b.add("prefix > L", "shape",
        [](Attempt& a) { a.cosine.shape = {0}, a.cosine.prefix = 7, a.forward(); });
  b.add("negative prefix", "prefix",
        [](Attempt& a) { a.cosine.shape = {7}, a.cosine.prefix = -1, a.forward(); });
  b.add("no axes", "shape", [](Attempt& a) { a.cosine.shape = LrpeGrid(), a.forward(); });
  b.add("five axes", "shape", [](Attempt& a) { a.cosine.shape = {6, 1, 1, 1, 1}, a.forward(); });
  b.add("a negative axis", "shape", [](Attempt& a) { a.cosine.shape = {-2, -3}, a.forward(); });
  b.add("axes whose product is beyond 2^63", "shape", [](Attempt& a) {
    a.cosine.shape = {1ll << 40, 1ll << 40}, a.forward();
  });
  b.add("offset on a 2-D shape", "offset", [](Attempt& a) {
    a.cosine.shape = {3, 2};
    a.theta.shape[1] = 4;
    a.cosine.offset = 1;
    a.forward();
  });
  b.add("offsets on a 2-D shape", "offsets", [](Attempt& a) {
    a.cosine.shape = {3, 2};
    a.theta.shape[1] = 4;
    a.cosine.offsets = a.offsets;
    a.forward();
  });
  // position_ids in place of a shape; `by_ids` is a good call until something else is changed.
  const auto by_ids = [&](const char* what, const char* argument, auto change) {
    b.add(what, argument, [change](Attempt& a) {
      a.cosine.shape = {};
      a.cosine.position_ids = a.ids;
      change(a);
      a.forward();
    });
  };
  by_ids("position_ids beside a shape", "shape", [](Attempt& a) { a.cosine.shape = {6}; });
  by_ids("position_ids beside a prefix", "prefix", [](Attempt& a) { a.cosine.prefix = 1; });
  by_ids("position_ids beside an offset", "offset", [](Attempt& a) { a.cosine.offset = 1; });
  by_ids("position_ids beside offsets", "offsets",
         [](Attempt& a) { a.cosine.offsets = a.offsets; });
  by_ids("position_ids of other tokens", "position_ids",
         [](Attempt& a) { a.cosine.position_ids.shape[1] = 5; });
  by_ids("position_ids of other sequences", "position_ids",
         [](Attempt& a) { a.cosine.position_ids.shape[0] = 3; });
  by_ids("position_ids of no axis", "position_ids",
         [](Attempt& a) { a.cosine.position_ids.shape[2] = 0; });
  by_ids("position_ids of five axes", "position_ids",
         [](Attempt& a) { a.cosine.position_ids.shape[2] = 5; });
  by_ids("an axis of position_ids without a column", "theta", [](Attempt& a) {
    set_shape(a.cosine.position_ids, {1, 6, 2});
  });
  b.add("neither shape nor position_ids", "shape",
        [](Attempt& a) { a.cosine.shape = {}, a.forward(); });
  b.add("offset beyond every position", "offset",
        [](Attempt& a) { a.cosine.offset = INT64_MAX, a.forward(); });
  b.add("x missing though dtheta is asked for", "x", [](Attempt& a) { a.x = {}, a.backward(); });
  b.add("x missing though there is an activation", "x", [](Attempt& a) {
    a.x = a.dtheta = {};
    a.cosine.activation = LrpeActivation::kSilu;
    a.backward();
  });
  b.add("an activation that does not exist", "activation", [](Attempt& a) {
    a.cosine.activation = static_cast<LrpeActivation>(77);
    a.forward();
  });
}

void add_memory_rules(BadCalls& b) {
  b.add("rows of y overlap", "y", [](Attempt& a) { a.y.stride[2] = 8, a.forward(); });
  b.add("y overlaps x", "y",
        [](Attempt& a) { a.x.data = static_cast<float*>(a.y.data) + 5, a.forward(); });
  b.add("rotate: y is x shifted by one element", "y",
        [](Attempt& a) { a.x.data = static_cast<float*>(a.yr.data) + 1, a.rotate_forward(); });
  b.add("rotate: dx is dy though dtheta is asked for", "dx",
        [](Attempt& a) { a.dr.data = a.dx.data, a.rotate_backward(); });
}

void add_form_rules(BadCalls& b) {
  b.add("rotate: odd D", "x", [](Attempt& a) { a.x.shape[3] = 7, a.rotate_forward(); });
  b.add("rotate: m * E < D / 2", "theta",
        [](Attempt& a) { a.theta.shape[1] = 3, a.rotate_forward(); });
  b.add("rotate: x missing though dtheta is asked for", "x",
        [](Attempt& a) { a.x = {}, a.rotate_backward(); });
  b.add("qk: Hq is no multiple of Hk", "k", [](Attempt& a) {
    a.x.shape[1] = 3;
    a.y.shape[1] = 3;
    a.qk();
  });
  b.add("qk: theta has a row per query head", "theta",
        [](Attempt& a) { a.theta_k = a.theta, a.qk(); });
}

}  // namespace

std::vector<BadCall> lrpe_bad_calls(Device) {
  BadCalls b;
  add_shape_rules(b);
  add_memory_rules(b);
  add_form_rules(b);
  return b.take();
}

}  // namespace annulus::testing
