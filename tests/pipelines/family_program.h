// A family through the real program: a tiny folder of tests/golden, sampled, trained with recorded batches, and
// damaged.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "tests/cli/command.h"

namespace md {

/// What differs between families.
struct FamilyFacts {
  std::string name;                     // behind train_ and generate_
  std::string folder, batches;          // under tests/golden; of replay_batches
  std::vector<std::string> words = {};  // of every command
};

struct FamilyProgram : testing::Test {
  using Words = std::vector<std::string>;
  explicit FamilyProgram(FamilyFacts family)
      : facts(std::move(family)), base(MD_SOURCE_DIR "/tests/golden/" + facts.folder) {}

  const FamilyFacts facts;
  const std::string base;
  TemporaryFolder t;

  Outcome run(const std::string& command, Words words, const Words& more) {
    words.insert(words.begin(), {command + "_" + facts.name, MD_SOURCE_DIR "/tests/pipelines/generate.yml"});
    words.insert(words.end(), facts.words.begin(), facts.words.end());
    words.insert(words.end(), more.begin(), more.end());
    return maxdiffusion(words);
  }
  Outcome generate(const std::string& model, const Words& more) {
    return run("generate",
               {"pretrained_model_name_or_path=" + model, "output_dir=" + t.path(), "prompt=a red heart",
                "num_inference_steps=2", "height=16", "width=16", "output_type=latent"},
               more);
  }
  /// Trains the folder for six steps, as the run `run`.
  Outcome train(const Words& more) {
    return run("train",
               {"run_name=run", "output_dir=" + t.path(), "pretrained_model_name_or_path=" + base,
                "replay_batches=" MD_SOURCE_DIR "/tests/golden/training/batches_" + facts.batches + ".safetensors",
                "learning_rate=1e-2", "max_train_steps=6"},
               more);
  }
  std::vector<double> latents(const std::string& model, const Words& more, std::string* log = nullptr) {
    const Outcome o = generate(model, more);
    EXPECT_EQ(o.status, 0) << o.err;
    if (log) *log = o.err;
    return SafetensorsReader::open(t / "latents.safetensors").tensors().at("latents").to_doubles();
  }
  /// The command fails with this status, saying so.
  static void expect_refused(const Outcome& o, int status, const std::string& said) {
    EXPECT_EQ(o.status, status) << o.err;
    EXPECT_TRUE(contains(o.err, said)) << o.err;
  }
  /// A copy of the folder that can be changed.
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

/// Of tensors that another program has as one, the whole: parts one below the other.
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
