// A checkpoint of a training, in a folder of its own:
//   checkpoint-<step>.safetensors   parameters, Adam's averages, the history
//   manifest.json                   schema, recipe, step, size and XXH64 of that file, and of itself
// Both are written to a temporary name, fsync, rename; the manifest last, and only then is the file
// of the checkpoint before removed. So at any moment the manifest names a file that is whole, and a
// run that is killed loses at most what it did since. Continuing gives the bits of a run that was
// never stopped.
//
// The files may be a stranger's: a name in them is compared with the folder's and never used as a
// path, and numbers are compared with the sizes of the files before anything is allocated for them.
// The checksums find damage; they are no defence against someone who forges them too.
#pragma once

#include <cstdint>
#include <string>

#include "train/trainer.h"

namespace annulus::train {

// A folder that holds no checkpoint that can be used (missing, damaged, or of another kind) throws
// files::FileError, which names the file and what is wrong with it. `folder` ends in the recipe's
// name.
void save_checkpoint(const std::string& folder, const Trainer& trainer);

struct Manifest {
  Recipe recipe;
  std::int64_t step = 0;
  double seconds = 0;
  std::string device;  // where it was trained: another kind of device gives other bits; any text
  std::string file;
  std::uint64_t bytes = 0, hash = 0;
};
bool has_checkpoint(const std::string& folder);
Manifest read_manifest(const std::string& folder);
// The bytes of the manifest's file, which hold the tensors of its recipe and step, all finite.
std::string read_checkpoint(const std::string& folder, const Manifest& manifest);
// Takes them over. `trainer` was made with the manifest's recipe.
void load_checkpoint(const std::string& bytes, const Manifest& manifest, Trainer& trainer);

// Removes what a run that was killed left: temporary files, and checkpoints other than the one that
// the manifest names. Nobody else may be writing here.
void remove_leftovers(const std::string& folder);

// The weights alone, as a user of the trained network wants them.
void save_model(const std::string& path, const Trainer& trainer);

}  // namespace annulus::train
