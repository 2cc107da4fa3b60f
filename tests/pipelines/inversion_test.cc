// Textual inversion: three steps of diffusers' scripts, runs resumed to the bit, the files and what is refused. Samples
// with learned embeddings: tests/golden/inversion in pipelines_test.cc.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/run/train_plan.h"
#include "maxdiffusion/run/trained_model.h"
#include "tests/cli/command.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

using Words = std::vector<std::string>;
const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kModels = kGoldens + "pipelines/";

HostArrays tensors_of(const std::string& file) { return SafetensorsReader::open(file).tensors(); }

double distance(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  EXPECT_EQ(x.size(), y.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) difference += (x[i] - y[i]) * (x[i] - y[i]), size += y[i] * y[i];
  return std::sqrt(difference / size);
}

class InversionSteps : public testing::TestWithParam<std::string> {};

TEST_P(InversionSteps, AreThoseOfDiffusersScripts) {
  const std::string name = GetParam();
  const nlohmann::json want = parse_json(read_file(kGoldens + "inversion/training.json"))[name];
  const HostArrays golden = tensors_of(kGoldens + "inversion/training.safetensors");
  TemporaryFolder t;
  Words words = {"pretrained_model_name_or_path=" + kGoldens + want["folder"].get<std::string>(),
                 "run_name=run",
                 "output_dir=" + t.path(),
                 "metrics_file=" + (t / "metrics.jsonl"),
                 "train_data_dir=" + t.path(),
                 "placeholder_token=<new>",
                 "initializer_token=red",
                 fmt::format("num_vectors={}", want["vectors"].get<int>()),
                 "learnable_property=captions",
                 "resolution=16",
                 "per_device_batch_size=2",
                 "learning_rate=5e-3",
                 "adam_weight_decay=1e-2",
                 "lr_scheduler=constant",
                 "warmup_steps_fraction=0",
                 "max_train_steps=3",
                 "max_grad_norm=0"};
  for (const auto& word : want["words"]) words.push_back(word);
  const RunConfig c = RunConfig::load(MD_SOURCE_DIR "/tests/pipelines/generate.yml", words);
  const TrainingRequest request = training_request(c);
  ModelComponents models(request.components);
  TrainPlan plan = plan_training(request, models);
  DenoiseTask& task = plan.tasks.at(0);
  task.media = latents_input();
  task.noise = recorded_noise_input();
  const HostArrays ids = models.family()->tokenize(want["captions"].get<Words>());
  HostArrays batches;
  for (int64_t i = 0; i < 3; ++i) {
    const auto add = [&](const std::string& field, const HostArray& a) { add_rows(batches[field], 6, 2 * i, a); };
    const auto recorded = [&](const char* field) { return golden.at(fmt::format("{}.step{}.{}", name, i, field)); };
    add("latents", channels_last(recorded("latents"))), add("noise", channels_last(recorded("noise")));
    add("timesteps", recorded("timesteps"));
    for (const auto& [field, a] : ids) {
      EXPECT_EQ(a.to_doubles(), golden.at(name + "." + field).to_doubles()) << field;  // transformers' ids
      add(field, a);
    }
  }
  LoopOptions o = plan.loop;
  o.initial = [&](const ParamTable& params) { return initial_values(models, plan, params); };
  o.complete = [&](CheckpointContent& content, const ParamTable& params, const NamedShards& trained) {
    complete_checkpoint(models, plan, content, params, trained);
  };
  const Trained trained = train_loop(models.devices(), {&task}, in_memory(batches, 2, 0, false), o);

  double worst = 0;
  std::ifstream lines(t / "metrics.jsonl");
  size_t steps = 0;
  for (std::string line; std::getline(lines, line); ++steps)
    worst = std::max(worst, std::abs(parse_json(line)["loss"].get<double>() / want["losses"][steps].get<double>() - 1));
  EXPECT_EQ(steps, 3u);
  std::vector<TextEncoderSpec> encoders;
  std::ranges::copy_if(models.family()->spec().text_encoders, std::back_inserter(encoders),
                       [](const TextEncoderSpec& e) { return e.embedding_width > 0; });
  EXPECT_EQ(trained.values.size(), encoders.size());  // nothing else is trained
  double worst_row = 0;
  for (size_t i = 0; i < encoders.size(); ++i) {
    const HostArray& rows = trained.values.at(encoders[i].component + "/text_model.embeddings.token_embedding.added");
    worst_row = std::max(worst_row, distance(rows, golden.at(fmt::format("{}.rows{}", name, i))));
    const std::string file = i == 0 ? "learned_embeds.safetensors" : "learned_embeds_2.safetensors";
    EXPECT_EQ(tensors_of(t / ("run/checkpoints/3/" + file)).at("<new>").to_doubles(), rows.to_doubles());
  }
  const double loss_floor = want["noise_floor"]["losses"], row_floor = want["noise_floor"]["rows"];
  fmt::print("  losses {:.2g} (noise floor {:.2g}), rows {:.2g} (noise floor {:.2g})\n", worst, loss_floor, worst_row,
             row_floor);
  EXPECT_LE(worst, std::max(2e-6, 10 * loss_floor));
  EXPECT_LE(worst_row, std::max(2e-6, 10 * row_floor));
}

