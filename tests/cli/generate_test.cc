// Which model `generate` samples, and where it writes files.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/decode_image.h"
#include "tests/cli/command.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kModel = MD_SOURCE_DIR "/tests/golden/pipelines/sd",
                  kNewModel = MD_SOURCE_DIR "/configs/models/emoji",
                  kQuick = "xla_flags=--xla_backend_optimization_level=0";  // as in generate.yml

/// A finished training run whose config starts the model from random weights.
class Generate : public testing::Test {
 protected:
  Generate() { write_run("mine", "train_new_unet: true\ntrain_new_vae: true\nrandom_text_encoder: true\n"); }
  void write_run(const std::string& name, const std::string& keys, const std::string& model = kNewModel) {
    const std::string run = t / ("runs/" + name), state = run + "/checkpoints/3/training_state";
    make_folders(run + "/checkpoints");
    fs::copy(kModel, run + "/checkpoints/3", fs::copy_options::recursive);
    make_folders(state);
    write_file_atomic(state + "/state.json", "{}");
    write_file_atomic(run + "/config.yml",
                      "base: " MD_SOURCE_DIR "/tests/pipelines/generate.yml\nrun_name: " + name +
                          "\noutput_dir: " + (t / "runs") + "\npretrained_model_name_or_path: " + model + "\n" + keys +
                          "resolution: 16\nper_device_batch_size: 4\nnum_inference_steps: 1\nprompt: heart\n");
  }
  Outcome generate(const std::string& config, std::vector<std::string> words = {},
                   const std::string& command = "generate") {
    words.insert(words.begin(), {command, config});
    return maxdiffusion(words);
  }
  /// File names in a subfolder of the test's folder, without the run's own files.
  std::vector<std::string> names_in(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& f : fs::directory_iterator(t / folder))
      if (f.path().extension() != ".yml" && f.path().filename() != "checkpoints" && f.path().filename() != "mine")
        names.push_back(f.path().filename());
    std::ranges::sort(names);
    return names;
  }
  using Names = std::vector<std::string>;
  TemporaryFolder t;
  const std::string run = t / "runs/mine", config = run + "/config.yml";
};

// P-1
TEST_F(Generate, FindsTheRunNextToItsConfigOrInItsFolder) {
  Outcome o = generate(run);  // the folder
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "the run's checkpoint " + run + "/checkpoints/3 is used")) << o.err;
  const std::string image = pixels_of(run + "/image_0.png");

  fs::copy(run, t / "moved", fs::copy_options::recursive);
  fs::remove_all(run);
  o = generate(t / "moved/config.yml");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "the run's checkpoint " + (t / "moved/checkpoints/3") + " is used")) << o.err;
  EXPECT_EQ(pixels_of(t / "moved/image_1.png"), image);
  // output_dir sets where images are written, not where the run is.
  o = generate(t / "moved/config.yml", {"output_dir=" + (t / "images")});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(pixels_of(t / "images/image_0.png"), image);
  EXPECT_EQ(names_in("moved"), (Names{"image_0.png", "image_1.png"}));
  // An image of a run is reproduced with the checkpoint that made it.
  o = maxdiffusion({"generate", t / "images/image_0.png", kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(read_file(t / "images/image_1.png"), read_file(t / "images/image_0.png"));
  // A run's folder can also be used as a model.
  o = generate(MD_SOURCE_DIR "/tests/pipelines/generate.yml",
               {"pretrained_model_name_or_path=" + (t / "moved"), "output_dir=" + (t / "model"), "resolution=16",
                "num_inference_steps=1", "prompt=heart"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "the run's newest checkpoint is of step 3")) << o.err;
  EXPECT_EQ(pixels_of(t / "model/image_0.png"), image);
}

TEST_F(Generate, FindsTheRunOfAnyOtherConfigByItsNameInEitherOutputDir) {
  write_file_atomic(t / "own.yml", "base: " + config + "\n");
  Outcome o = generate(t / "own.yml");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(names_in("runs/mine"), Names{"image_0.png"});
  // The same output_dir as in training contains the run, so images go to the run's folder.
  o = generate(t / "own.yml", {"output_dir=" + (t / "runs")});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(names_in("runs/mine"), (Names{"image_0.png", "image_1.png"}));
  o = generate(t / "own.yml", {"output_dir=" + (t / "images")});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(names_in("images"), Names{"image_0.png"});
}

TEST_F(Generate, IsRefusedWithoutACheckpointOfTheRunThatIsMeant) {
  Outcome o = generate(config, {"run_name=mien"});
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.err, "error: there is no checkpoint of the run 'mien' in '" + (t / "runs/mien/checkpoints") +
                       "'; expected one: the config trains a model (train_new_unet, train_new_vae, "
                       "random_text_encoder)\n  runs with checkpoints in '" +
                       (t / "runs") + "': mine\n  try: maxdiffusion generate " + run +
                       " prompt=…, or pretrained_model_name_or_path=FOLDER for another model\n");
  o = generate(MD_SOURCE_DIR "/configs/quickstart.yml", {"output_dir=" + (t / "empty"), "run_name=none"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "'" + (t / "empty") + "': no run with a checkpoint")) << o.err;
  o = generate(config, {"run_name="});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "run_name is empty; expected a run with a checkpoint")) << o.err;
  EXPECT_FALSE(exists(t / "empty"));

  // Nor is the base model sampled instead of a run, with or without LoRA.
  for (const char* keys : {"train_lora: true\n", ""}) {
    write_run("tuned", keys, kModel);
    fs::remove_all(t / "runs/tuned/checkpoints/3/training_state");  // no checkpoint is left
    o = generate(t / "runs/tuned");
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, "there is no checkpoint of the run 'tuned' in '" + (t / "runs/tuned/checkpoints'")))
        << o.err;
    fs::remove_all(t / "runs/tuned");
  }
  // If a config names a model and the command line a run without checkpoint, the model is sampled, with a warning.
  write_file_atomic(t / "base.yml", "base: " MD_SOURCE_DIR
                                    "/tests/pipelines/generate.yml\nresolution: 16\nnum_inference_steps: 1\nprompt: "
                                    "heart\npretrained_model_name_or_path: " +
                                        kModel + "\n");
  o = generate(t / "base.yml", {"run_name=first", "output_dir=" + (t / "images")});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "there is no checkpoint of the run 'first' in '" + (t / "images/first/checkpoints") +
                                  "'; the config's model '" + kModel + "' is used\n"))
      << o.err;
  EXPECT_EQ(names_in("images"), Names{"image_0.png"});
  o = generate(t / "base.yml", {"checkpoint_dir=" + (t / "nothing")});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "there is no checkpoint in '" + (t / "nothing'"))) << o.err;
  o = generate(t / "runs");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "'" + (t / "runs") + "' is a folder without config.yml")) << o.err;
}

