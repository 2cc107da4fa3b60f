// Runs a family through the real program with a tiny folder of tests/golden: sampling, training on recorded batches,
// and damaged files.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {

/// Values that differ between families.
struct FamilyFacts {
  std::string name;                     // the part after train_ and generate_
  std::string folder, batches;          // under tests/golden; `batches` is for replay_batches
  std::vector<std::string> words = {};  // words of every command
};

struct FamilyProgram : testing::Test {
  using Words = std::vector<std::string>;
  explicit FamilyProgram(FamilyFacts family)
      : facts(std::move(family)), base(MD_SOURCE_DIR "/tests/golden/" + facts.folder) {}

  const FamilyFacts facts;
  const std::string base;
  TemporaryFolder t;

  Outcome run(const std::string& command, Words words, const Words& extra) {
    words.insert(words.begin(), {command + "_" + facts.name, MD_SOURCE_DIR "/tests/pipelines/generate.yml"});
    words.insert(words.end(), facts.words.begin(), facts.words.end());
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  Outcome generate(const std::string& model, const Words& extra) {
    return run("generate",
               {"pretrained_model_name_or_path=" + model, "output_dir=" + t.path(), "prompt=a red heart",
                "num_inference_steps=2", "height=16", "width=16", "output_type=latent"},
               extra);
  }
  /// Trains the folder for six steps as the run `run`.
  Outcome train(const Words& extra) {
    return run("train",
               {"run_name=run", "output_dir=" + t.path(), "pretrained_model_name_or_path=" + base,
                "replay_batches=" MD_SOURCE_DIR "/tests/golden/training/batches_" + facts.batches + ".safetensors",
                "learning_rate=1e-2", "max_train_steps=6"},
               extra);
  }
  std::vector<double> latents(const std::string& model, const Words& extra, std::string* log = nullptr) {
    const Outcome o = generate(model, extra);
    EXPECT_EQ(o.status, 0) << o.err;
    if (log) *log = o.err;
    return SafetensorsReader::open(t / "latents.safetensors").tensors().at("latents").to_doubles();
  }
  /// Expects that the command failed with this status and a log that contains `log_text`.
  static void expect_refused(const Outcome& o, int status, const std::string& log_text) {
    EXPECT_EQ(o.status, status) << o.err;
    EXPECT_TRUE(contains(o.err, log_text)) << o.err;
  }
  /// Writes an image and returns its path.
  std::string image(const std::string& name, int64_t height, int64_t width, int shade) {
    HostArray rgb(Shape{DType::u8, {height, width, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(shade + static_cast<int>(i % 61));
    write_png(t / name, rgb);
    return t / name;
  }
  /// A copy of the folder that tests may change.
  std::string copy() {
    std::filesystem::copy(base, t / "model", std::filesystem::copy_options::recursive);
    return t / "model";
  }
  static void change(const std::string& file, const std::function<void(nlohmann::json&)>& how) {
    nlohmann::json j = parse_json(read_file(file));
    how(j);
    write_file_atomic(file, j.dump());
  }
};

/// Concatenates along axis 0 tensors that another program stores as one.
inline HostArray below_each_other(const std::vector<HostArray>& parts) {
  Dims dims = parts.at(0).dims();
  dims[0] *= std::ssize(parts);
  HostArray all(Shape{parts[0].dtype(), dims});
  size_t to = 0;
  for (const HostArray& part : parts) {
    std::copy_n(part.data(), part.bytes(), all.mutable_data() + to);
    to += part.bytes();
  }
  return all;
}

}  // namespace md
