// Calls that break one rule of lrpe_cosine.h each, beyond those that the argument lists say.

#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/bad_calls.h"

namespace annulus::testing {

namespace {

// Good arguments of every function, B = 2, H = 4 (k: 2), L = 6, D = 8, E = 8 (rotate: 4); a bad call
// spoils one.
class Attempt : public AttemptTensors {
 public:
  explicit Attempt(Device device) : AttemptTensors(device) {
    x = input("x", {2, 4, 6, 8});
    k = input("k", {2, 2, 6, 8});
    theta = input("theta", {4, 8});
    theta_k = input("theta", {2, 8});
    theta_r = input("theta of rotate", {4, 4});
    theta_rk = input("theta of rotate", {2, 4});
    dy = input("dy", {2, 4, 6, 16});
    dr = input("dy of rotate", {2, 4, 6, 8});
    y = output("y", {2, 4, 6, 16});
    yk = output("yk", {2, 2, 6, 16});
    yr = output("y of rotate", {2, 4, 6, 8});
    dx = output("dx", {2, 4, 6, 8});
    dk = output("dk", {2, 2, 6, 8});
    dtheta = output("dtheta", {4, 8});
    dtheta_r = output("dtheta of rotate", {4, 4});
    offsets = input("offsets", {2}, DType::kI64);
    ids = input("position_ids", {2, 6, 1}, DType::kI64);
    cosine.shape = rotate.shape = LrpeGrid{6};
  }

  void set_grid(std::int64_t columns, auto... extents) {
    cosine.shape = {extents...};
    theta.shape[1] = columns;
  }
  void forward() { lrpe_cosine_forward(x, theta, y, cosine, context); }
  void backward() { lrpe_cosine_backward(dy, x, theta, dx, dtheta, cosine, context); }
  void qk() { lrpe_cosine_qk_forward(x, k, theta_k, y, yk, cosine, context); }
  void rotate_qk() { lrpe_rotate_qk_forward(x, k, theta_rk, yr, dk, rotate, context); }
  void rotate_qk_backward() {
    lrpe_rotate_qk_backward(dr, k, x, k, theta_rk, dx, dk, {}, rotate, context);
  }
  void rotate_forward() { lrpe_rotate_forward(x, theta_r, yr, rotate, context); }
  void rotate_backward() { lrpe_rotate_backward(dr, x, theta_r, dx, dtheta_r, rotate, context); }