TEST_F(Generate, TakesAModelInPlaceOfAConfig) {
  const std::string usual = "model defaults: ";
  Outcome o = generate(kModel, {"prompt=heart", "output_dir=" + (t / "plain"), "sample_seed=3", kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, usual + "resolution=16 num_inference_steps=50 guidance_scale=7.5\n")) << o.err;
  EXPECT_EQ(names_in("plain"), Names{"image_0.png"});
  // The same from a config with these keys, and from the image itself.
  write_file_atomic(
      t / "same.yml",
      "resolution: 16\nnum_inference_steps: 50\nguidance_scale: 7.5\npretrained_model_name_or_path: " + kModel + "\n");
  o = generate(t / "same.yml", {"prompt=heart", "output_dir=" + (t / "same"), "sample_seed=3", kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(decode_image(t / "same/image_0.png").to_doubles(), decode_image(t / "plain/image_0.png").to_doubles());
  o = generate(t / "plain/image_0.png", {"output_dir=" + (t / "again"), kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(decode_image(t / "again/image_0.png").to_doubles(), decode_image(t / "plain/image_0.png").to_doubles());

  o = generate(kModel, {"prompt=heart", "output_dir=" + (t / "own"), "height=32", "width=16", "num_inference_steps=1",
                        "do_classifier_free_guidance=false", kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_FALSE(contains(o.err, usual)) << o.err;
  EXPECT_EQ(decode_image(t / "own/image_0.png").dims(), (Dims{32, 16, 3}));
  // The sample has the size of the image that it begins with.
  o = generate(kModel, {"prompt=heart", "image=" + (t / "own/image_0.png"), "output_dir=" + (t / "from"),
                        "num_inference_steps=2", kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(decode_image(t / "from/image_0.png").dims(), (Dims{32, 16, 3}));
  // A checkpoint is a model.
  EXPECT_EQ(
      generate(run + "/checkpoints/3", {"prompt=heart", "output_dir=" + (t / "of"), "num_inference_steps=1", kQuick})
          .status,
      0);
  // What is neither.
  o = generate("nobody/nothing", {"prompt=heart"});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "nobody/nothing")) << o.err;
  o = generate(t / "runs/mien", {"prompt=heart"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "cannot read " + (t / "runs/mien"))) << o.err;
}

TEST_F(Generate, NeverSamplesWithRandomWeights) {
  const std::string checkpoint = run + "/checkpoints/3";
  for (const char* part : {"unet", "vae", "text_encoder"}) {
    fs::rename(checkpoint + "/" + part, t / part);
    make_folders(checkpoint + "/" + part);
    fs::copy(t / part + "/config.json", checkpoint + "/" + part);
    for (const std::string& model : {std::string(), "pretrained_model_name_or_path=" + checkpoint}) {
      const Outcome o = generate(config, model.empty() ? Names() : Names{model});
      EXPECT_EQ(o.status, 4) << o.err;
      EXPECT_TRUE(contains(o.err, "read '" + checkpoint + "/" + part + "': the folder holds no ")) << o.err;
      EXPECT_TRUE(contains(o.err, "the model's " + std::string(part) + " is needed: sampling never uses random"))
          << o.err;
      EXPECT_FALSE(contains(o.err, "encoded after")) << "found out after work: " << o.err;
    }
    fs::remove_all(checkpoint + "/" + part);
    fs::rename(t / part, checkpoint + "/" + part);
  }
  EXPECT_EQ(names_in("runs/mine"), Names());
}

TEST_F(Generate, MakesAsManyImagesAsItsKeySaysAndNumbersThemOn) {
  ASSERT_EQ(generate(run, {"num_images_per_prompt=2"}).status, 0);
  EXPECT_EQ(names_in("runs/mine"), (Names{"image_0.png", "image_1.png"}));
  const std::string first = read_file(run + "/image_0.png"), second = read_file(run + "/image_1.png");
  write_file_atomic(run + "/image_9.jpeg", "somebody's");
  ASSERT_EQ(generate(run, {"prompt=[blue, red]", "seed=5"}).status, 0);  // regardless of the training batch size
  EXPECT_EQ(names_in("runs/mine"),
            (Names{"image_0.png", "image_1.png", "image_10.png", "image_11.png", "image_9.jpeg"}));
  EXPECT_EQ(read_file(run + "/image_0.png"), first);
  EXPECT_EQ(read_file(run + "/image_1.png"), second);
  EXPECT_NE(read_file(run + "/image_10.png"), first);
  // The same for arrays.
  for (int i = 0; i < 3; ++i) ASSERT_EQ(generate(run, {"output_type=np", "output_dir=" + (t / "arrays")}).status, 0);
  ASSERT_EQ(generate(run, {"output_type=latent", "output_dir=" + (t / "arrays")}).status, 0);
  EXPECT_EQ(names_in("arrays"),
            (Names{"images.safetensors", "images_1.safetensors", "images_2.safetensors", "latents.safetensors"}));
}

TEST_F(Generate, UnderTheReferencesNamesCountsAndNamesAsTheReference) {
  // One prompt fills a whole batch in output_dir, and file numbers start at 0 each time.
  ASSERT_EQ(generate(config, {}, "generate_sd").status, 0);
  EXPECT_EQ(names_in("runs"), (Names{"image_0.png", "image_1.png", "image_2.png", "image_3.png"}));
  const std::string first = read_file(t / "runs/image_0.png");
  ASSERT_EQ(generate(config, {"seed=5", "prompt=[blue, red]"}, "generate_sd").status, 0);
  EXPECT_EQ(names_in("runs"), (Names{"image_0.png", "image_1.png", "image_2.png", "image_3.png"}));
  EXPECT_NE(read_file(t / "runs/image_0.png"), first);
}

TEST_F(Generate, SaysBeforeItSamplesThatItCannotWrite) {
  write_file_atomic(t / "file", "");
  const Outcome o = generate(run, {"output_dir=" + (t / "file/images")});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, t / "file/images")) << o.err;
  EXPECT_FALSE(contains(o.err, "encoded after")) << o.err;
}

TEST_F(Generate, SaysWhatWouldTakeLessMemory) {
  if (!kAddressSpaceCanBeLimited) GTEST_SKIP() << "the sanitizer reserves more than this test allows";
  // Needs 11.5 GiB for one image.
  const Outcome o = shell("ulimit -v 3000000; exec " MD_BINARY_DIR "/maxdiffusion generate " + run +
                          " resolution=8192 num_inference_steps=4 guidance_scale=1");
  EXPECT_EQ(o.status, 6) << o.err;
  EXPECT_TRUE(contains(o.err, "  try: fewer pixels (height, width, resolution), vae_tiling=true ")) << o.err;
  EXPECT_EQ(names_in("runs/mine"), Names());
}

// --- Samplers -------------------------------------------------------------------------------------------------------

const nlohmann::json& scheduler_configs() {
  static const nlohmann::json all = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/scheduler_configs.json"));
  return all;
}
std::string scheduler_config(const std::string& name) {
  for (const auto& c : scheduler_configs())
    if (c["name"] == name) return c["text"];
  return "";
}

class Samplers : public testing::Test {
 protected:
  /// A copy of a test model with this scheduler_config.json.
  std::string model(const std::string& text, const std::string& from = kModel) {
    std::string folder = t / fmt::format("model_{}", ++models_);
    fs::copy(from, folder, fs::copy_options::recursive);
    auto index = parse_json(read_file(folder + "/model_index.json"));
    const auto config = parse_json_or_discard(text);
    if (config.is_object() && config.contains("_class_name")) index["scheduler"][1] = config["_class_name"];
    write_file_atomic(folder + "/model_index.json", index.dump());
    write_file_atomic(folder + "/scheduler/scheduler_config.json", text);
    return folder;
  }
  /// Samples once and returns the output; if it succeeds, checks that it left one file.
  Outcome sample(const std::string& model, std::vector<std::string> words = {}) {
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + model,
                  "output_dir=" + (t / "out"), "output_type=latent", "prompt=heart", "num_inference_steps=2",
                  "height=16", "width=16"});
    if (exists(model + "/transformer")) words.emplace_back("max_sequence_length=12");
    if (contains(read_file(model + "/model_index.json"), "Wan")) words.emplace_back("num_frames=1");
    fs::remove_all(t / "out");
    return maxdiffusion(words);
  }
  std::string latents() { return read_file(t / "out/latents.safetensors"); }
  TemporaryFolder t;
  int models_ = 0;
};

TEST_F(Samplers, EveryConfigThatDiffusersSavesIsOpenedSampledAndSavedLetterByLetter) {
  int sampled = 0;
  for (const auto& c : scheduler_configs()) {
    const std::string name = c["name"], text = c["text"];
    SCOPED_TRACE(name);
    const bool flux = text.find("FlowMatch") != text.npos, wan = name == "wan";
    const std::string folder = model(text, MD_SOURCE_DIR "/tests/golden/" + std::string(flux  ? "flux/dev"
                                                                                        : wan ? "wan/t2v"
                                                                                              : "pipelines/sd"));
    const Outcome o = sample(folder, {"num_inference_steps=4"});  // PNDM's minimum
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_FALSE(contains(o.err, "\nW ")) << o.err;
    EXPECT_TRUE(exists(t / "out/latents.safetensors"));
    const std::string copy = folder + "_copy";
    ASSERT_EQ(maxdiffusion({"convert", folder, copy}).status, 0);
    EXPECT_EQ(read_file(copy + "/scheduler/scheduler_config.json"), text);
    ++sampled;
  }
  EXPECT_EQ(sampled, 27);
}

TEST_F(Samplers, WhatTrainingSavesIsReadByPythonAsWell) {
  const std::string folder = model(scheduler_config("sd_dpm"));
  const Outcome o = maxdiffusion({"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=run",
                                  "output_dir=" + t.path(), "pretrained_model_name_or_path=" + folder, "resolution=16",
                                  "dataset_type=synthetic", "synthetic_num_samples=2", "per_device_batch_size=2",
                                  "max_train_steps=1", "prediction_type=v_prediction", "prompt=heart",
                                  "sample_every=-1", "num_inference_steps=2", "scheduler=unipc"});
  ASSERT_EQ(o.status, 0) << o.err;
  // The key affects sampling only.
  EXPECT_TRUE(contains(o.err, "\"UniPCMultistepScheduler\" (from scheduler=unipc; ")) << o.err;
  const std::string saved = read_file(t / "run/checkpoints/1/scheduler/scheduler_config.json");
  EXPECT_TRUE(contains(saved, "\"lambda_min_clipped\": -Infinity,")) << saved;
  EXPECT_TRUE(contains(saved, "\"prediction_type\": \"v_prediction\"")) << saved;
  EXPECT_TRUE(contains(saved, "\"_class_name\": \"DPMSolverMultistepScheduler\"")) << saved;
}

TEST_F(Samplers, AnUnsupportedClassIsNamedBeforeItsFieldsAndCanBeReplaced) {
  auto turbo_of = [&](const char* name) {
    std::string text = scheduler_config("sdxl_turbo");
    return model(text.replace(text.find("EulerAncestral"), 14, name));
  };
  const std::string edm = turbo_of("EDMEuler");
  Outcome o = sample(edm);
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(
      contains(o.err, "the sampler EDMEulerDiscreteScheduler is not supported; expected one of: DDPMScheduler, DDIM"))
      << o.err;
  EXPECT_TRUE(contains(o.err, "try: scheduler=NAME, which samples with another: ddpm, ddim, ")) << o.err;
  EXPECT_FALSE(contains(o.err, "encoded after")) << "found out after work: " << o.err;
  // The sampler is reported before its members are checked.
  o = sample(model(R"({"_class_name": "IPNDMScheduler", "prediction_steps": 50, "thresholding": true})"));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "the sampler IPNDMScheduler is not supported")) << o.err;
  EXPECT_FALSE(contains(o.err, "prediction_steps") || contains(o.err, "thresholding")) << o.err;
  o = sample(model(R"({"_class_name": "UniPCMultistepScheduler", "disable_corrector": true})"));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "disable_corrector is true; expected the list of the steps that are not corrected"))
      << o.err;

  o = sample(edm, {"scheduler=euler"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "\"EulerDiscreteScheduler\" (from scheduler=euler; the model folder has")) << o.err;
  const std::string euler = latents();
  ASSERT_EQ(sample(turbo_of("Euler")).status, 0);
  EXPECT_EQ(latents(), euler);
}

