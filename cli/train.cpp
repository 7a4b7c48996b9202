// annulus train ring-attractor: trains, evaluates, and writes the curves and a page of figures.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "train/files/checkpoint.h"
#include "train/run.h"

namespace annulus::cli {
namespace {

struct TrainOptions {
  std::string recipe = "both", device, encoding, activation;
  const CLI::Option* recipe_option = nullptr;
  std::optional<std::int64_t> neurons, actions, batch, steps, length, gain;
  std::optional<std::uint64_t> seed;
  std::optional<double> J0, J1, alpha, rate, velocity_noise, state_noise;
  std::vector<std::string> peers;
  train::RunOptions run{.out = "ring-attractor", .recipes = {}};
};

// What was given on the command line goes over what the recipe, or the checkpoint, says.
void apply(const TrainOptions& o, bool goes_on, train::Recipe& r) {
  r.neurons = o.neurons.value_or(r.neurons);
  r.actions = o.actions.value_or(r.actions);
  if (!o.encoding.empty()) {
    r.encoding = o.encoding == "spread" ? train::Encoding::kSpread : train::Encoding::kTurns;
  }
  if (!o.activation.empty()) r.activation = train::activation_of(o.activation);
  r.J0 = o.J0.value_or(r.J0);
  r.J1 = o.J1.value_or(r.J1);
  r.alpha = o.alpha.value_or(r.alpha);
  r.schedule.rate = o.rate.value_or(r.schedule.rate);
  r.noise.velocity = o.velocity_noise.value_or(r.noise.velocity);
  r.noise.state = o.state_noise.value_or(r.noise.state);
  r.batch = o.batch.value_or(r.batch);
  if (o.steps && goes_on) {
    r = train::with_steps(r, *o.steps);
  } else if (o.steps) {
    r.steps = *o.steps;
    r.schedule.warm_up = std::min(r.schedule.warm_up, r.steps / 10);
  }
  if (o.length) {
    r.length = *o.length;
    r.first_length = r.growth > 0 ? std::min(r.first_length, r.length) : r.length;
  }
  r.gain_hidden = o.gain.value_or(r.gain_hidden);
  r.seed = o.seed.value_or(r.seed);
}

std::vector<train::Recipe> pick_recipes(const TrainOptions& o) {
  std::vector<train::Recipe> picked;
  for (train::Recipe r :
       {train::original_recipe(), train::default_recipe(o.neurons.value_or(128))}) {
    if (o.recipe != "both" && o.recipe != r.name) continue;
    const std::string folder = o.run.out + "/" + r.name;
    const bool goes_on = o.run.resume && train::has_checkpoint(folder);
    if (goes_on) {
      r = train::read_manifest(folder).recipe;
    } else if (o.run.resume && o.recipe_option->count() == 0) {
      continue;  // the run that is continued had only the other
    }
    apply(o, goes_on, r);
    picked.push_back(std::move(r));
  }
  return picked;
}

// Where stderr is no terminal, a line every ten seconds and one at the end of a recipe.
class Lines {
 public:
  void step(const train::Trainer& t, const train::LossFigures& f) {
    if (terminal_) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(10) && !t.finished()) return;
    last_ = now;
    std::cerr << fmt::format("annulus: {}, step {} of {}: loss {:.4f}, error {:.4f} rad\n",
                             t.recipe().name, t.steps_done(), t.recipe().steps, f.total, f.error);
  }

