// The ring attractor: Wa, Wo and the gain network on the host, where Adam works on them, and the
// tensors of a call on the device. A step of training copies the weights and actions there, runs
// ring_rnn_forward, the loss and ring_rnn_backward, and copies the gradients back; the states
// themselves never leave the device.
#pragma once

#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/context.h"
#include "train/files/recipe.h"
#include "train/network/gain.h"
#include "train/network/loss.h"

namespace annulus::train {

// A dense f32 tensor in memory of its own that grows when it must.
class DeviceTensor {
 public:
  explicit DeviceTensor(Device device) : device_(device) {}
  TensorView shaped(std::initializer_list<std::int64_t> shape);  // contents are lost when it grows
  const TensorView& view() const { return view_; }
  TensorView upload(std::initializer_list<std::int64_t> shape, std::span<const float> values);
  void download(std::span<float> values) const;

 private:
  Device device_;
  Buffer buffer_;
  TensorView view_;
};

// Of everything a recipe trains: Wa, Wo, then the gain network's.
std::vector<NamedShape> parameter_shapes(const Recipe& recipe);

class RingModel {
 public:
  RingModel(const Recipe& recipe, Device device, int threads);

  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Recipe& recipe() const { return recipe_; }
  Device device() const { return device_; }
  std::int64_t parameter_count() const;

  // The loss of a batch; fills every parameter's gradient.
  LossFigures gradients(const Sequences& batch) { return run(batch, true); }
  // Only the loss.
  LossFigures loss(const Sequences& batch) { return run(batch, false); }

  // What the ring is told of these sequences, (B, T), and its actions, gain network included,
  // (B, T, K).
  std::vector<float> heard(const Sequences& s) const;
  std::vector<float> actions(const Sequences& s) const;
  bool has_gain() const { return recipe_.gain_hidden > 0; }
  std::span<Parameter> ring_parameters() { return std::span(parameters_).first(2); }
  std::span<Parameter> gain_parameters() { return std::span(parameters_).subspan(2); }
  std::span<const Parameter> gain_parameters() const { return std::span(parameters_).subspan(2); }

  // The decoded angle after every step, (B, T). The state is carried from one stretch of at most
  // `stretch` steps to the next, which changes no bit and keeps long sequences small. `states`, where
  // it is given, receives sequence `kept` as (T, N).
  std::vector<float> decode(const Sequences& s, std::int64_t stretch, std::int64_t kept = 0,
                            std::vector<float>* states = nullptr);

 private:
  RingRnnInputs upload(std::span<const float> actions, std::span<const float> r0,
                       std::span<const float> drive, std::int64_t B, std::int64_t T);
  LossFigures run(const Sequences& batch, bool backward);

  Recipe recipe_;
  Device device_;
  Context context_;
  RingRnnOptions options_;
  std::vector<Parameter> parameters_;  // Wa, Wo, then the gain network's four
  DeviceTensor A_{device_}, Wa_{device_}, Wo_{device_}, r0_{device_}, out_{device_};
  DeviceTensor drive_{device_};
  DeviceTensor saved_{device_}, ring_{device_}, sums_{device_}, h_{device_}, angle_{device_};
  DeviceTensor amplitude_{device_}, dsums_{device_}, dout_{device_}, dA_{device_}, dWa_{device_};
  DeviceTensor dWo_{device_};
};

}  // namespace annulus::train