TEST_F(Samplers, AreChosenByTheirNames) {
  // Members of the config mapping other than the class still apply; the `scheduler` key overrides the file's Karras
  // sigmas.
  const std::string karras = model(scheduler_config("sd_dpm"));
  ASSERT_EQ(sample(karras).status, 0);
  const std::string published = latents();
  for (const char* word : {"scheduler=dpmpp_2m_karras", "scheduler=DPM++ 2M Karras"}) {
    ASSERT_EQ(sample(karras, {word}).status, 0);
    EXPECT_EQ(latents(), published) << word;
  }
  ASSERT_EQ(sample(karras, {"scheduler=dpm++"}).status, 0);
  const std::string plain = latents();
  EXPECT_NE(plain, published);
  ASSERT_EQ(sample(karras, {"diffusion_scheduler_config={use_karras_sigmas: false}"}).status, 0);
  EXPECT_EQ(latents(), plain);
  ASSERT_EQ(sample(karras, {"scheduler=dpmpp_2m",
                            "diffusion_scheduler_config={_class_name: DDIMScheduler, use_karras_sigmas: true}"})
                .status,
            0);
  EXPECT_EQ(latents(), published);
  // Samples are only clipped if the file says so.
  ASSERT_EQ(sample(karras, {"scheduler=ddim"}).status, 0);
  const std::string ddim = latents();
  ASSERT_EQ(sample(karras, {"diffusion_scheduler_config={_class_name: DDIMScheduler, use_karras_sigmas: false, "
                            "clip_sample: false}"})
                .status,
            0);
  EXPECT_EQ(latents(), ddim);

  // Flow models accept the samplers that support flow.
  const std::string wan = MD_SOURCE_DIR "/tests/golden/wan/t2v", flux = MD_SOURCE_DIR "/tests/golden/flux/dev";
  ASSERT_EQ(sample(wan, {"scheduler=euler", "flow_shift=3"}).status, 0);
  const std::string euler = latents();
  ASSERT_EQ(
      sample(wan, {"diffusion_scheduler_config={_class_name: FlowMatchEulerDiscreteScheduler}", "flow_shift=3"}).status,
      0);
  EXPECT_EQ(latents(), euler);
  for (const char* word : {"unipc", "dpmpp_2m", "flow_euler"}) {
    const Outcome o = sample(flux, {std::string("scheduler=") + word});
    EXPECT_EQ(o.status, 0) << o.err;
  }
  Outcome o = sample(flux, {"scheduler=ddim"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(
      o.err, "this is a flow-matching model; try flow_euler, flow_heun, flow_lcm, dpmpp_2m, unipc, deis or sa_solver"))
      << o.err;
  o = sample(karras, {"scheduler=flow_euler"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "this one predicts epsilon; try ddpm, ddim, pndm, lms, euler, ")) << o.err;
}

TEST_F(Samplers, NoiseLevelsAreSpacedAsTheirKeySays) {
  const std::string folder = model(scheduler_config("sdxl"));
  ASSERT_EQ(sample(folder, {"scheduler=euler_karras", "num_inference_steps=4"}).status, 0);
  const std::string karras = latents();
  std::set<std::string> all;
  for (const char* schedule : {"training", "karras", "exponential", "beta", "kl_optimal", "simple", "sgm_uniform",
                               "ays_sd15", "ays_sdxl", "ays_svd"}) {
    const Outcome o = sample(folder, {std::string("sigma_schedule=") + schedule, "num_inference_steps=4"});
    ASSERT_EQ(o.status, 0) << schedule << o.err;
    if (schedule == std::string("karras")) {
      EXPECT_EQ(latents(), karras);
    }
    all.insert(latents());
  }
  EXPECT_EQ(all.size(), 10u);
  // The key overrides the name; samplers over sigmas that have no such option in diffusers accept it too.
  ASSERT_EQ(sample(folder, {"scheduler=euler", "sigma_schedule=karras", "num_inference_steps=4"}).status, 0);
  EXPECT_EQ(latents(), karras);
  ASSERT_EQ(sample(folder, {"scheduler=euler_a", "sigma_schedule=karras", "num_inference_steps=4"}).status, 0);
  Outcome o = sample(folder, {"scheduler=lcm", "sigma_schedule=beta"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "sigma_schedule is 'beta', but LCMScheduler steps over timesteps, not sigmas")) << o.err;
  o = sample(folder, {"sigma_schedule=karas"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "sigma_schedule")) << o.err;
}

TEST_F(Samplers, AllNamesSampleTheModelsThatTheyAreFor) {
  const std::string noise = model(scheduler_config("sd15")), flow = MD_SOURCE_DIR "/tests/golden/wan/t2v";
  const std::string refusal = sample(noise, {"scheduler=dpm_fast"}).err, before = "expected one of: ";
  std::string names = refusal.substr(refusal.find(before) + before.size());
  names = names.substr(0, names.find('\n'));
  std::set<std::string> all;
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(", ", at), names.size());
    const std::string word = names.substr(at, end - at);
    at = end + 2;
    const std::string steps = word == "restart" ? "20" : "5";  // with fewer it is Heun's
    const Outcome o =
        sample(word.starts_with("flow_") ? flow : noise, {"scheduler=" + word, "num_inference_steps=" + steps});
    ASSERT_EQ(o.status, 0) << word << o.err;
    EXPECT_TRUE(all.insert(latents()).second) << word << " is another's";
  }
  EXPECT_EQ(all.size(), 42u) << names;
  for (const char* word : {"heun", "lcm"}) {
    ASSERT_EQ(sample(flow, {std::string("scheduler=") + word}).status, 0);
    const std::string named = latents();
    ASSERT_EQ(sample(flow, {std::string("scheduler=flow_") + word}).status, 0);
    EXPECT_EQ(latents(), named);
  }
}

