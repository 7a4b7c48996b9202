// A checkpoint of a training, in a folder of its own:
//   checkpoint-<step>.safetensors   parameters, Adam's averages, the history
//   manifest.json                   schema, recipe, step, and size and XXH64 of that file
// Both are written to a temporary name, fsync, rename; the manifest last, and only then is the file
// of the checkpoint before removed. So at any moment the manifest names a file that is whole, and a
// run that is killed loses at most what it did since. Continuing gives the bits of a run that was
// never stopped.
#pragma once

#include <cstdint>
#include <string>

#include "train/trainer.h"

namespace annulus::train {

// A folder that holds no checkpoint that can be used (missing, damaged, or of another kind) throws
// files::FileError, which names the file and what is wrong with it.
void save_checkpoint(const std::string& folder, const Trainer& trainer);

struct Manifest {
  Recipe recipe;
  std::int64_t step = 0;
  double seconds = 0;
  std::string device;  // where it was trained: another kind of device gives other bits
  std::string file;
  std::uint64_t bytes = 0, hash = 0;
};
bool has_checkpoint(const std::string& folder);
Manifest read_manifest(const std::string& folder);
// `trainer` was made with the manifest's recipe.
void load_checkpoint(const std::string& folder, const Manifest& manifest, Trainer& trainer);

// The weights alone, as a user of the trained network wants them.
void save_model(const std::string& path, const Trainer& trainer);

}  // namespace annulus::train
