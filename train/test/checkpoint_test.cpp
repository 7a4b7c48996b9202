// A run and its checkpoints: one that was stopped and continued ends with the bits of one that was
// not; what is damaged, forged or of another run is refused, and nothing is lost or overwritten by it.
#include "train/files/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "annulus/core/errors.h"
#include "files/file.h"
#include "testing/scratch_folder.h"
#include "train/run.h"

namespace annulus::train {
namespace {

using files::FileError;
using files::write_file;
using Json = nlohmann::ordered_json;

Recipe tiny(Recipe r) {
  r.neurons = 12;
  r.batch = 4;
  r.steps = 6;
  r.length = 20;
  r.first_length = 10;
  r.growth = 0.5;
  r.seed = 0xFFFFFFFFFFFFFFFFull;
  return r;
}

std::string text(const std::string& path) { return files::read_file(path, std::size_t{1} << 24); }

// The message of the error, empty when there is none.
template <class Error, class F>
std::string refusal(F&& f) {
  try {
    f();
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

class TrainCheckpoint : public ::testing::Test {
 protected:
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
  // What loading says of the file once its manifest speaks of `content`.
  std::string loading(const std::string& content, std::uint64_t hash) {
    Manifest manifest = read_manifest(folder_);
    manifest.bytes = content.size();
    manifest.hash = hash;
    write_file(folder_ + "/" + manifest.file, content);
    return refusal<FileError>([&] { (void)read_checkpoint(folder_, manifest); });
  }
  std::string hash_of(const std::string& content) {
    const std::string message = loading(content, 0), mark = "its XXH64 is ";
    return message.substr(message.find(mark) + mark.size(), 16);
  }

  // What reading a manifest says.
  std::string reading(const std::string& content) {
    std::ofstream(folder_ + "/manifest.json") << content;  // no fsync: there are thousands
    return refusal<FileError>([&] { (void)read_manifest(folder_); });
  }
  // A forged manifest, with the checksum that belongs to it.
  std::string signed_text(Json json) {
    if (json.erase("xxh64") > 0) json["xxh64"] = "0000000000000000";  // the last key
    std::string text = json.dump(2) + "\n";
    const std::string message = reading(text), mark = "its XXH64 is ";
    const auto at = message.find(mark);
    return at == std::string::npos
               ? text
               : text.replace(text.size() - 20, 16, message.substr(at + mark.size(), 16));
  }

  const testing::ScratchFolder scratch_;
  const std::string folder_ = scratch_.path() + "/default";
  Trainer trainer_{tiny(default_recipe()), kCPU, 1};
  void SetUp() override { files::make_folders(folder_); }
};

TEST_F(TrainCheckpoint, KeepsOneFileAndItsManifest) {
  save_checkpoint(folder_, trainer_);
  EXPECT_EQ(names(), (std::set<std::string>{"checkpoint-000000.safetensors", "manifest.json"}));
  trainer_.step();
  save_checkpoint(folder_, trainer_);
  save_checkpoint(folder_, trainer_);  // the same step again
  EXPECT_EQ(names(), (std::set<std::string>{"checkpoint-000001.safetensors", "manifest.json"}));
}

TEST_F(TrainCheckpoint, AFileWithoutAManifestChangesNothing) {
  // What a run leaves that is killed between its two renames: the next file, the old manifest.
  save_checkpoint(folder_, trainer_);
  write_file(folder_ + "/checkpoint-000007.safetensors", "half of a file");
  const Manifest manifest = read_manifest(folder_);
  EXPECT_EQ(manifest.step, 0);
  EXPECT_NO_THROW((void)read_checkpoint(folder_, manifest));
  remove_leftovers(folder_);
  EXPECT_EQ(names(), (std::set<std::string>{"checkpoint-000000.safetensors", "manifest.json"}));
}

TEST_F(TrainCheckpoint, WhatNoManifestNamesStaysWhereThereIsNone) {
  const std::set<std::string> kept = {"checkpoint-000007.safetensors", "notes.12.tmp"};
  for (const std::string& name : kept) write_file(folder_ + "/" + name, "x");
  write_file(folder_ + "/checkpoint-000008.safetensors.12.tmp", "x");
  write_file(folder_ + "/manifest.json.12.tmp", "x");
  remove_leftovers(folder_);
  EXPECT_EQ(names(), kept);
}

TEST_F(TrainCheckpoint, RefusesEveryFlippedBitOfTheManifest) {
  trainer_.step();
  save_checkpoint(folder_, trainer_);
  const std::string path = folder_ + "/manifest.json", good = text(path);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto put = [&](std::size_t at, int c) {
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(c)).flush();
  };
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    put(bit / 8, good[bit / 8] ^ (1 << bit % 8));
    ASSERT_THROW((void)read_manifest(folder_), FileError) << "bit " << bit;
    put(bit / 8, good[bit / 8]);
  }
  EXPECT_NO_THROW((void)read_manifest(folder_));
  Json json = Json::parse(good);
  json.erase("xxh64");  // as earlier versions wrote them
  EXPECT_NE(reading(json.dump(2) + "\n").find("earlier version"), std::string::npos);
}

TEST_F(TrainCheckpoint, RefusesTheNameOfAnotherFolder) {
  save_checkpoint(folder_, trainer_);
  Json json = Json::parse(text(folder_ + "/manifest.json"));
  EXPECT_EQ(reading(signed_text(json)), "");
  for (const char* name : {"../../victim", "seed", "", ".", "default/", "\x1b]0;t\x07"}) {
    json["recipe"]["name"] = name;
    const std::string message = reading(signed_text(json));
    EXPECT_NE(message.find("\"recipe.name\" must "), std::string::npos) << name << message;
    EXPECT_EQ(message.find('\x1b'), std::string::npos) << message;
  }
}

TEST_F(TrainCheckpoint, RefusesWhatIsNotFinite) {
  trainer_.step();
  save_checkpoint(folder_, trainer_);
  const std::string good = text(folder_ + "/" + read_manifest(folder_).file);
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof(header));
  const std::size_t begin = 8 + header;
  for (const float value : {NAN, -NAN, HUGE_VALF, -HUGE_VALF}) {
    for (const std::size_t at : {begin, begin + 400, good.size() - sizeof(value)}) {
      std::string bad = good;
      std::memcpy(bad.data() + at, &value, sizeof(value));
      const std::string message = loading(bad, std::stoull(hash_of(bad), nullptr, 16));
      EXPECT_NE(message.find("not finite"), std::string::npos) << at << message;
    }
  }
}

TEST_F(TrainCheckpoint, RefusesEveryFlippedBitOfTheFile) {
  trainer_.step();
  save_checkpoint(folder_, trainer_);
  const Manifest manifest = read_manifest(folder_);
  const std::string path = folder_ + "/" + manifest.file, good = text(path);
  for (std::uint64_t i = 0; i < 100; ++i) {
    Rng rng(i);
    std::string bad = good;
    const auto at = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(good.size())));
    if (i % 10 == 0) {
      bad.resize(at);
    } else {
      bad[at] = static_cast<char>(bad[at] ^ (1 << rng.below(8)));
    }
    write_file(path, bad);
    const std::string message =
        refusal<FileError>([&] { (void)read_checkpoint(folder_, manifest); });
    const char* why = i % 10 == 0 ? "the manifest says" : "is damaged";
    EXPECT_TRUE(message.starts_with(path) && message.find(why) != std::string::npos) << message;
  }
  files::remove_file(path);
  EXPECT_THROW((void)read_checkpoint(folder_, manifest), FileError);
  write_file(path, good + "0");
  EXPECT_THROW((void)read_checkpoint(folder_, manifest), FileError);
  write_file(path, good);
  Trainer other(trainer_.recipe(), kCPU, 1);
  load_checkpoint(read_checkpoint(folder_, manifest), manifest, other);
  EXPECT_EQ(other.model().parameters()[0].value, trainer_.model().parameters()[0].value);
  EXPECT_EQ(other.model().parameters()[1].square, trainer_.model().parameters()[1].square);
  EXPECT_EQ(other.history().loss, trainer_.history().loss);
}