TEST_F(Samplers, NamesThatAreNoneAreRefusedWithTheList) {
  const std::string list = "expected one of: ddpm, ddim, pndm, lms, lms_karras, euler, ",
                    nearest = "expected one of: euler, ddpm, ddim, pndm, lms, lms_karras, ";
  for (const auto& [name, text] : {std::pair{"eulr", "try: scheduler=euler\n"},
                                   {"dpm_fast", "which is not supported; "},
                                   {"EDM Euler", "which is not supported; "},
                                   {"cosine", "try: lr_scheduler=cosine"}}) {
    const Outcome o = sample(kModel, {std::string("scheduler=") + name});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, text)) << o.err;
    EXPECT_TRUE(contains(o.err, std::string(name) == "eulr" ? nearest : list)) << o.err;
  }
}

TEST_F(Samplers, ClipSkipIsAtMostTheTextEncodersLayers) {
  const std::string golden = MD_SOURCE_DIR "/tests/golden/", xl = golden + "pipelines/sdxl", flux = golden + "flux/dev";
  for (const auto& [model, skip, message] :
       {std::tuple{&kModel, "-1", "clip_skip is -1; expected 0 to 3, layers of this model's text encoder"},
        {&kModel, "4", "clip_skip is 4; expected 0 to 3, layers"},
        {&xl, "3", "clip_skip is 3; expected 0 to 2, layers"},
        {&flux, "1", "clip_skip is 1; expected 0: this model's text encoder has no other layer to read"}}) {
    const Outcome o = sample(*model, {std::string("clip_skip=") + skip});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, message)) << o.err;
  }
  EXPECT_EQ(sample(kModel, {"clip_skip=3"}).status, 0);
}

