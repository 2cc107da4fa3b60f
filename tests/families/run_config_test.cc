// How a run's keys are used: values, layer options, devices, and errors for the reference's keys.
#include "maxdiffusion/settings/run_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/settings/data_mode.h"
#include "maxdiffusion/settings/renamed_keys.h"
#include "maxdiffusion/settings/requests.h"
#include "maxdiffusion/settings/run_info.h"
#include "tests/one_device.h"
#include "tests/tiny_folder.h"

namespace md {
namespace {

RunConfig parse(const std::string& yaml, const std::vector<std::string>& words = {}) {
  return RunConfig::from_source(ConfigSource::from_text(yaml, words));
}

RunInfo info(const std::string& yaml) { return make_run_info(parse(yaml), processes()); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string refusal(const std::vector<std::string>& words) {
  try {
    parse("", words);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

/// What parsing prints to stderr.
std::string warnings(const std::vector<std::string>& words) {
  testing::internal::CaptureStderr();
  parse("", words);
  return testing::internal::GetCapturedStderr();
}

// P-10
TEST(RunConfig, TakesPromptsLetterByLetter) {
  const std::string text = "(masterpiece:1.2), [bad], {curly}";
  const SampleKeys k = parse("", {"prompt=" + text, "negative_prompt=" + text}).sample;
  EXPECT_EQ(k.prompt, Texts{text});
  EXPECT_EQ(k.negative_prompt, OptionalTexts{text});
  EXPECT_EQ(parse("negative_prompt: blurry", {"negative_prompt=null"}).sample.negative_prompt, OptionalTexts{});
  EXPECT_EQ(parse("", {"instance_prompt=[sks] (dog)"}).dreambooth.instance_prompt, "[sks] (dog)");
}

// S2-5, S3-31, S4-6
TEST(RunConfig, TakesTheNameOfTheJobWhereItHasNone) {
  ::setenv("JOBSET_NAME", "job-7", 1);
  EXPECT_EQ(parse("").run.run_name, "job-7");
  EXPECT_EQ(parse("run_name: mine").run.run_name, "mine");
  ::unsetenv("JOBSET_NAME");
  EXPECT_EQ(parse("").run.run_name, "");
  EXPECT_THROW(check_has_folder(info("")), Error);
}

// S2-6, S2-7, S4-7, S4-8
TEST(RunConfig, FallsBackToTheBaseOutputDirectory) {
  EXPECT_EQ(info("{run_name: a, output_dir: '', base_output_directory: /b}").folder, "/b/a");
  EXPECT_EQ(info("{run_name: a, output_dir: /o, base_output_directory: /b}").folder, "/o/a");
  EXPECT_THROW(check_has_folder(info("{run_name: a, output_dir: ''}")), Error);
  EXPECT_THROW(info("{run_name: a, save_config_to_gcs: true}"), Error);
}

// S2-64, S3-28, S4-61
TEST(RunConfig, NamesThatNoListKnowsAreRefusedWithTheList) {
  EXPECT_TRUE(
      contains(refusal({"weights_dtype=float31"}), "weights_dtype is 'float31'; expected one of: float32, float8"));
  EXPECT_TRUE(contains(refusal({"activations_dtype=int32"}), "activations_dtype is 'int32'; expected one of: float8"));
  EXPECT_TRUE(contains(refusal({"precision=BEST"}), "expected one of: DEFAULT, HIGH, HIGHEST"));
  EXPECT_TRUE(contains(refusal({"attention=splash"}), "attention is 'splash'; expected one of: flash, dot_product"));
  EXPECT_TRUE(contains(refusal({"remat_policy=MOST"}), "remat_policy is 'MOST'; expected one of: NONE, FULL"));
  for (const std::string key : {"names_which_can_be_saved", "names_which_can_be_offloaded"})
    EXPECT_TRUE(contains(refusal({key + "=[all]"}), key + " holds 'all'; expected one of: hidden_states, self_attn"));
  EXPECT_TRUE(contains(refusal({"names_which_can_be_saved=[xq_out]", "names_which_can_be_offloaded=[xq_out]"}),
                       "both have 'xq_out'"));
  EXPECT_TRUE(contains(refusal({"text_encoder_dtype=int8"}), "text_encoder_dtype is 'int8'; expected one of: float8"));
  EXPECT_TRUE(contains(refusal({"vae_dtype=int8"}), "vae_dtype is 'int8'; expected one of: float8"));
  EXPECT_TRUE(contains(refusal({"vae_weights_dtype=int8"}), "vae_weights_dtype is 'int8'; expected one of: float8"));
  EXPECT_TRUE(contains(refusal({"lr_scheduler=exponential"}), "expected one of: constant"));
  EXPECT_TRUE(contains(refusal({"optimizer=newton"}), "optimizer is `newton`, expected one of: adafactor, adamw,"));
  EXPECT_TRUE(contains(refusal({"optimizer=Adamw"}), "did you mean `adamw`?"));
  EXPECT_TRUE(contains(refusal({"optimizer=sgd", "sgd_nesterov=true", "sgd_momentum=0"}), "sgd_nesterov needs"));
  EXPECT_TRUE(contains(refusal({"optimizer=lion", "optimizer_args=beta=1"}),
                       "optimizer_args: optimizer=lion has no argument 'beta'; expected one of: betas"));
  EXPECT_TRUE(
      contains(refusal({"optimizer_args=eps=-1"}), "optimizer_args: eps is '-1'; expected a number, 0 or more"));
  EXPECT_TRUE(contains(refusal({"hardware=npu"}), "hardware is 'npu'; expected one of: cpu, gpu, tpu"));
  EXPECT_TRUE(contains(refusal({"caption_dropout=1"}), "caption_dropout"));
  EXPECT_TRUE(contains(refusal({"ema_decay=1"}), "ema_decay"));
  EXPECT_TRUE(contains(refusal({"resolution=0"}), "resolution"));
}

TEST(RunConfig, NumbersThatNoRunCanUseAreRefused) {
  for (const char* word : {"learning_rate=nan", "guidance_scale=nan", "guidance_scale_high=nan"})
    EXPECT_TRUE(contains(refusal({word}), "expected a finite number")) << word;
  EXPECT_TRUE(contains(refusal({"adam_b1=.nan"}), "expected a number"));
  for (const char* word : {"learning_rate=inf", "adam_weight_decay=inf"})
    EXPECT_TRUE(contains(refusal({word}), " is `inf`, expected a finite number")) << refusal({word});
  for (const std::string key : {"adam_eps", "adam_weight_decay", "sgd_momentum", "sgd_weight_decay"})
    for (const std::string value : {"inf", "-1"})
      EXPECT_TRUE(
          contains(refusal({key + "=" + value}), key + " is `" + value + "`, expected a finite number, 0 or more"))
          << key << value;
  for (const char* word :
       {"vae_kl_weight=-1", "checkpoints_to_keep=-1", "learning_rate=-1", "text_encoder_learning_rate=-1e-6",
        "vae_learning_rate=-1", "adam_eps=-1", "guidance_scale=-3", "guidance_scale_low=-0.5", "noise_offset=-0.1",
        "prior_loss_weight=-1"}) {
    const std::string key = std::string(word).substr(0, std::string(word).find('='));
    EXPECT_TRUE(contains(refusal({word}), "command line: " + key + " is ") && contains(refusal({word}), ", 0 or more"))
        << refusal({word});
  }
  EXPECT_TRUE(
      contains(refusal({"crops_coords_top_left=[-1,99999]"}),
               "crops_coords_top_left is `[-1,99999]`, expected a list of whole numbers, as in [1, 2], each 0"));
  EXPECT_TRUE(contains(refusal({"max_train_steps=-5"}),
                       "max_train_steps is `-5`, expected a whole number, -1 or more\n"
                       "  max_train_steps: optimizer updates; -1: num_train_epochs passes over the data"));
  EXPECT_TRUE(contains(refusal({"adam_b2=1"}), "adam_b2 is `1`, expected a number, at least 0 and below 1"));
  EXPECT_TRUE(contains(refusal({"warmup_steps_fraction=1.5"}), "expected a number, 0 to 1"));
  EXPECT_TRUE(contains(refusal({"seed=-2"}),
                       "seed is `-2`, expected a whole number, -1 to 18446744073709551615\n  seed: seed of every "
                       "random stream; -1: random, logged"));
  EXPECT_EQ(parse("", {"max_train_steps=1e3"}).optim.max_train_steps, 1000);
  EXPECT_EQ(parse("", {"max_train_steps=-1", "learning_rate=0", "guidance_scale=0"}).optim.max_train_steps, -1);
}

TEST(RunConfig, SeedsOfMinusOneAreRandomLoggedAndSaved) {
  const TemporaryFolder t;
  const RunConfig c = parse("", {"seed=-1", "sample_seed=-1", "run_name=mine", "output_dir=" + t.path()});
  testing::internal::CaptureStderr();
  const RunInfo one = make_run_info(c, processes()), two = make_run_info(c, processes());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(one.seed, two.seed);
  EXPECT_NE(one.sample_seed, two.sample_seed);
  EXPECT_TRUE(contains(log, fmt::format("seed=-1: a random seed: {}", one.seed))) << log;
  EXPECT_TRUE(contains(log, fmt::format("sample_seed=-1: a random seed: {}", two.sample_seed))) << log;
  EXPECT_TRUE(contains(one.config_yaml, fmt::format("\nseed: {}\n", one.seed))) << one.config_yaml;
  make_folders(one.folder);
  write_file_atomic(one.folder + "/config.yml", one.config_yaml);
  EXPECT_EQ(make_run_info(c, processes()).seed, one.seed);
  EXPECT_EQ(info("{seed: 5}").seed, 5u);
  EXPECT_EQ(info("{seed: 5}").sample_seed, 5u);
  EXPECT_EQ(info("{seed: 5, sample_seed: 6}").sample_seed, 6u);
}

TEST(RunConfig, TheLogNamesTheSamplerAndWhy) {
  testing::internal::CaptureStderr();
  SchedulerKeys keys = parse("", {"diffusion_scheduler_config={_class_name: PNDMScheduler}"}).scheduler;
  sampling_config(R"({"_class_name": "DDIMScheduler"})", keys);
  sampling_config(R"({"_class_name": "LMSDiscreteScheduler"})", {});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log,
                       "scheduler: \"PNDMScheduler\" (from diffusion_scheduler_config; the model folder has "
                       "\"DDIMScheduler\")"))
      << log;
  EXPECT_TRUE(contains(log, "scheduler: \"LMSDiscreteScheduler\" (from the model folder)")) << log;
}

TEST(RunConfig, LatentsOfAnotherSizeNameTheLayoutOfTheirFile) {
  const auto family = tiny_family();
  SampleOptions o;
  o.prompts = {"one"};
  o.size = {64, 128, 1};
  o.latents = HostArray(Shape{DType::f32, {1, 8, 8, 4}});  // [N, 4, 8, 8] in the file
  try {
    denoise(one_device(), *family, {}, {}, o);
    FAIL() << "latents of another size";
  } catch (const Error& e) {
    EXPECT_EQ(e.message(),
              "latents are f32[1,4,8,8]; 1 of 64x128 pixels need f32[1,4,8,16] (images, channels, height, width)");
  }
}

TEST(RunConfig, PlacesThatCannotBeWrittenToAreRefused) {
  for (const std::string key : {"output_dir", "base_output_directory", "jax_cache_dir", "metrics_file",
                                "timing_metrics_file", "dataset_save_location", "checkpoint_dir", "tfrecords_dir"}) {
    EXPECT_TRUE(contains(refusal({key + "=hdfs://bucket/a"}), key + " is 'hdfs://bucket/a'"));
    for (const char* scheme : {"gs", "s3"}) parse("", {key + "=" + scheme + "://bucket/a"});
    const std::string secret = refusal({key + "=s3://who:hush@bucket/a"});
    EXPECT_TRUE(contains(secret, key + " holds a secret") && !contains(secret, "hush")) << secret;
  }
}

TEST(RunConfig, PlacesInBucketsAreFoldersOfThisMachineMeanwhile) {
  const TemporaryFolder t;
  const char* before = std::getenv("XDG_CACHE_HOME");
  const std::string cache = before ? before : "";
  ::setenv("XDG_CACHE_HOME", t.path().c_str(), 1);
  const RunConfig config =
      parse("{run_name: a, output_dir: 'gs://bucket/runs/', metrics_file: 's3://other/lines.jsonl'}");
  const RunInfo run = make_run_info(config, processes());
  EXPECT_EQ(run.checkpoint_dir, "gs://bucket/runs/a/checkpoints");
  EXPECT_TRUE(run.folder.starts_with(t / "maxdiffusion/places/gs/") && run.folder.ends_with("/bucket/runs/a"));
  EXPECT_TRUE(run.metrics.metrics_file.starts_with(t / "maxdiffusion/places/s3/")) << run.metrics.metrics_file;
  EXPECT_EQ(run.place, "gs://bucket/runs/a");
  ASSERT_EQ(run.uploads.size(), 1u);
  EXPECT_EQ(run.uploads[0], (std::pair<std::string, std::string>(run.metrics.metrics_file, "s3://other/lines.jsonl")));
  EXPECT_EQ(run.config_yaml, config.to_yaml());
  const RunInfo here = info("{run_name: a, output_dir: runs}");
  EXPECT_EQ(here.folder, "runs/a");
  EXPECT_EQ(here.place, "runs/a");
  EXPECT_TRUE(here.uploads.empty());
  before ? ::setenv("XDG_CACHE_HOME", cache.c_str(), 1) : ::unsetenv("XDG_CACHE_HOME");
}

// S0-62, S0-70…73, S2-12…14, S2-22
TEST(RunConfig, SaysToLayersWhatItsKeysSay) {
  const ScopeOptions plain = scope_options(parse("").layers);
  EXPECT_EQ(plain.weights, DType::f32);
  EXPECT_EQ(plain.activations, DType::bf16);
  EXPECT_EQ(plain.precision, Precision::default_);
  EXPECT_FALSE(plain.scan_layers);
  const ScopeOptions o =
      scope_options(parse("", {"weights_dtype=bfloat16", "activations_dtype=float32", "precision=HIGHEST",
                               "attention=flash", "flash_min_seq_length=0", "remat_policy=full", "scan_layers=true"})
                        .layers);
  EXPECT_EQ(o.weights, DType::bf16);
  EXPECT_EQ(o.activations, DType::f32);
  EXPECT_EQ(o.precision, Precision::highest);
  EXPECT_EQ(o.attention, "flash");
  EXPECT_EQ(o.flash_min_seq_length, 0);
  EXPECT_EQ(o.remat, "full");
  EXPECT_TRUE(o.scan_layers);
  EXPECT_EQ(scope_options(parse("precision: HIGH").layers).precision, Precision::high);
  EXPECT_EQ(scope_options(parse("remat_policy: 'HIDDEN_STATE_WITH_OFFLOAD'").layers).remat,
            "HIDDEN_STATE_WITH_OFFLOAD");
  const LayerKeys custom = parse("", {"remat_policy=CUSTOM", "names_which_can_be_saved=['attn_output', 'query_proj']",
                                      "names_which_can_be_offloaded=['xq_out']"})
                               .layers;
  EXPECT_EQ(scope_options(custom).remat_names,
            (RematNames{.saved = {"attn_output", "query_proj"}, .offloaded = {"xq_out"}}));
}

TEST(RunConfig, SaysToFrozenModelsWhatTheirKeysSay) {
  const ScopeOptions scope = scope_options(parse("{weights_dtype: bfloat16, attention: flash}").layers);
  const ScopeOptions text = text_encoder_options(scope, {}), vae = autoencoder_options(scope, {});
  for (const ScopeOptions& o : {text, vae}) {
    EXPECT_EQ(o.weights, DType::f32);
    EXPECT_EQ(o.activations, DType::f32);
    EXPECT_EQ(o.attention, "flash");
    EXPECT_FALSE(o.trainable);
  }
  const EncoderKeys keys =
      parse("", {"text_encoder_dtype=float16", "vae_dtype=bfloat16", "vae_weights_dtype=float16"}).encoders;
  EXPECT_EQ(text_encoder_options(scope, keys).weights, DType::f16);
  EXPECT_EQ(text_encoder_options(scope, keys).activations, DType::f16);
  EXPECT_EQ(autoencoder_options(scope, keys).weights, DType::f16);
  EXPECT_EQ(autoencoder_options(scope, keys).activations, DType::bf16);
}

// S2-75
TEST(RunConfig, CheckpointsLieInTheRunsFolderUnlessAKeySaysWhere) {
  EXPECT_EQ(info("{run_name: a, output_dir: /o}").checkpoint_dir, "/o/a/checkpoints");
  EXPECT_EQ(info("{run_name: a, output_dir: /o, checkpoint_dir: /c}").checkpoint_dir, "/c");
  EXPECT_EQ(info("checkpoint_dir: /c").checkpoint_dir, "/c");
  EXPECT_EQ(info("").checkpoint_dir, "");
}

// S2-50
TEST(RunConfig, RecordsHoldImagesWhereAKeySaysSo) {
  EXPECT_TRUE(reads_encoded_records(parse("dataset_type: tfrecord")));
  EXPECT_TRUE(reads_encoded_records(parse("dataset_type: grain")));
  EXPECT_FALSE(reads_encoded_records(parse("dataset_type: hf")));
  EXPECT_FALSE(reads_encoded_records(parse("{dataset_type: tfrecord, load_tfrecord_cached: false}")));
  EXPECT_FALSE(reads_encoded_records(parse("{dataset_type: tfrecord, cache_latents_text_encoder_outputs: false}")));
}

// S0-91, S0-92, S1-47, S1-48, S1-50, S2-28, S4-29
TEST(RunConfig, FractionalBatchesMustMakeAWholeOne) {
  EXPECT_EQ(global_batch(2, 4), 8);
  EXPECT_EQ(global_batch(0.25, 8), 2);
  EXPECT_EQ(global_batch(parse("", {"per_device_batch_size=0.25"}).batches.per_device_batch_size, 4), 1);
  for (const auto& [each, devices] : {std::pair{0.25, 3}, std::pair{0.3, 4}, std::pair{0.25, 2}, std::pair{0.0, 4}}) {
    try {
      global_batch(each, devices);
      ADD_FAILURE() << each << " times " << devices;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_TRUE(contains(e.what(), "expected a whole number")) << e.what();
    }
  }
}

// S2-29
TEST(RunConfig, AGlobalBatchIsTakenAsItIs) {
  EXPECT_EQ(global_batch(parse("{global_batch_size: 6, per_device_batch_size: 0.3}").batches, 4), 6);
  EXPECT_EQ(global_batch(parse("{global_batch_size: 0, per_device_batch_size: 2}").batches, 4), 8);
  EXPECT_THROW(global_batch(parse("global_batch_size: -1").batches, 4), Error);
}

// S1-35, S1-39, S4-61, S2-64
TEST(RunConfig, DevicesAreThoseAndLieAsTheKeysSay) {
  const Devices d = open_devices(device_request(
      parse("", {"hardware=cpu", "cpu_device_count=4", "ici_data_parallelism=2", "ici_tensor_parallelism=2",
                 "logical_axis_rules=[['embed', 'tensor'], ['heads', None]]", "data_sharding=[['data']]"})));
  EXPECT_EQ(d.client().platform_name(), "cpu");
  EXPECT_EQ(d.mesh().describe(), "data 2 × tensor 2 (4 devices)");
  using Axes = std::vector<std::vector<std::string>>;
  EXPECT_EQ(d.rules().resolve(d.mesh(), {axis::kEmbed, axis::kHeads}, {8, 8}).dims, (Axes{{"tensor"}, {}}));
  EXPECT_EQ(d.rules().resolve(d.mesh(), {axis::kData, ""}, {8, 8}).dims, (Axes{{"data"}, {}}));
  const Devices plain = open_devices(device_request(parse("", {"cpu_device_count=4", "ici_tensor_parallelism=2"})));
  EXPECT_EQ(plain.rules().resolve(plain.mesh(), {axis::kData, ""}, {8, 8}).dims, (Axes{{"data", "tensor"}, {}}));
  EXPECT_EQ(plain.rules().resolve(plain.mesh(), {"", axis::kHeads}, {8, 8}).dims, (Axes{{}, {"tensor"}}));
  // A family's own rules apply if the keys name none.
  const auto of_family = [](const std::vector<std::string>& words) {
    const Devices on = open_devices(device_request(parse("", words)), "[['embed', 'tensor']]");
    return on.rules().resolve(on.mesh(), {axis::kEmbed, axis::kHeads}, {8, 8}).dims;
  };
  std::vector<std::string> words = {"cpu_device_count=2", "ici_tensor_parallelism=2"};
  EXPECT_EQ(of_family(words), (Axes{{"tensor"}, {}}));
  words.emplace_back("logical_axis_rules=[['heads', 'tensor']]");
  EXPECT_EQ(of_family(words), (Axes{{}, {"tensor"}}));
}

// S2-20
TEST(RunConfig, AttentionShardingUniformSplitsTheSequence) {
  for (bool uniform : {true, false}) {
    const Devices d = open_devices(device_request(
        parse("", {"cpu_device_count=2", "ici_context_parallelism=2", "logical_axis_rules=[['embed', 'fsdp']]",
                   uniform ? "attention_sharding_uniform=true" : "attention_sharding_uniform=false"})));
    for (const char* length : {axis::kLength, axis::kKvLength, axis::kSelfLength, axis::kCrossLength})
      EXPECT_EQ(d.rules().resolve(d.mesh(), {length}, {8}).replicated(), !uniform) << length;
  }
}

TEST(RunConfig, ANameIsOneFolder) {
  for (const char* name : {"..", ".", "../x", "a/b", "/a", "a\nb"})
    EXPECT_TRUE(contains(refusal({std::string("run_name=") + name}),
                         fmt::format("run_name is '{}'; expected the name of one folder in output_dir", name)))
        << name;
  EXPECT_EQ(parse("", {"run_name=..a..b c"}).run.run_name, "..a..b c");
}

TEST(RunConfig, TheNearestPlaceSaysWhereTheDataIs) {
  const TemporaryFolder t;
  write_file_atomic(t / "base.yml", "dataset_name: noto-emoji\n");
  write_file_atomic(t / "child.yml", "base: base.yml\ntrain_data_dir: /pics\n");
  write_file_atomic(t / "both.yml", "dataset_name: owner/name\n\ntrain_data_dir: /pics\n");
  write_file_atomic(t / "files.yml", "dataset_name: parquet\nhf_train_files: /a.parquet\n");
  const auto data = [&](const std::string& file, const std::vector<std::string>& words) {
    const DataSourceConfig c = RunConfig::load(t / file, words).source;
    return std::vector<std::string>{c.train_data_dir, c.dataset_name, c.hf_train_files};
  };
  using Texts = std::vector<std::string>;
  testing::internal::CaptureStderr();
  EXPECT_EQ(data("base.yml", {"train_data_dir=pics"}), (Texts{"pics", "", ""}));
  EXPECT_EQ(data("base.yml", {"dataset_name=", "train_data_dir=pics"}), (Texts{"pics", "", ""}));
  EXPECT_EQ(data("child.yml", {}), (Texts{"/pics", "", ""}));
  EXPECT_EQ(data("child.yml", {"dataset_name=a/b"}), (Texts{"", "a/b", ""}));
  EXPECT_EQ(data("files.yml", {"train_data_dir=pics"}), (Texts{"pics", "", ""}));
  EXPECT_EQ(data("files.yml", {}), (Texts{"", "", "/a.parquet"}));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  EXPECT_EQ(data("both.yml", {}), (Texts{"/pics", "", ""}));
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(),
                       t / "both.yml" + ":1: dataset_name is ignored: train_data_dir is the location of the data"));
  EXPECT_EQ(refusal({"train_data_dir=pics", "dataset_name=foo"}),
            "train_data_dir and dataset_name are both given; expected one location of data");
}

TEST(RunConfig, WhatIsSavedMeansTheSameFromAnyFolder) {
  const TemporaryFolder t;
  make_folders(t / "configs/model");
  write_file_atomic(t / "configs/a.yml",
                    "pretrained_model_name_or_path: model\noutput_dir: runs\ntrain_data_dir: pics\n");
  const std::string saved = RunConfig::load(t / "configs/a.yml", {"eval_data_dir=held", "vae_file=a/b"}).to_yaml();
  const std::string here = std::filesystem::current_path();
  for (const std::string& line :
       {"\npretrained_model_name_or_path: " + (t / "configs/model"), "\ntrain_data_dir: " + (t / "configs/pics"),
        "\noutput_dir: " + here + "/runs", "\neval_data_dir: " + here + "/held", "\nvae_file: " + here + "/a/b"})
    EXPECT_TRUE(contains(saved, line + "\n")) << line << "\n" << saved;
  EXPECT_TRUE(contains(parse("pretrained_model_name_or_path: owner/name").to_yaml(),
                       "\npretrained_model_name_or_path: owner/name\n"));
}

TEST(RunConfig, FormerNamesOfKeysStillWork) {
  const RunConfig c =
      parse("gpu: h100\ncompile_step: sampling\nvae_image_steps: 3\nlow_precision_update: stochastic\n");
  EXPECT_EQ(c.hardware.gpu_type, "h100");
  EXPECT_EQ(c.hardware.compile_target, "sampling");
  EXPECT_EQ(c.vae.vae_image_pretrain_steps, 3);
  EXPECT_EQ(c.optim.low_precision_update, "stochastic_rounding");
  for (const KeyRename& r : renamed_keys())
    for (const auto& [former, now] : r.values) EXPECT_NE(former, now);
}

TEST(RunConfig, KeysOfOtherProgramsNameOurs) {
  EXPECT_TRUE(contains(refusal({"train_batch_size=4"}),
                       "there is no key `train_batch_size`\n  here it is `per_device_batch_size`"));
  EXPECT_TRUE(contains(refusal({"MAX_TRAIN_STEPS=2"}), "did you mean `max_train_steps`?"));
  EXPECT_FALSE(contains(refusal({"foo=1"}), "did you mean"));
}

// S4-60
TEST(RunConfig, TokensAreReadAndNeverPrinted) {
  const RunConfig c = parse("hf_access_token: hf_secret");
  EXPECT_EQ(c.hub.hf_access_token, "hf_secret");
  EXPECT_FALSE(contains(c.to_yaml(), "hf_secret"));
}

TEST(RunConfig, LocationsWithSecretsAreRefusedByName) {
  for (const char* key :
       {"train_data_dir", "hf_train_files", "hf_data_dir", "grain_train_files", "dataset_name", "data_files_pattern",
        "conditioning_data_dir", "eval_data_dir", "instance_data_dir", "class_data_dir"}) {
    const std::string message = refusal({key + std::string("=s3://reader:hush@bucket/folder")});
    EXPECT_TRUE(contains(message, key + std::string(" holds a secret key"))) << message;
    EXPECT_FALSE(contains(message, "hush")) << message;
  }
}

// S0-40, S2-23, S4-21, S0-42, S0-46…48, S0-51, S0-55…57
TEST(RunConfig, BlockSizesAreReadAsTheDocumentsWriteThem) {
  const RunConfig c = parse("", {R"(flash_block_sizes={"block_q" : 3024, "block_kv" : 2048,
                                     "use_fused_bwd_kernel": False,})"});
  const AttentionBlocks blocks = scope_options(c.layers).attention_blocks;
  using Fused = AttentionBlocks::Fused;
  EXPECT_EQ(blocks, (AttentionBlocks{.queries = 3024, .keys = 2048, .fused_gradient = Fused::no}));
  EXPECT_EQ(scope_options(parse("", {"flash_block_sizes={block_q: 1, block_kv: 2, block_kv_compute: 3, block_q_dkv: 4, "
                                     "block_kv_dkv: 5, block_kv_dkv_compute: 6, block_q_dq: 7, block_kv_dq: 8, "
                                     "use_fused_bwd_kernel: True}"})
                              .layers)
                .attention_blocks,
            (AttentionBlocks{1, 2, 4, 5, 3, 6, 7, 8, Fused::yes}));
  for (const auto& [value, expected] :
       {std::pair{"{heads_per_tile: 1, vmem_limit_bytes: 67108864}", "heads_per_tile, vmem_limit_bytes are ignored: "},
        std::pair{"{block_kv_compute_in: 256}", "block_kv_compute_in is ignored: "}}) {
    const std::string log = warnings({std::string("flash_block_sizes=") + value});
    EXPECT_TRUE(contains(log, std::string("W ")) && contains(log, std::string(" flash_block_sizes: ") + expected))
        << log;
    EXPECT_EQ(std::ranges::count(log, '\n'), 1) << log;
  }
  EXPECT_TRUE(contains(refusal({"flash_block_sizes={block_x: 512}"}),
                       "unknown field 'block_x'; expected one of: use_fused_bwd_kernel, block_kv"));
  EXPECT_TRUE(contains(refusal({"flash_block_sizes={use_fused_bwd_kernel: 2}"}), "is '2'; expected true or false"));
  EXPECT_TRUE(contains(refusal({"flash_block_sizes={block_q: -5}"}), "block_q is '-5'; expected a whole number"));
}

// S0-102, S1-49
TEST(RunConfig, FsdpBatchTakesWholeBatchesOnly) {
  const std::string message = refusal({"ici_fsdp_batch_parallelism=2", "per_device_batch_size=0.5"});
  EXPECT_TRUE(
      contains(message, "per_device_batch_size is 0.5; expected a whole number with ici_fsdp_batch_parallelism"))
      << message;
  EXPECT_EQ(parse("", {"ici_fsdp_batch_parallelism=2"}).mesh.axes().at(2), "fsdp_batch");
}

TEST(ReferenceKeys, WhatIsNotThereIsRefusedByName) {
  for (const char* word : {"enable_ml_diagnostics=true", "enable_ondemand_xprof=true", "scheduler_dtype=bfloat16"}) {
    const std::string key = std::string(word).substr(0, std::string(word).find('='));
    EXPECT_TRUE(contains(refusal({word}), key + " is set; expected its default: ")) << word;
  }
}

// S4-3
TEST(RunConfig, AttentionByCudnnIsFlashElsewhereAndSaysSo) {
  EXPECT_TRUE(contains(warnings({"attention=cudnn_flash_te"}), "cudnn_flash_te: hardware is cpu, cuDNN needs gpu"));
  EXPECT_EQ(warnings({"attention=cudnn_flash_te", "hardware=gpu"}), "");
  EXPECT_EQ(warnings({"attention=flash"}), "");
}

TEST(ReferenceKeys, WhatHasNoEffectIsWarnedAboutByName) {
  for (const char* word :
       {"profiler=xplane", "profiler_gcs_path=gs://b", "enable_mllog=true", "dataset_config_name=a", "ulysses_shards=2",
        "vae_spatial=2", "libtpu_flags=wan_light", "converted_weights_dir=/a", "pretrained_orbax_dir=/a"}) {
    const std::string key = std::string(word).substr(0, std::string(word).find('='));
    EXPECT_TRUE(contains(warnings({word}), key + " is ignored: ")) << word;
  }
}

// S4-96, S4-97
TEST(RunConfig, QuantizationKeysWithoutEffectAreWarnedAboutByName) {
  EXPECT_TRUE(contains(warnings({"quantization=int8"}), "quantization is ignored: use_qwix_quantization is false"));
  EXPECT_TRUE(contains(warnings({"quantization_local_shard_count=2"}), "quantization_local_shard_count is ignored"));
  const std::vector<std::string> int8 = {"use_qwix_quantization=true", "quantization=int8"};
  EXPECT_EQ(warnings(int8), "");
  for (const std::string key : {"quantization_calibration_method", "weight_quantization_calibration_method",
                                "act_quantization_calibration_method", "bwd_quantization_calibration_method"}) {
    std::vector<std::string> words = int8;
    words.push_back(key + "=fixed,-4,4");
    EXPECT_TRUE(contains(warnings(words), key + " is ignored: only quantization=fp8_full reads it")) << key;
    words[1] = "quantization=fp8_full";
    EXPECT_EQ(warnings(words), "");
  }
  EXPECT_TRUE(contains(refusal({"use_qwix_quantization=true"}), "Quantization type is not set"));
}

TEST(ReferenceKeys, GroupsOtherThanTheModelsAreWarnedAbout) {
  auto message = [](const std::vector<std::string>& words) {
    testing::internal::CaptureStderr();
    check_repeated_keys(tiny_family()->spec().reference, parse("", words).reference.norm_num_groups);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({"norm_num_groups=4"}), "");  // the model's value
  EXPECT_TRUE(contains(message({"norm_num_groups=8"}), "norm_num_groups=8 is ignored"));
}

// S2-15, S2-19, S2-21, S2-91, S4-15, S4-18, S4-20, S4-83, S4-92
}  // namespace
}  // namespace md