// Bytes changed, doubled and dropped, in the header most of all, and a manifest that says the same.
TEST_F(TrainCheckpoint, RefusesAFileThatIsWholeButNotOurs) {
  trainer_.step();
  save_checkpoint(folder_, trainer_);
  const std::string good = text(folder_ + "/" + read_manifest(folder_).file);
  const auto forged = [&](const std::string& bytes) {
    return loading(bytes, std::stoull(hash_of(bytes), nullptr, 16));
  };
  EXPECT_EQ(forged(good), "");
  const std::size_t header = good.find("history.error");
  for (std::size_t at = 0; at < header; at += 61) {
    for (std::string bad : {std::string(good).erase(at, 1), std::string(good).insert(at, 1, '1'),
                            std::string(good).replace(at, 1, 1, static_cast<char>(good[at] + 1))}) {
      bad.resize(good.size(), '\0');
      EXPECT_NE(forged(bad).find("does not hold the tensors"), std::string::npos) << at;
    }
  }
  for (const std::string& bad : {good.substr(0, good.size() - 4), good + "0000", good.substr(0, 7),
                                 std::string(), std::string(64, '\xff')}) {
    EXPECT_NE(forged(bad).find("does not hold the tensors"), std::string::npos) << bad.size();
  }
  EXPECT_EQ(forged(good), "");
}