TEST_F(Samplers, AFileThatCannotBeReadIsNamedWithItsKey) {
  for (const char* key : {"image", "mask_image", "latents", "prompt_file"}) {
    std::vector<std::string> words = {std::string(key) + "=nothing.png"};
    if (std::string(key) == "mask_image") words.push_back("image=" MD_SOURCE_DIR "/docs/images/quickstart.png");
    const Outcome o = sample(kModel, words);
    EXPECT_EQ(o.status, 4);
    EXPECT_TRUE(contains(o.err, "'nothing.png'") && contains(o.err, std::string("in the key ") + key + "\n")) << o.err;
  }
}

TEST_F(Samplers, ImagesOfOtherProgramsAreGeneratedFromTheirSettings) {
  const std::string folder = model(scheduler_config("sd15")), image = t / "theirs.png",
                    names = "pretrained_model_name_or_path=" + folder;
  const HostArray grey(Shape{DType::u8, {8, 8, 3}});
  const std::vector<std::string> to_latents = {
      names,          "output_type=latent",        "output_dir=" + (t / "out"), kQuick,
      "hardware=cpu", "activations_dtype=float32", "precision=HIGHEST"};
  const auto of_image = [&](const PngTexts& texts) {
    write_png(image, grey, texts);
    std::filesystem::remove_all(t / "out");
    std::vector<std::string> words = {"generate", image};
    words.insert(words.end(), to_latents.begin(), to_latents.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return std::pair(latents(), o.err);
  };
  const auto [theirs, warnings] =
      of_image({{"parameters",
                 "a (cat:1.3)\nNegative prompt: bad\nSteps: 3, Sampler: DPM++ 2M, Schedule type: Automatic, CFG "
                 "scale: 4, Seed: 5, Size: 16x24, Model: other, Version: v1.10.1"}});
  EXPECT_TRUE(contains(warnings, "settings without a key here are not used: Model: other, Version: v1.10.1"))
      << warnings;
  const Outcome inspected = maxdiffusion({"inspect", "image", image});
  EXPECT_EQ(inspected.status, 0) << inspected.err;
  EXPECT_TRUE(contains(inspected.out, "as keys:\nguidance_scale: 4\n")) << inspected.out;
  EXPECT_TRUE(contains(inspected.out, "width: 16\nwithout a key: Model: other, Version: v1.10.1\n")) << inspected.out;
  std::filesystem::remove_all(t / "out");
  ASSERT_EQ(
      sample(folder, {"prompt=a (cat:1.3)", "negative_prompt=bad", "num_inference_steps=3", "scheduler=dpmpp_2m_karras",
                      "guidance_scale=4", "sample_seed=5", "width=16", "height=24", "prompt_syntax=a1111"})
          .status,
      0);
  EXPECT_EQ(theirs, latents());

  const auto [comfy, none] = of_image(
      {{"prompt", R"({"1": {"class_type": "KSampler", "inputs": {"seed": 5, "steps": 3, "cfg": 4.0, "sampler_name":
        "dpmpp_2m", "scheduler": "karras", "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0]}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat"}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "bad"}},
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 16, "height": 24, "batch_size": 1}}})"}});
  std::filesystem::remove_all(t / "out");
  ASSERT_EQ(sample(folder, {"prompt=a cat", "negative_prompt=bad", "num_inference_steps=3", "scheduler=dpmpp_2m_karras",
                            "guidance_scale=4", "sample_seed=5", "width=16", "height=24", "prompt_syntax=comfyui"})
                .status,
            0);
  EXPECT_EQ(comfy, latents());

  const Outcome o = maxdiffusion({"generate", image});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "names no model folder; expected pretrained_model_name_or_path=FOLDER too")) << o.err;
}

