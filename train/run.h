// A whole run: train each recipe in its folder with checkpoints, evaluate, write what there is to
// see. It prints nothing; who calls it watches. One run a folder: OUT/.lock is held while it lasts, and
// a second one is refused. What a run that was killed left behind is removed by the next.
//
//   OUT/<recipe>/manifest.json, checkpoint-<step>.safetensors   checkpoint.h
//   OUT/<recipe>/model.safetensors                              the trained weights
//   OUT/<recipe>/curve.csv                                      loss and error of every step
//   OUT/results.json                                            every figure
//   OUT/ring-attractor.html                                     the page
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/files/results.h"

namespace annulus::train {

struct RunOptions {
  std::string out;
  std::vector<Recipe> recipes;
  std::vector<Peer> peers = {};
  Device device = kCPU;
  int threads = 0;
  std::int64_t checkpoint_every = 100;  // at least 1
  std::int64_t test_sequences = kTestSequences;
  bool resume = false;     // continue what the folder holds; a recipe it does not hold starts
  bool overwrite = false;  // start anew where the folder holds a run
};

struct RunWatcher {
  std::function<void(const Trainer&)> begin;  // a recipe starts, or goes on from its checkpoint
  std::function<void(const Trainer&, const LossFigures&)> step;
  std::function<void(const Trainer&)> evaluating;
  std::function<bool()> stop;  // asked after every step
  std::function<void(const std::string&)> note;
};

struct Stopped {
  std::string recipe;
  std::int64_t step = 0, steps = 0;
};

struct RunOutcome {
  std::optional<Stopped> stopped;  // set: a checkpoint of that step is written
  Results results;                 // complete when it was not stopped
  std::string page;                // path
};

// Throws InvalidArgument, files::FileError, Diverged and what the operators throw.
RunOutcome run(const RunOptions& options, const RunWatcher& watcher);

}  // namespace annulus::train
