// Checkpoints: a run that was stopped and continued ends with the bits of one that was not; a
// checkpoint that is damaged in any way is refused and leaves the trainer as it was.
#include "train/checkpoint.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "files/file.h"
#include "testing/scratch_folder.h"
#include "train/recipe_json.h"

namespace annulus::train {
namespace {

using files::FileError;
using files::remove_file;
using files::write_file;

class TrainCheckpoint : public ::testing::Test {
 protected:
  static Recipe recipe() {
    Recipe r = default_recipe();
    r.neurons = 12;
    r.batch = 5;
    r.steps = 9;
    r.length = 20;
    r.first_length = 10;
    r.growth = 0.5;
    r.gain_hidden = 3;
    r.seed = 0xFFFFFFFFFFFFFFFFull;
    return r;
  }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
  std::string text(const std::string& name) const {
    return files::read_file(folder_ + "/" + name, std::size_t{1} << 24);
  }

  const testing::ScratchFolder scratch_;
  const std::string folder_ = scratch_.path();
};

TEST_F(TrainCheckpoint, ContinuesToTheSameBits) {
  Trainer whole(recipe(), kCPU, 1);
  while (!whole.finished()) whole.step();

  for (const int stop : {0, 1, 4, 8, 9}) {
    {
      Trainer first(recipe(), kCPU, 2);
      for (int i = 0; i < stop; ++i) first.step();
      save_checkpoint(folder_, first);
    }
    const Manifest manifest = read_manifest(folder_);
    EXPECT_EQ(manifest.step, stop);
    EXPECT_EQ(to_json(manifest.recipe), to_json(recipe()));
    Trainer second(manifest.recipe, kCPU, 1);
    load_checkpoint(folder_, manifest, second);
    EXPECT_EQ(second.steps_done(), stop);
    while (!second.finished()) second.step();
    EXPECT_EQ(second.history().loss, whole.history().loss);
    EXPECT_EQ(second.history().error, whole.history().error);
    for (std::size_t i = 0; i < whole.model().parameters().size(); ++i) {
      const Parameter &a = whole.model().parameters()[i], &b = second.model().parameters()[i];
      EXPECT_EQ(a.value, b.value) << a.name;
      EXPECT_EQ(a.mean, b.mean) << a.name;
      EXPECT_EQ(a.square, b.square) << a.name;
    }
  }
}

TEST_F(TrainCheckpoint, KeepsOneFileAndItsManifest) {
  Trainer trainer(recipe(), kCPU, 1);
  save_checkpoint(folder_, trainer);
  EXPECT_EQ(files(), (std::set<std::string>{"checkpoint-000000.safetensors", "manifest.json"}));
  trainer.step();
  save_checkpoint(folder_, trainer);
  save_checkpoint(folder_, trainer);  // the same step again
  EXPECT_EQ(files(), (std::set<std::string>{"checkpoint-000001.safetensors", "manifest.json"}));
}

TEST_F(TrainCheckpoint, AFileWithoutAManifestChangesNothing) {
  // What a run leaves that is killed between its two renames: the next file, the old manifest.
  Trainer trainer(recipe(), kCPU, 1);
  save_checkpoint(folder_, trainer);
  write_file(folder_ + "/checkpoint-000007.safetensors", "half of a file");
  const Manifest manifest = read_manifest(folder_);
  EXPECT_EQ(manifest.step, 0);
  EXPECT_NO_THROW(load_checkpoint(folder_, manifest, trainer));
}

TEST_F(TrainCheckpoint, RefusesEveryFlippedBitOfTheFile) {
  Trainer trainer(recipe(), kCPU, 1);
  trainer.step();
  save_checkpoint(folder_, trainer);
  const Manifest manifest = read_manifest(folder_);
  const std::string path = folder_ + "/" + manifest.file, good = text(manifest.file);
  const std::vector<float> before = trainer.model().parameters()[0].value;
  for (std::uint64_t i = 0; i < 100; ++i) {
    Rng rng(i);
    std::string bad = good;
    if (i % 10 == 0) {
      bad.resize(static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(good.size()))));
    } else {
      const auto at = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(good.size())));
      bad[at] = static_cast<char>(bad[at] ^ (1 << rng.below(8)));
    }
    write_file(path, bad);
    EXPECT_THROW(load_checkpoint(folder_, manifest, trainer), FileError) << i;
  }
  EXPECT_EQ(trainer.model().parameters()[0].value, before);
  remove_file(path);
  EXPECT_THROW(load_checkpoint(folder_, manifest, trainer), FileError);
  write_file(path, good);
  EXPECT_NO_THROW(load_checkpoint(folder_, manifest, trainer));
}

TEST_F(TrainCheckpoint, RefusesAFileThatIsWholeButNotOurs) {
  Trainer trainer(recipe(), kCPU, 1);
  save_checkpoint(folder_, trainer);
  Recipe other = recipe();
  other.neurons = 13;
  Trainer larger(other, kCPU, 1);
  EXPECT_THROW(load_checkpoint(folder_, read_manifest(folder_), larger), FileError);
  other = recipe();
  other.gain_hidden = 0;
  Trainer without(other, kCPU, 1);
  EXPECT_THROW(load_checkpoint(folder_, read_manifest(folder_), without), FileError);
}