  TensorView x, k, theta, theta_k, theta_r, theta_rk, dy, dr, y, yk, yr, dx, dk, dtheta, dtheta_r,
      offsets, ids;
  LrpeCosineOptions cosine;
  LrpeRotateOptions rotate;
  Context context;
};

struct Rule {
  const char *what, *argument;
  void (*spoil)(Attempt& a);
  void (Attempt::*call)() = &Attempt::forward;
};

const Rule kRules[] = {
    {"dy has another head count than theta", "theta",
     [](Attempt& a) { a.dy.shape[1] = a.x.shape[1] = a.dx.shape[1] = 3; }, &Attempt::backward},
    {"dy has an odd width", "dy", [](Attempt& a) { a.dy.shape[3] = 15; }, &Attempt::backward},
    {"theta has a wrong head count", "theta", [](Attempt& a) { a.theta.shape[0] = 3; }},
    {"m * E < D", "theta", [](Attempt& a) { a.theta.shape[1] = 7; }},
    {"a frequency that no column has", "theta", [](Attempt& a) { a.set_grid(9, 6); }},
    {"a frequency that no column has, beside an axis of length 1", "theta",
     [](Attempt& a) { a.set_grid(9, 6, 1); }},
    {"backward: a frequency that no column has", "theta",
     [](Attempt& a) { a.theta.shape[1] = 9, a.dtheta = {}; }, &Attempt::backward},
    {"qk: a frequency that no column has", "theta", [](Attempt& a) { a.theta_k.shape[1] = 9; },
     &Attempt::qk},
    {"an axis longer than 1 owns no column", "theta", [](Attempt& a) { a.set_grid(8, 3, 2); }},
    {"the third axis owns no column (the original's 3-D rows)", "theta",
     [](Attempt& a) { a.set_grid(4, 1, 3, 2); }},
    {"shape does not multiply to L - prefix", "shape", [](Attempt& a) { a.cosine.shape = {7}; }},
    {"shape forgets the prefix", "shape", [](Attempt& a) { a.cosine.prefix = 1; }},
    {"prefix > L", "shape", [](Attempt& a) { a.cosine.shape = {0}, a.cosine.prefix = 7; }},
    {"negative prefix", "prefix", [](Attempt& a) { a.cosine.shape = {7}, a.cosine.prefix = -1; }},
    {"neither shape nor position_ids", "shape", [](Attempt& a) { a.cosine.shape = {}; }},
    {"five axes", "shape", [](Attempt& a) { a.set_grid(8, 6, 1, 1, 1, 1); }},
    {"a negative axis", "shape", [](Attempt& a) { a.set_grid(8, -2, -3); }},
    {"axes whose product is beyond 2^63", "shape",
     [](Attempt& a) { a.set_grid(8, 1ll << 40, 1ll << 40); }},
    {"offset on a 2-D shape", "offset",
     [](Attempt& a) { a.set_grid(4, 3, 2), a.cosine.offset = 1; }},
    {"offsets on a 2-D shape", "offsets",
     [](Attempt& a) { a.set_grid(4, 3, 2), a.cosine.offsets = a.offsets; }},
    {"offset beyond every position", "offset", [](Attempt& a) { a.cosine.offset = INT64_MAX; }},
    {"x missing though dtheta is asked for", "x", [](Attempt& a) { a.x = {}; }, &Attempt::backward},
    {"x missing though there is an activation", "x",
     [](Attempt& a) { a.x = a.dtheta = {}, a.cosine.activation = LrpeActivation::kSilu; },
     &Attempt::backward},
    {"an activation that does not exist", "activation",
     [](Attempt& a) { a.cosine.activation = static_cast<LrpeActivation>(77); }},

    {"rows of y overlap", "y", [](Attempt& a) { a.y.stride[2] = 8; }},
    {"y overlaps x", "y", [](Attempt& a) { a.x.data = static_cast<float*>(a.y.data) + 5; }},
    {"rotate: y is x shifted by one element", "y",
     [](Attempt& a) { a.x.data = static_cast<float*>(a.yr.data) + 1; }, &Attempt::rotate_forward},
    {"rotate: dx is dy though dtheta is asked for", "dx", [](Attempt& a) { a.dr.data = a.dx.data; },
     &Attempt::rotate_backward},

    {"rotate: odd D", "x", [](Attempt& a) { a.x.shape[3] = 7; }, &Attempt::rotate_forward},
    {"rotate: no frequency", "theta", [](Attempt& a) { a.theta_r.shape[1] = 0; },
     &Attempt::rotate_forward},
    {"rotate: a frequency that no pair has", "theta", [](Attempt& a) { a.theta_r = a.theta; },
     &Attempt::rotate_forward},
    {"rotate_backward: a frequency that no pair has", "theta",
     [](Attempt& a) { a.theta_r = a.theta, a.dtheta_r = a.dtheta; }, &Attempt::rotate_backward},
    {"rotate_qk: a frequency that no pair has", "theta", [](Attempt& a) { a.theta_rk = a.theta_k; },
     &Attempt::rotate_qk},
    {"rotate: an axis longer than 1 owns no pair", "theta",
     [](Attempt& a) {
       a.rotate.shape = {3, 2};
     },
     &Attempt::rotate_forward},
    {"rotate: x missing though dtheta is asked for", "x", [](Attempt& a) { a.x = {}; },
     &Attempt::rotate_backward},
    {"qk: Hq is no multiple of Hk", "k", [](Attempt& a) { a.x.shape[1] = a.y.shape[1] = 3; },
     &Attempt::qk},
    {"qk: theta has a row per query head", "theta", [](Attempt& a) { a.theta_k = a.theta; },
     &Attempt::qk},
    {"rotate_qk: Hq is no multiple of Hk", "k",
     [](Attempt& a) { a.x.shape[1] = a.yr.shape[1] = 3; }, &Attempt::rotate_qk},
    {"rotate_qk: theta has a row per query head", "theta",
     [](Attempt& a) { a.theta_rk = a.theta_r; }, &Attempt::rotate_qk},
    {"rotate_qk: odd D", "q", [](Attempt& a) { a.x.shape[3] = 7; }, &Attempt::rotate_qk},
    {"rotate_qk: yq is k", "yq",
     [](Attempt& a) { a.x.shape[1] = a.yr.shape[1] = 2, a.k.data = a.yr.data; },
     &Attempt::rotate_qk},
    {"rotate_qk: in place, and q is k", "yq", [](Attempt& a) { a.yr = a.x = a.dk = a.k; },
     &Attempt::rotate_qk},
    {"rotate_qk: k in place, and q is k", "yk",
     [](Attempt& a) { a.x = a.dk = a.k, a.yr.shape[1] = 2; }, &Attempt::rotate_qk},
    {"rotate_qk: dk is dyq", "dk", [](Attempt& a) { a.dr.data = a.dk.data; },
     &Attempt::rotate_qk_backward},
};

// Where position_ids stand in place of a shape.
const Rule kRulesOfIds[] = {
    {"position_ids beside a shape", "shape", [](Attempt& a) { a.cosine.shape = {6}; }},
    {"position_ids beside a prefix", "prefix", [](Attempt& a) { a.cosine.prefix = 1; }},
    {"position_ids beside an offset", "offset", [](Attempt& a) { a.cosine.offset = 1; }},
    {"position_ids beside offsets", "offsets", [](Attempt& a) { a.cosine.offsets = a.offsets; }},
    {"position_ids of other tokens", "position_ids", [](Attempt& a) { a.ids.shape[1] = 5; }},
    {"position_ids of other sequences", "position_ids", [](Attempt& a) { a.ids.shape[0] = 3; }},
    {"position_ids of no axis", "position_ids", [](Attempt& a) { a.ids.shape[2] = 0; }},
    {"position_ids of five axes", "position_ids", [](Attempt& a) { a.ids.shape[2] = 5; }},
    {"a frequency that no column of position_ids has", "theta",
     [](Attempt& a) { a.theta.shape[1] = 9; }},
    {"an axis of position_ids without a column", "theta",
     [](Attempt& a) { a.ids.shape[0] = 1, a.ids.shape[2] = 2; }},
};

}  // namespace

std::vector<BadCall> lrpe_bad_calls(Device) {
  BadCallsOf<Attempt> b;
  for (const Rule& r : kRules) {
    b.add(r.what, r.argument, [r](Attempt& a) { r.spoil(a), (a.*r.call)(); });
  }
  for (const Rule& r : kRulesOfIds) {
    b.add(r.what, r.argument, [r](Attempt& a) {
      a.cosine.shape = {};
      r.spoil(a);
      a.cosine.position_ids = a.ids;
      a.forward();
    });
  }
  return b.take();
}

}  // namespace annulus::testing
