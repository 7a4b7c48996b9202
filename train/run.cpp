#include "train/run.h"

#include <fmt/format.h>

#include <cmath>

#include "annulus/core/errors.h"
#include "files/file.h"
#include "files/words.h"
#include "train/files/checkpoint.h"
#include "train/page/page.h"

namespace annulus::train {
namespace {

std::string folder_of(const RunOptions& o, const Recipe& r) { return o.out + "/" + r.name; }

[[noreturn]] void nothing_to_resume(const RunOptions& o) {
  std::string names;
  for (const Recipe& r : o.recipes) names += (names.empty() ? "" : " or ") + r.name;
  throw InvalidArgument("--resume: " + o.out + " holds no run of recipe " + names);
}

// Where every recipe stands before anything is written.
void look_before(const RunOptions& o) {
  bool any = false;
  for (const Recipe& r : o.recipes) {
    const std::string folder = folder_of(o, r);
    if (!has_checkpoint(folder)) continue;
    any = true;
    if (o.overwrite) continue;
    const Manifest m = read_manifest(folder);
    if (!o.resume) {
      throw InvalidArgument(fmt::format(
          "{} already holds a run (step {} of {}): continue it with --resume, start anew with "
          "--overwrite, or give another --out",
          folder, m.step, m.recipe.steps));
    }
    if (m.step > r.steps) {
      throw InvalidArgument(
          fmt::format("{} is at step {} already: --steps must be at least that but is {}", folder,
                      m.step, r.steps));
    }
    if (const std::string d = difference(with_steps(m.recipe, r.steps), r); !d.empty()) {
      throw InvalidArgument(
          fmt::format("{} was started with {}: a run is continued as it was started", folder, d));
    }
    (void)read_checkpoint(folder, m);
  }
  if (o.resume && !any) nothing_to_resume(o);
}

// Weights that are all numbers can still lead to states that are none.
void check_finite(const RecipeResult& r) {
  for (const Evaluation* e : {&r.test, &r.long_test, &r.abrupt}) {
    if (std::isfinite(e->mean)) continue;
    throw Diverged(fmt::format(
        "[train] the error of recipe \"{}\" over {} steps is not finite: its states are not",
        r.recipe.name, e->T));
  }
}

// Trains to the end, or until the watcher says stop; false then.
bool train(const RunOptions& o, const RunWatcher& watcher, Trainer& trainer) {
  const std::string folder = folder_of(o, trainer.recipe());
  while (!trainer.finished()) {
    const LossFigures figures = trainer.step();
    watcher.step(trainer, figures);
    const bool stop = watcher.stop() && !trainer.finished();
    if (stop || trainer.finished() || trainer.steps_done() % o.checkpoint_every == 0) {
      save_checkpoint(folder, trainer);
    }
    if (stop) return false;
  }
  return true;
}

}  // namespace

RunOutcome run(const RunOptions& o, const RunWatcher& watcher) {
  for (const Recipe& r : o.recipes) check(r);
  if (o.resume && !files::exists(o.out)) nothing_to_resume(o);
  files::make_folders(o.out);
  const files::Lock lock(
      o.out + "/.lock",
      o.out + ": another process is training here; wait for it or give another --out");
  look_before(o);
  for (const Recipe& r : o.recipes) remove_leftovers(folder_of(o, r));
  // A first checkpoint of every recipe, so that a run that is stopped in one of them knows the others.
  for (const Recipe& r : o.recipes) {
    const std::string folder = folder_of(o, r);
    if (o.resume && has_checkpoint(folder)) continue;
    files::make_folders(folder);
    save_checkpoint(folder, Trainer(r, o.device, o.threads));
  }
  RunOutcome outcome;
  outcome.results.peers = o.peers;
  outcome.results.device = to_string(o.device);
  for (const Recipe& r : o.recipes) {
    const std::string folder = folder_of(o, r);
    const Manifest manifest = read_manifest(folder);
    const std::string bytes = read_checkpoint(folder, manifest);
    Trainer trainer(r, o.device, o.threads);
    load_checkpoint(bytes, manifest, trainer);
    if (manifest.device != outcome.results.device) {
      watcher.note(fmt::format("{} was begun on {}; going on on {} gives other bits", r.name,
                               files::printable(manifest.device), outcome.results.device));
    }
    watcher.begin(trainer);
    if (!train(o, watcher, trainer)) {
      outcome.stopped = Stopped{r.name, trainer.steps_done(), r.steps};
      return outcome;
    }
    watcher.evaluating(trainer);
    outcome.results.recipes.push_back(collect(trainer, o.test_sequences));
    check_finite(outcome.results.recipes.back());
    save_model(folder + "/model.safetensors", trainer);
    files::write_file(folder + "/curve.csv", curve_csv(outcome.results.recipes.back()));
  }
  outcome.results.turning_at_once = error_of_turning_at_once(o.test_sequences, kTestLength);
  files::write_file(o.out + "/results.json", results_json(outcome.results));
  outcome.page = o.out + "/ring-attractor.html";
  files::write_file(outcome.page, render_page(outcome.results));
  return outcome;
}

}  // namespace annulus::train
