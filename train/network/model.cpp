#include "train/network/model.h"

#include <algorithm>
#include <cmath>

namespace annulus::train {
namespace {

// Purposes of random streams; never renumber them.
constexpr std::uint64_t kWeightsStream = 1, kGainStream = 2;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<NamedShape> ring_shapes(const Recipe& r) {
  return {{"Wa", {r.actions, r.neurons, r.neurons}}, {"Wo", {r.neurons, r.neurons}}};
}

}  // namespace

std::vector<NamedShape> parameter_shapes(const Recipe& r) {
  std::vector<NamedShape> shapes = ring_shapes(r);
  if (r.gain_hidden > 0) {
    for (NamedShape& s : gain_shapes(r.gain_hidden, r.actions)) shapes.push_back(std::move(s));
  }
  return shapes;
}

TensorView DeviceTensor::shaped(std::initializer_list<std::int64_t> shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  const std::size_t bytes = size(n) * sizeof(float);
  if (bytes > buffer_.bytes()) buffer_ = Buffer(device_, bytes);
  view_ = contiguous(static_cast<float*>(buffer_.data()), shape, device_);
  return view_;
}

TensorView DeviceTensor::upload(std::initializer_list<std::int64_t> shape,
                                std::span<const float> values) {
  shaped(shape);
  copy_bytes(view_.data, device_, values.data(), kCPU, values.size_bytes());
  return view_;
}

void DeviceTensor::download(std::span<float> values) const {
  copy_bytes(values.data(), kCPU, view_.data, device_, values.size_bytes());
}

RingModel::RingModel(const Recipe& recipe, Device device, int threads)
    : recipe_(recipe), device_(device) {
  check(recipe_);
  context_.threads = threads;
  options_.activation = recipe_.activation;
  const std::int64_t N = recipe_.neurons, K = recipe_.actions;
  for (auto& [name, shape] : ring_shapes(recipe_)) parameters_.emplace_back(name, shape);
  Rng rng(recipe_.seed, kWeightsStream, 0);
  const double scale = recipe_.spread / std::sqrt(static_cast<double>(N));
  for (Parameter& p : parameters_) {
    for (float& w : p.value) w = static_cast<float>(rng.normal() * scale);
  }
  if (has_gain()) {
    auto added = gain_network(recipe_.gain_hidden, K, Rng(recipe_.seed, kGainStream, 0));
    std::move(added.begin(), added.end(), std::back_inserter(parameters_));
  }
  std::vector<float> table(size(2 * N));
  ring_table(N, table.data());
  ring_.upload({2, N}, table);
}

std::int64_t RingModel::parameter_count() const {
  std::size_t n = 0;
  for (const Parameter& p : parameters_) n += p.value.size();
  return static_cast<std::int64_t>(n);
}

std::vector<float> RingModel::heard(const Sequences& s) const {
  return delayed(s.velocity, s.B, s.T, recipe_.delay);
}

std::vector<float> RingModel::actions(const Sequences& s) const {
  const std::vector<float> velocity = heard(s);
  std::vector<float> plain = encode(velocity, recipe_.actions, recipe_.encoding);
  if (!has_gain()) return plain;
  std::vector<float> A(plain.size());
  gain_forward(gain_parameters(), velocity, plain, s.B, s.T, A, context_.threads);
  return A;
}

RingRnnInputs RingModel::upload(std::span<const float> actions, std::span<const float> r0,
                                std::span<const float> drive, std::int64_t B, std::int64_t T) {
  const std::int64_t N = recipe_.neurons, K = recipe_.actions;
  RingRnnInputs in;
  in.A = A_.upload({B, T, K}, actions);
  in.Wa = Wa_.upload({K, N, N}, parameters_[0].value);
  in.Wo = Wo_.upload({N, N}, parameters_[1].value);
  in.r0 = r0_.upload({B, N}, r0);
  if (!drive.empty()) in.drive = drive_.upload({B, T, N}, drive);
  in.J0 = recipe_.J0;
  in.J1 = recipe_.J1;
  in.alpha = recipe_.alpha;
  return in;
}

LossFigures RingModel::run(const Sequences& batch, bool backward) {
  const std::int64_t B = batch.B, T = batch.T, N = recipe_.neurons, K = recipe_.actions;
  const RingRnnInputs in = upload(actions(batch), initial_bumps(batch.start, N),
                                  drive_noise(batch, 0, T, N, context_.threads), B, T);
  RingRnnOutputs out;
  out.out = out_.shaped({B, T, N});
  if (backward) {
    const auto shape = ring_rnn_saved_shape(in, options_);
    out.saved = saved_.shaped({shape[0], shape[1], shape[2]});
  }
  ring_rnn_forward(in, out, options_, context_);

  population_sums(out.out, ring_.view(), sums_.shaped({B, T, 3}), context_);
  std::vector<float> sums(size(B * T * 3)), dsums(backward ? sums.size() : 0);
  sums_.download(sums);
  const LossFigures figures = ring_loss(sums, batch.target, B, T, recipe_.amplitude_weight, dsums);
  if (!backward) return figures;

  population_gradients(out.out, ring_.view(), dsums_.upload({B, T, 3}, dsums),
                       dout_.shaped({B, T, N}), context_);
  RingRnnGradients gradients;
  gradients.dWa = dWa_.shaped({K, N, N});
  gradients.dWo = dWo_.shaped({N, N});
  if (has_gain()) gradients.dA = dA_.shaped({B, T, K});
  ring_rnn_backward(in, dout_.view(), {}, out.out, out.saved, gradients, options_, context_);
  dWa_.download(parameters_[0].gradient);
  dWo_.download(parameters_[1].gradient);
  if (has_gain()) {
    std::vector<float> dA(size(B * T * K));
    dA_.download(dA);
    const std::vector<float> velocity = heard(batch);
    gain_backward(gain_parameters(), velocity, encode(velocity, K, recipe_.encoding), B, T, dA,
                  context_.threads);
  }
  return figures;
}

std::vector<float> RingModel::decode(const Sequences& s, std::int64_t stretch, std::int64_t kept,
                                     std::vector<float>* states) {
  const std::int64_t N = recipe_.neurons, K = recipe_.actions;
  const std::vector<float> all = actions(s);
  std::vector<float> state = initial_bumps(s.start, N);
  std::vector<float> angles(size(s.B * s.T));
  if (states) states->resize(size(s.T * N));
  for (std::int64_t t = 0; t < s.T; t += stretch) {
    const std::int64_t steps = std::min(stretch, s.T - t);
    std::vector<float> part(size(s.B * steps * K)), decoded(size(s.B * steps));
    for (std::int64_t b = 0; b < s.B; ++b) {
      std::copy_n(all.data() + (b * s.T + t) * K, steps * K, part.data() + b * steps * K);
    }
    const RingRnnInputs in =
        upload(part, state, drive_noise(s, t, steps, N, context_.threads), s.B, steps);
    RingRnnOutputs out;
    out.out = out_.shaped({s.B, steps, N});
    out.h_n = h_.shaped({s.B, N});
    out.angle = angle_.shaped({s.B, steps});
    out.amplitude = amplitude_.shaped({s.B, steps});
    ring_rnn_forward(in, out, options_, context_);
    angle_.download(decoded);
    h_.download(state);
    for (std::int64_t b = 0; b < s.B; ++b) {
      std::copy_n(decoded.data() + b * steps, steps, angles.data() + b * s.T + t);
    }
    if (states) {
      const float* from = static_cast<const float*>(out_.view().data) + kept * steps * N;
      copy_bytes(states->data() + t * N, kCPU, from, device_, size(steps * N) * sizeof(float));
    }
  }
  return angles;
}

}  // namespace annulus::train
