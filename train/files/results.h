// What a run found out: in memory for the page, and as results.json and curve.csv for other programs.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/probe.h"
#include "train/trainer.h"

namespace annulus::train {

inline constexpr std::int64_t kTestSequences = 200;
inline constexpr std::int64_t kTestLength = 500, kLongTestLength = 1000;
// A ring has learned when its mean error over kTestLength steps is below this many radians. One that
// guesses is wrong by 1.57 (pi / 2), one that turns at once by 0.067 (task.h). No number has not learned.
inline constexpr double kLearned = 0.2;
inline constexpr std::int64_t kRestSteps = 2000;
inline constexpr double kAbruptLead = 0.01;  // the original's own evaluation starts like this

// Another model on the same task, measured elsewhere: a JSON file with one object or a list of at
// most 16 (README.md has the format). Unknown keys, wrong types and numbers out of range are refused
// with InvalidArgument that names the file and the key.
struct Peer : ErrorFigures {
  std::string name;
  std::int64_t parameters = 0;  // 0: not said
  std::int64_t steps = 0;       // of training; 0: not said
  double seconds = 0;           // of training; 0: not said
  std::string note;             // may be empty
};
std::vector<Peer> read_peers(const std::string& path);  // what is no file: files::FileError
std::vector<Peer> parse_peers(std::string_view json);

struct RecipeResult {
  Recipe recipe;
  History history;
  double seconds = 0;
  std::int64_t parameters = 0;
  Evaluation test, long_test;  // of 500 and of 1000 steps
  Evaluation abrupt;           // of 500 steps, moving almost at once
  Example example;             // one sequence of `test`
  std::vector<float> Wa, Wo;   // (K, N, N), (N, N)
  // What the gain network makes of a turn to the right of this speed in the step it comes and in the
  // step after, the other velocity being zero: A_1 over v. Empty without a network.
  struct Gains {
    std::vector<double> velocity, now, before;
  } gains;

  Drift rest;
  TurnCurve turning;
  NoiseCurve velocity_noise, state_noise;

  double growth() const { return long_test.mean / test.mean; }
  bool learned() const { return test.mean < kLearned; }
};

struct Results {
  std::vector<RecipeResult> recipes;
  std::vector<Peer> peers;
  double turning_at_once = 0;  // error_of_turning_at_once
  std::string device;
};

// A line of the table of results: the same for a terminal and for the page.
struct ResultRow {
  std::string name;
  bool first = true;  // of its model
  bool abrupt = false;
  std::optional<bool> learned;             // of its model; not judged: a peer of fewer steps
  std::int64_t steps = 0, parameters = 0;  // 0: not said
  double seconds = 0;                      // 0: not said
  const ErrorFigures& error;               // within the results
};
std::string verdict(std::optional<bool> learned);  // "yes", "no", or empty
std::vector<ResultRow> result_rows(const Results& results);

RecipeResult collect(Trainer& trainer, std::int64_t sequences = kTestSequences);

std::string results_json(const Results& results);
std::string curve_csv(const RecipeResult& result);  // step, length, rate, loss, error
std::string results_table(const Results& results);  // Markdown, for a terminal

// "default did not learn: ...", a line for each recipe that did not; empty where all did.
std::vector<std::string> what_did_not_learn(const Results& results);

}  // namespace annulus::train