 private:
  bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

int run_training(const TrainOptions& o) {
  train::RunOptions options = o.run;
  options.device = pick_device(o.device);
  options.recipes = pick_recipes(o);
  for (const std::string& path : o.peers) {
    for (train::Peer& p : train::read_peers(path)) options.peers.push_back(std::move(p));
  }

  std::unique_ptr<Progress> progress;
  Lines lines;
  train::RunWatcher watcher;
  watcher.begin = [&](const train::Trainer& t) {
    const std::int64_t left = t.recipe().steps - t.steps_done();
    progress =
        std::make_unique<Progress>(static_cast<std::size_t>(std::max<std::int64_t>(left, 1)));
    progress->start(t.recipe().name);
  };
  watcher.step = [&](const train::Trainer& t, const train::LossFigures& f) {
    progress->start(
        fmt::format("{}  loss {:.4f}  error {:.4f} rad", t.recipe().name, f.total, f.error));
    progress->advance();
    lines.step(t, f);
  };
  watcher.evaluating = [&](const train::Trainer& t) {
    progress->start("evaluating " + t.recipe().name);
  };
  note_stop_signals();
  watcher.stop = stop_asked;
  watcher.note = [&](const std::string& text) {
    if (progress) progress->clear();
    std::cerr << "annulus: " << text << "\n";
  };

  const train::RunOutcome outcome = train::run(options, watcher);
  progress.reset();
  if (outcome.stopped) {
    const train::Stopped& s = *outcome.stopped;
    std::cerr << fmt::format(
        "annulus: stopped, recipe {} at step {} of {}; nothing is lost.\n"
        "annulus: go on with: annulus train ring-attractor --out {} --resume\n",
        s.recipe, s.step, s.steps, options.out);
    return stop_code();
  }
  std::cout << train::results_table(outcome.results);
  for (const std::string& line : train::what_did_not_learn(outcome.results)) {
    std::cerr << "annulus: recipe " << line << "\n";
  }
  std::cerr << fmt::format("annulus: figures in {}, numbers in {}/results.json\n", outcome.page,
                           options.out);
  return kDone;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  CLI::App* train = app.add_subcommand("train", "train a model of ours, evaluate it, draw it");
  train->require_subcommand(1);
  auto o = std::make_shared<TrainOptions>();
  CLI::App* command = train->add_subcommand(
      "ring-attractor", "a recurrent network that learns to integrate angular velocity");
  command->footer(
      "Writes OUT/ring-attractor.html (figures), OUT/results.json, and in OUT/<recipe>/ the\n"
      "checkpoint, model.safetensors and curve.csv. Ctrl-C writes a checkpoint and ends with\n"
      "code 130 (143 after a polite kill); --resume goes on to the bits of a run that was never\n"
      "stopped. Other exit codes: 0 done, 1 the loss diverged, 2 bad usage or input, 3 not\n"
      "available here.");
  o->recipe_option = add_choice(*command, "--recipe", o->recipe, {"original", "default", "both"},
                                "original: the papers' values; default: ours; or both");
  command->add_option("--neurons", o->neurons, "on the ring (default: the recipe's, 128)");
  command->add_option("--actions", o->actions, "channels a velocity is spread over (2)");
  add_choice(*command, "--encoding", o->encoding, {"turns", "spread"},
             "turns: left, right, and unused channels; spread: over all channels (turns)");
  command->add_option("--J0", o->J0,
                      "what every neuron gets of the sum of all (-0.1; default beyond\n128 "
                      "neurons: -12.8 over their number)");
  command->add_option("--J1", o->J1, "times Wo (0.1)");
  command->add_option("--alpha", o->alpha, "share of a state that is new in a step (0.15)");
  add_choice(*command, "--activation", o->activation, train::kActivations, "of a neuron (gelu)");
  command->add_option("--rate", o->rate,
                      "Adam's, at its highest (original: 0.001, default: 0.003)");
  command->add_option("--velocity-noise", o->velocity_noise,
                      "in training, on the velocity: standard deviation in radians a step (0)");
  command->add_option("--state-noise", o->state_noise,
                      "in training, on what every neuron receives: standard deviation as a share\n"
                      "of the first bump's peak (0)");
  command->add_option("--batch", o->batch, "sequences a step (128)");
  command->add_option("--steps", o->steps,
                      "of training (original: 1000, default: 2000); with --resume more than the "
                      "run had trains on");
  command->add_option("--length", o->length,
                      "steps of a training sequence (100; default's grow from 20)");
  command->add_option("--gain", o->gain,
                      "hidden neurons of the gain network; 0: none (original: 0, default: 16)");
  command->add_option("--seed", o->seed, "the same seed gives the same figures (0)")
      ->check(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
  add_device(*command, o->device);
  command->add_option("--threads", o->run.threads, "CPU threads; 0: all. They change no bit")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--out", o->run.out, "folder of the run")->capture_default_str();
  auto* resume = command->add_flag("--resume", o->run.resume, "go on with the run in that folder");
  command->add_flag("--overwrite", o->run.overwrite, "start anew where the folder holds a run")
      ->excludes(resume);
  command->add_option("--checkpoint-every", o->run.checkpoint_every, "steps between checkpoints")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1'000'000'000}))
      ->capture_default_str();
  command->add_option("--peer", o->peers,
                      "another model's result on this task (JSON, see train/README.md); may be "
                      "given more than once");
  command->callback([o, &exit_code] { exit_code = run_training(*o); });
}

}  // namespace annulus::cli