TEST_F(TrainCheckpoint, TheModelIsASafetensorsFile) {
  const std::string path = folder_ + "/model.safetensors";
  save_model(path, trainer_);
  const std::string bytes = text(path);
  std::uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));  // little-endian, as the machines are
  const Json header = Json::parse(bytes.substr(8, size));
  EXPECT_EQ(header["__metadata__"]["recipe"], to_json(trainer_.recipe()).dump());
  EXPECT_EQ(header.size(), 1 + trainer_.model().parameters().size());
  std::size_t at = 0;
  for (const Parameter& p : trainer_.model().parameters()) {
    const std::size_t end = at + p.value.size() * sizeof(float);
    EXPECT_EQ(header[p.name],
              Json({{"dtype", "F32"}, {"shape", p.shape}, {"data_offsets", {at, end}}}));
    EXPECT_EQ(std::memcmp(bytes.data() + 8 + size + at, p.value.data(), end - at), 0) << p.name;
    at = end;
  }
  EXPECT_EQ(bytes.size(), 8 + size + at);
  EXPECT_EQ(size % 8, 0u);
}

TEST_F(TrainCheckpoint, RefusesManifestsThatAreWrong) {
  trainer_.step();
  save_checkpoint(folder_, trainer_);
  const std::string good = text(folder_ + "/manifest.json");
  int mutants = 0;
  const auto refused = [&](const std::string& content) {
    ++mutants;
    return !reading(content).empty();
  };
  // Of what its checksum does not give away.
  const auto refused_signed = [&](const Json& forged) {
    const std::string message = (++mutants, reading(signed_text(forged)));
    return !message.empty() && message.find("is damaged") == std::string::npos;
  };
  EXPECT_FALSE(refused(good));
  EXPECT_FALSE(refused_signed(Json::parse(good)));

  // Every key gone, misspelt, and of every wrong type.
  const Json json = Json::parse(good), leaves = json.flatten();
  const Json wrong =
      Json::array({nullptr, true, "text", -1, 1.5, 1e300, Json::array({1}), {{"x", 1}}});
  std::vector<std::string> keys = {"/recipe", "/file"};
  for (const auto& [key, value] : leaves.items()) keys.push_back(key);
  for (const std::string& key : keys) {
    const Json::json_pointer at(key);
    Json bad = json;
    bad[Json::json_pointer(key + "x")] = json[at];
    EXPECT_TRUE(refused_signed(bad)) << key;
    if (key == "/version" || key == "/commit" || key == "/xxh64") continue;  // for people; below
    bad = json;
    bad[at.parent_pointer()].erase(at.back());
    EXPECT_TRUE(refused_signed(bad)) << key;
    for (const Json& value : wrong) {
      // The same type says nothing here: a name may be any text, a rate 1.5.
      if (value == "text" && key == "/device") continue;
      if (value == 1.5 && json[at].is_number_float()) continue;
      if (value == -1 && (key == "/recipe/J0" || key == "/recipe/J1")) continue;
      bad = json;
      bad[at] = value;
      EXPECT_TRUE(refused_signed(bad)) << key << " = " << value.dump();
    }
  }
  // A way out of the folder, sizes nobody has memory for.
  for (const char* name : {"../secret", "/etc/passwd", "checkpoint-000002.safetensors", "", "."}) {
    Json bad = json;
    bad["file"]["name"] = name;
    EXPECT_TRUE(refused_signed(bad)) << name;
  }
  for (const char* field : {"neurons", "actions", "batch", "length", "gain_hidden", "steps"}) {
    Json bad = json;
    bad["recipe"][field] = std::int64_t{1} << 40;
    EXPECT_TRUE(refused_signed(bad)) << field;
  }
  for (const char* field : {"neurons", "actions", "gain_hidden"}) {  // not what the file has
    Json bad = json;
    bad["recipe"][field] = json["recipe"][field].get<int>() + 1;
    EXPECT_NE(reading(signed_text(bad)).find("bytes"), std::string::npos) << field;
  }
  for (std::size_t n = 0; n + 3 < good.size(); n += 7) {  // cut short
    EXPECT_TRUE(refused(good.substr(0, n))) << n;
  }
  EXPECT_TRUE(refused(std::string(200000, '[')));
  EXPECT_TRUE(refused(std::string(3 << 20, ' ')));
  EXPECT_GE(mutants, 200);
  EXPECT_FALSE(refused(good));
}