TEST_F(Samplers, ImagesCarryTheirSettingsAndAreGeneratedAgainToTheBit) {
  const std::string folder = model(scheduler_config("sd15")), out = t / "out";
  std::vector<std::string> words = {"prompt=[\"a: (heart) # [x]\", \"blue\"]",
                                    "negative_prompt=grey",
                                    "prompt_syntax=a1111",
                                    "num_images_per_prompt=2",
                                    "scheduler=heun_karras",
                                    "guidance_scale=4.5",
                                    "sample_seed=7",
                                    "clip_skip=1",
                                    "output_type=png",
                                    "guidance_interval=[0.2, 1]",
                                    "hf_access_token=hf_SECRET"};
  ASSERT_EQ(sample(folder, words).status, 0);
  std::vector<std::string> made;
  for (int i = 0; i < 4; ++i) made.push_back(read_file(fmt::format("{}/image_{}.png", out, i)));
  EXPECT_EQ(std::set<std::string>(made.begin(), made.end()).size(), 4u);
  for (int i : {3, 0}) {
    const Outcome o = maxdiffusion({"generate", fmt::format("{}/image_{}.png", out, i), kQuick});
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(read_file(fmt::format("{}/image_{}.png", out, i == 3 ? 4 : 5)), made[static_cast<size_t>(i)]) << i;
  }
  EXPECT_FALSE(exists(out + "/image_6.png"));
  Outcome o = maxdiffusion({"generate", out + "/image_3.png", "guidance_scale=2", "output_dir=" + (t / "other")});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(read_file(t / "other/image_0.png"), made[3]);
  EXPECT_TRUE(contains(read_file(t / "other/image_0.png"), "guidance_scale: 2")) << o.err;

  o = maxdiffusion({"inspect", "image", out + "/image_3.png"});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* message :
       {"maxdiffusion:\n# maxdiffusion ", "\nscheduler: heun_karras\n", "\nonly_image: 3\n", "\nsample_seed: 7\n",
        "parameters:\nblue\nNegative prompt: grey\nSteps: 2, Sampler: Heun, ",
        ", Schedule type: Karras, CFG scale: 4.5, Seed: 7, ", ", Clip skip: 2, "})
    EXPECT_TRUE(contains(o.out, message)) << message << "\n" << o.out;
  EXPECT_TRUE(contains(o.out, "pretrained_model_name_or_path: \"" + folder + "\"\n")) << o.out;
  EXPECT_FALSE(contains(o.out, "SECRET") || contains(o.out, "output_dir")) << o.out;

  // Images may come from untrusted sources.
  const std::string hostile = t / "hostile.png", marker = t / "dump";
  std::string settings =
      png_texts({reinterpret_cast<const uint8_t*>(made[3].data()), made[3].size()}, "3").at("maxdiffusion");
  settings += "plugin: /tmp/plugin.so\nxla_flags: --xla_dump_to=" + marker + "\noutput_dir: " + (t / "elsewhere") +
              "\nhf_access_token: hf_OTHER\n\"run_name\": x\n";
  write_png(hostile, HostArray(Shape{DType::u8, {8, 8, 3}}), {{"maxdiffusion", settings}});
  o = maxdiffusion({"generate", hostile, kQuick});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(pixels_of(t / "image_0.png"), pixels_of(out + "/image_3.png"));
  EXPECT_FALSE(exists(marker) || exists(t / "elsewhere"));
  for (const char* key : {"plugin", "xla_flags", "output_dir", "hf_access_token", "\"run_name\""})
    EXPECT_TRUE(contains(o.err, std::string(key) + " ignored: '" + hostile + "' names it")) << key << o.err;
  EXPECT_FALSE(contains(o.err, "hf_OTHER")) << o.err;

  for (const auto& [command, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"generate", out + "/image_3.png", "only_image=4"}, "only_image is 4; expected 0 to 3: 4 images are"},
           {{"generate", t / "nothing.png"}, "nothing.png"},
           {{"generate", MD_SOURCE_DIR "/docs/images/loss.png"},
            "has no settings; expected an image that maxdiffusion"},
           {{"inspect", "image"}, "inspect image: expected one PNG file"},
           {{"inspect", "image", folder + "/model_index.json"}, "is not a PNG file"}}) {
    const Outcome refused = maxdiffusion(command);
    EXPECT_NE(refused.status, 0);
    EXPECT_TRUE(contains(refused.err, message)) << refused.err;
  }
}