INSTANTIATE_TEST_SUITE_P(Goldens, InversionSteps, testing::Values("sd", "sd_vectors", "sdxl", "flux"),
                         [](const auto& info) { return info.param; });

struct InversionRuns : testing::Test {
  TemporaryFolder t;

  Outcome run(const std::string& command, const std::string& model, const Words& extra) {
    Words words = {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "pretrained_model_name_or_path=" + kModels + model};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  Outcome train(const std::string& name, const std::string& model, const Words& extra = {}) {
    if (!exists(t / "images")) write_shades(t / "images", 16);
    Words words = {"run_name=" + name,        "output_dir=" + t.path(),  "train_data_dir=" + (t / "images"),
                   "placeholder_token=<new>", "initializer_token=red",   "num_vectors=2",
                   "resolution=16",           "per_device_batch_size=1", "learning_rate=1e-1",
                   "max_train_steps=4",       "checkpoint_every=2",      "checkpoints_to_keep=0"};
    words.insert(words.end(), extra.begin(), extra.end());
    return run("train", model, words);
  }
  std::vector<double> latents(const std::string& model, const std::string& prompt, const Words& extra = {}) {
    std::filesystem::remove_all(t / "out");
    Words words = {"output_dir=" + (t / "out"), "output_type=latent", "height=16", "width=16",
                   "num_inference_steps=2",     "prompt=" + prompt};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = run("generate", model, words);
    EXPECT_EQ(o.status, 0) << o.err;
    return tensors_of(t / "out/latents.safetensors").at("latents").to_doubles();
  }
  std::string refusal(const std::string& model, const Words& extra) {
    Words words = {"output_dir=" + (t / "out"), "height=16", "width=16", "num_inference_steps=2", "prompt=heart"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = run("generate", model, words);
    EXPECT_NE(o.status, 0);
    return o.err;
  }
};

TEST_F(InversionRuns, AreResumedToTheBitAndGenerateTheirWord) {
  Outcome o = train("run", "sdxl");
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string checkpoint = t / "run/checkpoints/4/";
  std::map<std::string, std::string> files;
  for (const char* file :
       {"learned_embeds.safetensors", "learned_embeds_2.safetensors", "learned_embeds_comfyui.safetensors"})
    files[file] = read_file(checkpoint + file);
  const HostArrays both = tensors_of(checkpoint + "learned_embeds_comfyui.safetensors");
  EXPECT_EQ(both.at("clip_l").to_doubles(),
            tensors_of(checkpoint + "learned_embeds.safetensors").at("<new>").to_doubles());
  EXPECT_EQ(both.at("clip_g").to_doubles(),
            tensors_of(checkpoint + "learned_embeds_2.safetensors").at("<new>").to_doubles());
  EXPECT_NE(files["learned_embeds.safetensors"], read_file(t / "run/checkpoints/2/learned_embeds.safetensors"));
  // As after a kill between the two checkpoints.
  std::filesystem::remove_all(checkpoint);
  o = train("run", "sdxl");
  ASSERT_EQ(o.status, 0) << o.err;
  for (const auto& [file, bytes] : files) EXPECT_EQ(read_file(checkpoint + file), bytes) << file;

  const std::string prompt = "a <new>";
  const std::vector<double> plain = latents("sdxl", prompt),
                            learned = latents("sdxl", prompt,
                                              {"embeddings=" + checkpoint + "learned_embeds.safetensors," + checkpoint +
                                               "learned_embeds_2.safetensors"});
  EXPECT_NE(plain, learned);
  EXPECT_EQ(latents("sdxl", "a new",
                    {"embeddings=" + checkpoint + "learned_embeds_comfyui.safetensors", "embedding_tokens=new"}),
            learned);
  std::filesystem::remove_all(t / "out");
  o = maxdiffusion({"generate", t / "run", "output_dir=" + (t / "out"), "output_type=latent", "height=16", "width=16",
                    "num_inference_steps=2", "prompt=" + prompt});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(tensors_of(t / "out/latents.safetensors").at("latents").to_doubles(), learned);
}

TEST_F(InversionRuns, ReadTheCaptionsOfTheDataWhereConfigured) {
  write_shades(t / "images", 16);
  for (int i = 0; i < 9; ++i) write_file_atomic(t / fmt::format("images/{}.txt", i), "a shade of <new>");
  const Outcome o = train("run", "sd", {"learnable_property=captions"}), other = train("other", "sd");
  ASSERT_EQ(o.status, 0) << o.err;
  ASSERT_EQ(other.status, 0) << other.err;
  const auto rows = [&](const std::string& run) {
    return tensors_of(t / (run + "/checkpoints/4/learned_embeds.safetensors")).at("<new>");
  };
  EXPECT_EQ(rows("run").dims(), (Dims{2, 16}));
  EXPECT_NE(rows("run").to_doubles(), rows("other").to_doubles());
  EXPECT_FALSE(exists(t / "run/checkpoints/4/learned_embeds_comfyui.safetensors"));
}

TEST_F(InversionRuns, TemplatesAreThoseOfItsProperty) {
  const auto folder = [&](const std::string& property) {
    const RunConfig c =
        RunConfig::load(MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                        {"pretrained_model_name_or_path=" + kModels + "sd", "run_name=run", "output_dir=" + t.path(),
                         "train_data_dir=" + t.path(), "placeholder_token=<new>", "initializer_token=red",
                         "resolution=16", "max_train_steps=3", "repeats=7", "learnable_property=" + property});
    const TrainingRequest request = training_request(c);
    const ModelComponents models(request.components);
    return plan_training(request, models).data.source.config.folders.at(0);
  };
  const DataFolder object = folder("object"), style = folder("style");
  EXPECT_EQ(object.repeats, 7);
  EXPECT_TRUE(object.captions.wildcards);
  EXPECT_EQ(std::ranges::count(*object.only_caption, '|'), 26);  // 27 templates
  EXPECT_EQ(std::ranges::count(*style.only_caption, '|'), 16);
  EXPECT_TRUE(contains(*object.only_caption, "|a photo of my <new>|")) << *object.only_caption;
  EXPECT_TRUE(contains(*style.only_caption, "|a dark painting in the style of <new>|")) << *style.only_caption;
}

TEST_F(InversionRuns, FoldersOfEmbeddingsAreReadAsFarAsTheyFit) {
  make_folders(t / "all");
  std::filesystem::copy(kGoldens + "inversion/dog.safetensors", t / "all/dog.safetensors");
  std::filesystem::copy(kGoldens + "inversion/both.safetensors", t / "all/both.safetensors");  // another model's
  write_file_atomic(t / "all/old.pt", "PK");
  const std::string prompt = "a <dog> heart";
  EXPECT_EQ(latents("sd", prompt, {"embeddings_dir=" + (t / "all")}),
            latents("sd", prompt, {"embeddings=" + kGoldens + "inversion/dog.safetensors"}));
}

TEST_F(InversionRuns, OfLoraFilesAreThoseOfFilesOfTheirOwn) {
  const auto file = [&](const std::string& name, HostArrays arrays, const HostArrays& extra) {
    arrays.insert(extra.begin(), extra.end());
    make_folders(t / "loras");
    write_safetensors(t / "loras/" + name + ".safetensors", arrays);
    return t / "loras/" + name + ".safetensors";
  };
  const std::string both = kGoldens + "inversion/both.safetensors", plain = kModels + "lora_kohya.safetensors";
  HostArrays words;
  for (const auto& [name, rows] : tensors_of(both)) words["bundle_emb.mytok." + name] = rows;
  const std::string bundled = file("bundled", tensors_of(plain), words), prompt = "a mytok heart";
  const std::vector<double> expected =
      latents("sdxl", prompt, {"lora_files=" + plain, "embeddings=" + both, "embedding_tokens=mytok"});
  EXPECT_NE(expected, latents("sdxl", prompt, {"lora_files=" + plain}));
  EXPECT_EQ(latents("sdxl", prompt, {"lora_files=" + bundled}), expected);
  EXPECT_EQ(latents("sdxl", prompt + "<lora:bundled:1>", {"lora_dir=" + (t / "loras")}), expected);
  EXPECT_EQ(latents("sdxl", prompt, {"lora_files=" + bundled, "embeddings=" + both, "embedding_tokens=mytok"}),
            expected);

  // One text encoder, by the web UI's names.
  HostArrays pair;
  const Dims conv = tensors_of(kModels + "sd/unet/diffusion_pytorch_model.safetensors").at("conv_in.weight").dims();
  for (const auto& [name, dims] :
       {std::pair("down", Dims{2, conv[1], conv[2], conv[3]}), {"up", Dims{conv[0], 2, 1, 1}}}) {
    HostArray a(Shape{DType::f32, dims});
    std::ranges::fill(a.mutable_view<float>(), 0.25F);
    pair[fmt::format("lora_unet_conv_in.lora_{}.weight", name)] = a;
  }
  const HostArray rows = tensors_of(kGoldens + "inversion/dog.safetensors").at("<dog>");
  const std::vector<double> of_dog =
      latents("sd", prompt,
              {"lora_files=" + file("pair", pair, {}), "embeddings=" + kGoldens + "inversion/dog.safetensors",
               "embedding_tokens=mytok"});
  for (const char* name : {"emb_params", "string_to_param.*"})
    EXPECT_EQ(
        latents("sd", prompt, {"lora_files=" + file("one", pair, {{fmt::format("bundle_emb.mytok.{}", name), rows}})}),
        of_dog)
        << name;

  // What no text encoder has a place for is refused, or left out by name.
  const std::string other = file("other", pair, {{"bundle_emb.mytok.clip_l", rows}, {"bundle_emb.mytok.clip_g", rows}});
  const std::string err = refusal("sd", {"lora_files=" + other});
  EXPECT_TRUE(contains(err, "1 of 4 keys have no place") && contains(err, "unread: bundle_emb.mytok.clip_g") &&
              contains(err, "embeddings of a word"))
      << err;
  EXPECT_EQ(latents("sd", prompt, {"lora_files=" + other, "lora_missing_keys=warn"}), of_dog);
}

TEST_F(InversionRuns, WhatCannotBeIsRefusedByName) {
  const std::string dog = kGoldens + "inversion/dog.safetensors";
  write_file_atomic(t / "old.pt", "PK");
  EXPECT_TRUE(contains(refusal("sd", {"embeddings=" + (t / "old.pt")}),
                       "old.pt' is a pickle, which can run any code when it is read; expected a .safetensors file"));
  std::string err = refusal("sd", {"embeddings=" + dog + "," + dog});
  EXPECT_TRUE(contains(err, "is for the word '<dog>', as is another file")) << err;
  err = refusal("sd", {"embeddings=" + kGoldens + "inversion/both.safetensors"});
  EXPECT_TRUE(contains(err, "for this model's text encoders")) << err;
  err = refusal("sd", {"embeddings=" + dog, "embedding_tokens=a,b"});
  EXPECT_TRUE(contains(err, "embedding_tokens has 2 words for 1 files of embeddings; expected one each")) << err;
  err = refusal("../zimage/base", {"embeddings=" + dog});
  EXPECT_TRUE(contains(err, "this model's text encoders take no learned embeddings")) << err;
  Outcome o = train("run", "sd", {"initializer_token=red heart"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "initializer_token is 'red heart', which text_encoder reads as 2 tokens")) << o.err;
  o = train("run", "sd", {"train_lora=true"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "placeholder_token cannot be combined with train_lora")) << o.err;
}

}  // namespace
}  // namespace md
