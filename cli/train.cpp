// annulus train ring-attractor: trains, evaluates, and writes the curves and a page of figures.
#include <fmt/format.h>

#include <iostream>
#include <limits>
#include <memory>

#include "annulus/core/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/stop_signal.h"
#include "train/checkpoint.h"
#include "train/run.h"

namespace annulus::cli {
namespace {

struct TrainOptions {
  std::string recipe = "both", device = "auto", out = "ring-attractor", encoding;
  std::int64_t neurons = 0, actions = 0, batch = 0, steps = 0, length = 0, gain = 0;
  std::uint64_t seed = 0;
  std::int64_t checkpoint_every = 100;
  int threads = 0;
  bool resume = false, overwrite = false;
  std::vector<std::string> peers;
  const CLI::App* command = nullptr;

  bool given(const char* name) const { return command->get_option(name)->count() > 0; }
};

// What was given on the command line goes over what the recipe, or the checkpoint, says.
void apply(const TrainOptions& o, train::Recipe& r) {
  if (o.given("--neurons")) r.neurons = o.neurons;
  if (o.given("--actions")) r.actions = o.actions;
  if (o.given("--encoding")) {
    r.encoding = o.encoding == "spread" ? train::Encoding::kSpread : train::Encoding::kTurns;
  }
  if (o.given("--batch")) r.batch = o.batch;
  if (o.given("--steps")) {
    r.steps = o.steps;
    r.schedule.warm_up = std::min(r.schedule.warm_up, o.steps / 10);
  }
  if (o.given("--length")) {
    r.length = o.length;
    r.first_length = r.growth > 0 ? std::min(r.first_length, o.length) : o.length;
  }
  if (o.given("--gain")) r.gain_hidden = o.gain;
  if (o.given("--seed")) r.seed = o.seed;
}

std::vector<train::Recipe> pick_recipes(const TrainOptions& o) {
  std::vector<train::Recipe> picked;
  for (train::Recipe r : {train::seed_recipe(), train::default_recipe()}) {
    if (o.recipe != "both" && o.recipe != r.name) continue;
    const std::string folder = o.out + "/" + r.name;
    if (o.resume && train::has_checkpoint(folder)) {
      r = train::read_manifest(folder).recipe;
    } else if (o.resume && !o.given("--recipe")) {
      continue;  // the run that is continued had only the other
    }
    apply(o, r);
    picked.push_back(std::move(r));
  }
  if (picked.empty()) throw InvalidArgument("--resume: " + o.out + " holds no run");
  return picked;
}

int run_training(const TrainOptions& o) {
  train::RunOptions options;
  options.out = o.out;
  options.device = pick_device(o.device);
  options.threads = o.threads;
  options.checkpoint_every = o.checkpoint_every;
  options.resume = o.resume;
  options.overwrite = o.overwrite;
  options.recipes = pick_recipes(o);
  for (const std::string& path : o.peers) {
    for (train::Peer& p : train::read_peers(path)) options.peers.push_back(std::move(p));
  }

  std::unique_ptr<Progress> progress;
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
  };
  watcher.evaluating = [&](const train::Trainer& t) {
    progress->start("evaluating " + t.recipe().name);
  };
  const StopOnSignal signals;
  watcher.stop = [&] { return signals.asked(); };
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
        s.recipe, s.step, s.steps, o.out);
    return signals.exit_code();
  }
  std::cout << train::results_table(outcome.results);
  std::cerr << fmt::format("annulus: figures in {}, numbers in {}/results.json\n", outcome.page,
                           o.out);
  return kDone;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  CLI::App* train = app.add_subcommand("train", "train a model of ours, evaluate it, draw it");
  train->require_subcommand(1);
  auto o = std::make_shared<TrainOptions>();
  CLI::App* command = train->add_subcommand(
      "ring-attractor", "a recurrent network that learns to integrate angular velocity");
  o->command = command;
  command->footer(
      "Writes OUT/ring-attractor.html (figures), OUT/results.json, and in OUT/<recipe>/ the\n"
      "checkpoint, model.safetensors and curve.csv. Ctrl-C writes a checkpoint and ends with\n"
      "code 130 (143 after a polite kill); --resume goes on to the bits of a run that was never\n"
      "stopped. Other exit codes: 0 done, 1 the loss diverged, 2 bad usage or input, 3 not\n"
      "available here.");
  command->add_option("--recipe", o->recipe, "seed: the original's; default: ours; or both")
      ->check(CLI::IsMember({"seed", "default", "both"}))
      ->capture_default_str();
  command->add_option("--neurons", o->neurons, "on the ring (default: the recipe's, 128)");
  command->add_option("--actions", o->actions, "channels a velocity is spread over (2)");
  command
      ->add_option("--encoding", o->encoding,
                   "turns: left, right, and unused channels; spread: over all channels (turns)")
      ->check(CLI::IsMember({"turns", "spread"}));
  command->add_option("--batch", o->batch, "sequences a step (128)");
  command->add_option("--steps", o->steps, "of training");
  command->add_option("--length", o->length, "steps of a training sequence");
  command->add_option("--gain", o->gain, "hidden neurons of the gain network; 0: none");
  command->add_option("--seed", o->seed, "the same seed gives the same figures (0)")
      ->check(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
  command->add_option("--device", o->device, "cpu, cuda, or auto: cuda where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads; 0: all. They change no bit")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--out", o->out, "folder of the run")->capture_default_str();
  auto* resume = command->add_flag("--resume", o->resume, "go on with the run in that folder");
  command->add_flag("--overwrite", o->overwrite, "start anew where the folder holds a run")
      ->excludes(resume);
  command->add_option("--checkpoint-every", o->checkpoint_every, "steps between checkpoints")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1'000'000'000}))
      ->capture_default_str();
  command->add_option("--peer", o->peers,
                      "another model's result on this task (JSON, see train/README.md); may be "
                      "given more than once");
  command->callback([o, &exit_code] { exit_code = run_training(*o); });
}

}  // namespace annulus::cli
