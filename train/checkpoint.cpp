#include "train/checkpoint.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "files/file.h"
#include "files/json.h"
#include "files/words.h"
#include "train/recipe_json.h"
#include "train/safetensors.h"

namespace annulus::train {
namespace {

using files::FileError;
using files::JsonError;
using files::JsonObject;
using json = files::Json;

constexpr int kSchema = 1;
constexpr const char* kKind = "annulus ring-attractor checkpoint";
constexpr std::size_t kMostManifestBytes = std::size_t{1} << 20;
constexpr std::int64_t kMostCount = std::int64_t{1} << 53;

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }
std::string file_name(std::int64_t step) {
  return fmt::format("checkpoint-{:06}.safetensors", step);
}

SafeTensor f32(std::string name, std::vector<std::int64_t> shape,
               const std::vector<float>& values) {
  return {std::move(name), SafeDType::kF32, std::move(shape), std::as_bytes(std::span(values))};
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw FileError(path + ": " + what);
}

// What finds damage by a disk or a copy, and is no defence against someone who forges both.
std::uint64_t hash_of(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

Manifest manifest_of(const json& j) {
  const JsonObject o(
      j, "",
      {"schema", "kind", "version", "commit", "device", "step", "seconds", "recipe", "file"});
  if (o.whole("schema", 0, kMostCount) != kSchema) {
    throw JsonError(fmt::format("\"schema\" must be {}", kSchema));
  }
  if (o.text("kind") != kKind) throw JsonError(fmt::format("\"kind\" must be \"{}\"", kKind));
  Manifest m;
  m.device = o.text("device", true);
  m.step = o.whole("step", 0, kMostCount);
  m.seconds = o.real("seconds", 0, 1e9);
  m.recipe = recipe_from_json(o.at("recipe"));
  if (m.step > m.recipe.steps) {
    throw JsonError(
        fmt::format("\"step\" is {}, but the recipe has {} steps", m.step, m.recipe.steps));
  }
  const JsonObject file = o.object("file", {"name", "bytes", "xxh64"});
  m.file = file.text("name");
  m.bytes = static_cast<std::uint64_t>(file.whole("bytes", 0, kMostCount));
  const std::string hash = file.text("xxh64");
  if (hash.size() != 16 || hash.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw JsonError("\"file.xxh64\" must be 16 lower-case hexadecimal digits");
  }
  m.hash = std::stoull(hash, nullptr, 16);
  // A name of ours and nothing else: no path out of the folder can hide in it.
  if (m.file != file_name(m.step)) {
    throw JsonError(fmt::format("the file of step {} must be \"{}\" but is \"{}\"", m.step,
                                file_name(m.step), files::printable(m.file)));
  }
  return m;
}

}  // namespace

void save_checkpoint(const std::string& folder, const Trainer& trainer) {
  const std::string path = manifest_path(folder);
  std::string before;
  if (files::exists(path)) {
    try {
      before = read_manifest(folder).file;
    } catch (const FileError&) {
      // A manifest nobody can read names nothing that is worth removing.
    }
  }
  std::vector<SafeTensor> tensors;
  for (const Parameter& p : trainer.model().parameters()) {
    tensors.push_back(f32(p.name, p.shape, p.value));
    tensors.push_back(f32("adam.mean." + p.name, p.shape, p.mean));
    tensors.push_back(f32("adam.square." + p.name, p.shape, p.square));
  }
  const std::int64_t step = trainer.steps_done();
  tensors.push_back(f32("history.loss", {step}, trainer.history().loss));
  tensors.push_back(f32("history.error", {step}, trainer.history().error));
  const std::string bytes = write_safetensors(tensors);
  const std::string name = file_name(step);
  files::write_file(folder + "/" + name, bytes);

  json manifest;
  manifest["schema"] = kSchema;
  manifest["kind"] = kKind;
  manifest["version"] = build_info().version;
  manifest["commit"] = build_info().commit;
  manifest["device"] = to_string(trainer.model().device());
  manifest["step"] = step;
  manifest["seconds"] = trainer.seconds();
  manifest["recipe"] = to_json(trainer.recipe());
  manifest["file"] = {
      {"name", name}, {"bytes", bytes.size()}, {"xxh64", fmt::format("{:016x}", hash_of(bytes))}};
  files::write_file(path, manifest.dump(2) + "\n");
  if (!before.empty() && before != name) files::remove_file(folder + "/" + before);
}

bool has_checkpoint(const std::string& folder) { return files::exists(manifest_path(folder)); }

Manifest read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder);
  const std::string text = files::read_file(path, kMostManifestBytes);
  try {
    return manifest_of(files::parse_json(text));
  } catch (const JsonError& e) {
    refuse(path, e.what());
  } catch (const InvalidArgument& e) {
    refuse(path, e.what());
  }
}

void load_checkpoint(const std::string& folder, const Manifest& manifest, Trainer& trainer) {
  const std::string path = folder + "/" + manifest.file;
  std::string bytes = files::read_file(path, SafetensorsFile::kMostBytes);
  if (bytes.size() != manifest.bytes) {
    refuse(path, fmt::format("has {} bytes, the manifest says {}", bytes.size(), manifest.bytes));
  }
  if (const std::uint64_t hash = hash_of(bytes); hash != manifest.hash) {
    refuse(path, fmt::format("is damaged: its XXH64 is {:016x}, the manifest says {:016x}", hash,
                             manifest.hash));
  }
  try {
    const SafetensorsFile file(std::move(bytes));
    // All of it before any of it is taken over.
    std::vector<std::vector<float>> values;
    for (const Parameter& p : trainer.model().parameters()) {
      for (const char* prefix : {"", "adam.mean.", "adam.square."}) {
        values.push_back(file.f32(prefix + p.name, p.shape));
      }
    }
    const std::array<std::int64_t, 1> steps = {manifest.step};
    History history{file.f32("history.loss", steps), file.f32("history.error", steps)};
    if (file.tensors().size() != values.size() + 2) {
      refuse(path, fmt::format("has {} tensors where {} are due", file.tensors().size(),
                               values.size() + 2));
    }
    std::size_t at = 0;
    for (Parameter& p : trainer.model().parameters()) {
      p.value = std::move(values[at++]);
      p.mean = std::move(values[at++]);
      p.square = std::move(values[at++]);
    }
    trainer.restore(std::move(history), manifest.seconds);
  } catch (const SafetensorsError& e) {
    refuse(path, e.what());
  }
}

void save_model(const std::string& path, const Trainer& trainer) {
  std::vector<SafeTensor> tensors;
  for (const Parameter& p : trainer.model().parameters()) {
    tensors.push_back(f32(p.name, p.shape, p.value));
  }
  files::write_file(path,
                    write_safetensors(tensors, {{"format", "annulus ring-attractor"},
                                                {"recipe", to_json(trainer.recipe()).dump()}}));
}

}  // namespace annulus::train