// --- Folders --------------------------------------------------------------------------------------------------------

TEST_F(Samplers, FoldersOfImageToImageSampleFromNoiseWithoutAnImage) {
  const std::string folder = model(scheduler_config("sd15"));
  auto index = parse_json(read_file(folder + "/model_index.json"));
  ASSERT_EQ(sample(folder).status, 0);
  const std::string plain = latents();
  for (const char* name : {"StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"}) {
    index["_class_name"] = name;
    write_file_atomic(folder + "/model_index.json", index.dump());
    const Outcome o = sample(folder);
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(latents(), plain);
  }
  change_config(folder, "unet", {{"in_channels", 9}});
  const Outcome o = sample(folder);
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "[8,4,3,3]: in_channels is 9")) << o.err;
}

TEST_F(Samplers, SdxlWithoutItsSecondTextEncoderOrATokenizerIsRefusedByName) {
  const std::string folder = t / "sdxl", config = MD_SOURCE_DIR "/tests/pipelines/generate.yml";
  fs::copy(MD_SOURCE_DIR "/tests/golden/pipelines/sdxl", folder, fs::copy_options::recursive);
  const auto index = parse_json(read_file(folder + "/model_index.json"));
  const std::string model = "pretrained_model_name_or_path=" + folder;
  for (const char* part : {"text_encoder_2", "tokenizer", "tokenizer_2"}) {
    auto changed = index;
    changed.erase(part);
    write_file_atomic(folder + "/model_index.json", changed.dump());
    const std::string message = folder + ": model_index.json has no " + part + "; a StableDiffusionXLPipeline needs it";
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"generate", config, model, "prompt=a", "output_dir=" + (t / "out")},
          {"train", config, model, "run_name=run", "output_dir=" + (t / "out"), "dataset_type=synthetic",
           "resolution=16", "max_train_steps=1"},
          {"plan", config, model, "dataset_type=synthetic", "resolution=16"},
          {"convert", folder, t / "copy"}}) {
      const Outcome o = maxdiffusion(words);
      EXPECT_EQ(o.status, 2) << words[0] << o.err;
      EXPECT_TRUE(contains(o.err, message)) << words[0] << ": " << o.err;
    }
    EXPECT_FALSE(exists(t / "copy"));
  }
}