TEST_F(TrainCheckpoint, RefusesManifestsThatAreWrong) {
  Trainer trainer(recipe(), kCPU, 1);
  trainer.step();
  save_checkpoint(folder_, trainer);
  const std::string path = folder_ + "/manifest.json", good = text("manifest.json");
  const auto refused = [&](const std::string& content) {
    write_file(path, content);
    try {
      (void)read_manifest(folder_);
      return std::string();
    } catch (const FileError& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(refused(good), "");

  // Every key gone, misspelt, and of every wrong type.
  const auto json = nlohmann::ordered_json::parse(good);
  int mutants = 0;
  const std::array<nlohmann::ordered_json, 8> wrong = {nullptr,
                                                       true,
                                                       "text",
                                                       -1,
                                                       1.5,
                                                       1e300,
                                                       nlohmann::ordered_json::array({1}),
                                                       nlohmann::ordered_json::object({{"x", 1}})};
  const auto mutate = [&](const std::vector<std::string>& at, const std::string& name) {
    const auto object = [&](nlohmann::ordered_json& root) -> nlohmann::ordered_json& {
      nlohmann::ordered_json* o = &root;
      for (const std::string& k : at) o = &(*o)[k];
      return *o;
    };
    auto gone = json;
    object(gone).erase(name);
    const bool informative = at.empty() && (name == "version" || name == "commit");
    if (!informative) {
      EXPECT_NE(refused(gone.dump()), "") << name;
    }
    auto misspelt = json;
    object(misspelt)[name + "x"] = object(misspelt)[name];
    EXPECT_NE(refused(misspelt.dump()), "") << name;
    mutants += 2;
    for (const auto& value : wrong) {
      auto bad = json;
      auto& field = object(bad)[name];
      // The same type says nothing here: a name may be any text, a rate 1.5.
      if (field.is_string() && value.is_string() && (name == "device" || name == "name")) continue;
      if (field.is_number() && value == 1.5) continue;
      if (informative) continue;
      field = value;
      EXPECT_NE(refused(bad.dump()), "") << name << " = " << value.dump();
      ++mutants;
    }
  };
  for (const auto& [name, value] : json.items()) mutate({}, name);
  for (const auto& [name, value] : json["recipe"].items()) mutate({"recipe"}, name);
  for (const auto& [name, value] : json["file"].items()) mutate({"file"}, name);

  // A way out of the folder, a step the recipe does not have, sizes nobody has memory for.
  for (const char* name : {"../secret", "/etc/passwd", "checkpoint-000002.safetensors", "", "."}) {
    auto bad = json;
    bad["file"]["name"] = name;
    EXPECT_NE(refused(bad.dump()), "") << name;
  }
  for (const char* field : {"neurons", "actions", "batch", "length", "gain_hidden", "steps"}) {
    auto bad = json;
    bad["recipe"][field] = std::int64_t{1} << 40;
    EXPECT_NE(refused(bad.dump()), "") << field;
  }
  for (std::size_t n = 0; n + 3 < good.size(); n += 7, ++mutants) {  // cut short
    EXPECT_NE(refused(good.substr(0, n)), "") << n;
  }
  EXPECT_NE(refused(std::string(200000, '[')), "");
  EXPECT_NE(refused(std::string(3 << 20, ' ')), "");
  EXPECT_GE(mutants, 200);
  write_file(path, good);
  EXPECT_NO_THROW((void)read_manifest(folder_));
}

TEST_F(TrainCheckpoint, NoFolderNoCheckpoint) {
  EXPECT_FALSE(has_checkpoint(folder_));
  EXPECT_THROW((void)read_manifest(folder_), FileError);
  Trainer trainer(recipe(), kCPU, 1);
  EXPECT_THROW(save_checkpoint(folder_ + "/none/there", trainer), FileError);
}

// A run of an earlier version can be continued: the checksum of a file is XXH64 with seed 0.
TEST_F(TrainCheckpoint, TheChecksumIsXxh64) {
  Trainer trainer(recipe(), kCPU, 1);
  save_checkpoint(folder_, trainer);
  Manifest manifest = read_manifest(folder_);
  for (const auto& [content, hash] :
       {std::pair<std::string, std::uint64_t>{"", 0xEF46DB3751D8E999},
        {"a", 0xD24EC4F1A98C6E5B},
        {"abc", 0x44BC2CF5AD770999},
        {"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1}}) {
    write_file(folder_ + "/" + manifest.file, content);
    manifest.bytes = content.size();
    manifest.hash = 0;
    try {
      load_checkpoint(folder_, manifest, trainer);
      FAIL();
    } catch (const FileError& e) {
      std::ostringstream digits;
      digits << std::hex << hash;
      EXPECT_NE(std::string(e.what()).find("its XXH64 is " + digits.str()), std::string::npos)
          << e.what();
    }
  }
}

}  // namespace
}  // namespace annulus::train