TEST_F(TrainCheckpoint, NoFolderNoCheckpoint) {
  EXPECT_FALSE(has_checkpoint(folder_));
  EXPECT_THROW((void)read_manifest(folder_), FileError);
  EXPECT_THROW(save_checkpoint(folder_ + "/none/there", trainer_), FileError);
}

class TrainRun : public ::testing::Test {
 protected:
  RunOutcome go() { return run(options_, watcher_); }

  const testing::ScratchFolder scratch_;
  RunOptions options_{.out = scratch_.path() + "/a/b",
                      .recipes = {tiny(original_recipe()), tiny(default_recipe())},
                      .checkpoint_every = 4,
                      .test_sequences = 3};
  int steps_ = 0, stop_at_ = -1;
  RunWatcher watcher_{.begin = [](const Trainer&) {},
                      .step = [this](const Trainer&, const LossFigures&) { ++steps_; },
                      .evaluating = [](const Trainer&) {},
                      .stop = [this] { return steps_ == stop_at_; },
                      .note = [](const std::string&) {}};
};

// Time and page apart, a run is a function of its recipes.
std::string without_seconds(std::string json) {
  for (auto at = json.find("\"seconds\""); at != std::string::npos;
       at = json.find("\"seconds\"", at + 1)) {
    json.erase(at, json.find('\n', at) - at);
  }
  return json;
}