TEST_F(Samplers, AChangedSchedulerOfACheckpointIsTakenWithAWarning) {
  const std::vector<std::string> training = {"train",
                                             MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                             "run_name=run",
                                             "output_dir=" + t.path(),
                                             "pretrained_model_name_or_path=" + kModel,
                                             "resolution=16",
                                             "dataset_type=synthetic",
                                             "synthetic_num_samples=2",
                                             "per_device_batch_size=2"};
  auto train = [&](std::vector<std::string> extra) {
    extra.insert(extra.begin(), training.begin(), training.end());
    return maxdiffusion(extra);
  };
  ASSERT_EQ(train({"max_train_steps=1"}).status, 0);
  const std::string checkpoint = t / "run/checkpoints/1", file = checkpoint + "/scheduler/scheduler_config.json";
  ASSERT_EQ(sample(checkpoint).status, 0);
  const std::string before = latents();
  write_file_atomic(file, scheduler_config("sd_dpm"));
  auto index = parse_json(read_file(checkpoint + "/model_index.json"));
  index["scheduler"][1] = "DPMSolverMultistepScheduler";
  write_file_atomic(checkpoint + "/model_index.json", index.dump());
  const std::string changed = "was changed after the checkpoint was written; ";
  Outcome o = sample(checkpoint);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + file + "' " + changed + "it is taken as it is now")) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + checkpoint + "/model_index.json' " + changed)) << o.err;
  EXPECT_NE(latents(), before);
  o = maxdiffusion({"convert", checkpoint, t / "copy"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + file + "' " + changed)) << o.err;
  EXPECT_EQ(read_file(t / "copy/scheduler/scheduler_config.json"), scheduler_config("sd_dpm"));
  o = train({"max_train_steps=1", "run_name=other", "pretrained_model_name_or_path=" + checkpoint});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + file + "' " + changed + "it is taken as it is now")) << o.err;
  o = train({"max_train_steps=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + file + "' " + changed + "a resumed run does not read it")) << o.err;
  // Changed weights are still an error.
  const std::string weights = checkpoint + "/unet/diffusion_pytorch_model.safetensors";
  std::string bytes = read_file(weights);
  bytes.back() ^= 1;
  write_file_atomic(weights, bytes);
  o = sample(checkpoint);
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, weights + "': its bytes differ from those written")) << o.err;
}

TEST_F(Samplers, SizesThatTheModelCannotTakeAreNamedByTheirKeys) {
  const Outcome o = sample(kModel, {"width=15"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "height=16, width=15: size 16x15 is not a multiple of ")) << o.err;
  EXPECT_FALSE(contains(o.err, "encoded after")) << o.err;
}

}  // namespace
}  // namespace md