TEST_F(TrainRun, StoppedAnywhereItEndsWithTheSameFiles) {
  const RunOutcome whole = go();
  EXPECT_FALSE(whole.stopped);
  EXPECT_EQ(steps_, 12);
  std::vector<std::string> names, expected;
  for (const char* recipe : {"/original", "/default"}) {
    for (const char* name :
         {"/model.safetensors", "/curve.csv", "/checkpoint-000006.safetensors"}) {
      names.push_back(std::string(recipe) + name);
      expected.push_back(text(options_.out + names.back()));
    }
  }
  const std::string results = without_seconds(text(options_.out + "/results.json"));
  EXPECT_NE(text(whole.page).find("</html>"), std::string::npos);

  for (const int at : {1, 5, 6, 7, 11, 12}) {
    options_.out = scratch_.path() + "/stopped" + std::to_string(at);
    options_.resume = false;
    steps_ = 0;
    stop_at_ = at;
    const RunOutcome first = go();
    // A stop asked for in the last step of a recipe takes effect in the next.
    if (at == 12) {
      EXPECT_FALSE(first.stopped);
      continue;
    }
    if (at != 6) {
      ASSERT_TRUE(first.stopped);
      EXPECT_EQ(first.stopped->recipe, at < 6 ? "original" : "default");
      EXPECT_EQ(first.stopped->step, at < 6 ? at : at - 6);
    }
    stop_at_ = -1;
    options_.resume = true;
    options_.threads = 2;
    EXPECT_FALSE(go().stopped);
    EXPECT_EQ(steps_, 12);
    for (std::size_t i = 0; i < names.size(); ++i) {
      EXPECT_EQ(text(options_.out + names[i]), expected[i]) << at << names[i];
    }
    EXPECT_EQ(without_seconds(text(options_.out + "/results.json")), results) << at;
  }
}

TEST_F(TrainRun, ARunIsNotOverwrittenUnasked) {
  (void)go();
  EXPECT_THROW((void)go(), InvalidArgument);
  options_.overwrite = true;
  EXPECT_NO_THROW((void)go());
}

TEST_F(TrainRun, ASecondWriterIsRefused) {
  const auto step = watcher_.step;
  std::string message;
  watcher_.step = [&](const Trainer& t, const LossFigures& f) {
    step(t, f);
    RunOptions second = options_;
    second.overwrite = true;
    message = refusal<FileError>([&] { (void)run(second, watcher_); });
  };
  (void)go();
  EXPECT_NE(message.find("another process is training here"), std::string::npos) << message;
  EXPECT_FALSE(files::exists(options_.out + "/.lock"));
}

// A finished run of a constant rate trains on to the bits of one that had more steps from the start.
TEST_F(TrainRun, TrainsOn) {
  options_.recipes = {tiny(original_recipe())};
  (void)go();
  options_.recipes[0] = with_steps(options_.recipes[0], 9);
  options_.resume = true;
  EXPECT_FALSE(go().stopped);
  EXPECT_EQ(steps_, 9);
  const std::string on = text(options_.out + "/original/model.safetensors");
  options_.resume = false;
  options_.overwrite = true;
  (void)go();
  EXPECT_EQ(text(options_.out + "/original/model.safetensors"), on);
}

TEST_F(TrainRun, ContinuesOnlyWhatWasStarted) {
  options_.resume = true;
  EXPECT_THROW((void)go(), InvalidArgument);  // nothing there
  options_.resume = false;
  stop_at_ = 2;
  (void)go();
  options_.resume = true;
  options_.recipes[0].steps = 1;
  EXPECT_NE(refusal<InvalidArgument>([&] { (void)go(); }).find("at step 2 already"),
            std::string::npos);
  options_.recipes[0].steps = 6;
  options_.recipes[0].batch = 5;
  const std::string message = refusal<InvalidArgument>([&] { (void)go(); });
  EXPECT_NE(message.find("batch 4, not 5"), std::string::npos) << message;
}

TEST_F(TrainRun, AnImpossibleRecipeIsRefusedBeforeAnythingIsWritten) {
  options_.recipes[1].neurons = 0;
  EXPECT_THROW((void)go(), InvalidArgument);
  EXPECT_FALSE(files::exists(options_.out));
}

}  // namespace
}  // namespace annulus::train
