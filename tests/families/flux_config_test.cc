// Config files for FLUX.1: ours must agree with the reference's of the same names, and files in the reference's style
// must be readable as they are. Also what the family derives from sizes and keys, without weights.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/settings/data_mode.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kModels = MD_SOURCE_DIR "/tests/golden/flux/";

RunConfig load(const char* name, const std::vector<std::string>& words = {}) {
  return RunConfig::load(MD_SOURCE_DIR "/configs/" + std::string(name) + ".yml", words);
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

TEST(FluxFiles, SayWhatTheReferencesFilesSay) {
  RunConfig dev = load("base_flux_dev"), schnell = load("base_flux_schnell");
  EXPECT_EQ(dev.model.pretrained_model_name_or_path, "black-forest-labs/FLUX.1-dev");
  EXPECT_EQ(schnell.model.pretrained_model_name_or_path, "black-forest-labs/FLUX.1-schnell");
  EXPECT_EQ(dev.model.flux_name, "flux-dev");
  EXPECT_EQ(schnell.model.flux_name, "flux-schnell");
  EXPECT_EQ(dev.model.max_sequence_length, 512);
  EXPECT_EQ(schnell.model.max_sequence_length, 256);
  EXPECT_EQ(dev.scheduler.time_shift, true);
  EXPECT_EQ(schnell.scheduler.time_shift, false);
  EXPECT_EQ(dev.sample.guidance_scale, 3.5);
  EXPECT_EQ(schnell.sample.guidance_scale, 0);
  EXPECT_EQ(dev.sample.num_inference_steps, 50);
  EXPECT_EQ(schnell.sample.num_inference_steps, 4);
  EXPECT_EQ(dev.layers.remat_policy, "FLUX_OPTIMIZED");
  EXPECT_EQ(schnell.layers.remat_policy, "NONE");
  EXPECT_EQ(dev.optim.learning_rate, 1e-5);
  EXPECT_EQ(schnell.optim.learning_rate, 4e-7);
  EXPECT_EQ(dev.optim.max_train_steps, 1500);
  EXPECT_EQ(schnell.optim.max_train_steps, 200);
  EXPECT_EQ(dev.optim.warmup_steps_fraction, 0.1);
  EXPECT_EQ(schnell.optim.warmup_steps_fraction, 0);
  EXPECT_EQ(dev.optim.optimizer_arg<double>("adam_weight_decay"), 0);
  EXPECT_EQ(schnell.optim.optimizer_arg<double>("adam_weight_decay"), 0.01);
  EXPECT_EQ(dev.mesh.dcn_fsdp_parallelism, -1);
  EXPECT_EQ(schnell.mesh.dcn_data_parallelism, -1);
  EXPECT_TRUE(reads_encoded_records(dev));
  EXPECT_FALSE(reads_encoded_records(schnell));
  EXPECT_TRUE(dev.sharding.logical_axis_rules.text.empty());  // the model's default
  EXPECT_TRUE(contains(schnell.sharding.logical_axis_rules.text, "batch"));
  for (const RunConfig& c : {dev, schnell}) {
    EXPECT_EQ(c.layers.weights_dtype, "bfloat16");
    EXPECT_EQ(c.encoders.text_encoder_dtype, "bfloat16");
    EXPECT_EQ(c.layers.attention, "flash");
    EXPECT_EQ(c.images.resolution, 1024);
    EXPECT_EQ(c.batches.per_device_batch_size, 1);
    EXPECT_EQ(c.scheduler.base_shift, 0.5);
    EXPECT_EQ(c.scheduler.max_shift, 1.15);
    EXPECT_EQ(c.mesh.ici_data_parallelism, -1);
    EXPECT_TRUE(c.sample.prompt_2.empty());
  }
}

// Keys that only the reference's files for FLUX.1 have, and shared keys with values particular to them.
constexpr const char* kOfTheReference = R"(
pretrained_model_name_or_path: 'black-forest-labs/FLUX.1-dev'
clip_model_name_or_path: 'ariG23498/clip-vit-large-patch14-text-flax'
t5xxl_model_name_or_path: 'ariG23498/t5-v1-1-xxl-flax'
flux_name: "flux-dev"
max_sequence_length: 512
time_shift: True
base_shift: 0.5
max_shift: 1.15
offload_encoders: True
unet_checkpoint: ''
revision: 'refs/pr/95'
weights_dtype: 'bfloat16'
attention: 'flash'
flash_block_sizes: {
  "block_q" : 1536,
  "block_kv_compute" : 1536,
  "block_kv" : 1536,
  "block_q_dkv" : 1536,
  "block_kv_dkv" : 1536,
  "block_kv_dkv_compute" : 1536,
  "block_q_dq" : 1536,
  "block_kv_dq" : 1536
}
train_new_flux: False
snr_gamma: -1.0
timestep_bias: {strategy: "none", multiplier: 1.0, begin: 0, end: 1000, portion: 0.25}
diffusion_scheduler_config: {
  _class_name: 'FlaxEulerDiscreteScheduler',
  prediction_type: 'epsilon',
  rescale_zero_terminal_snr: False,
  timestep_spacing: 'trailing'
}
dataset_type: 'tfrecord'
remat_policy: "FLUX_OPTIMIZED"
prompt: "A magical castle in the middle of a forest, artistic drawing"
prompt_2: "A magical castle in the middle of a forest, artistic drawing"
negative_prompt: "purple, red"
do_classifier_free_guidance: True
guidance_scale: 3.5
lora_config: {lora_model_name_or_path: [], weight_name: [], adapter_name: [], scale: [], from_pt: []}
)";

TEST(FluxFiles, OfTheReferenceAreReadAsTheyAre) {
  const RunConfig c = RunConfig::from_source(ConfigSource::from_text(kOfTheReference));
  const std::string scheduler = read_file(kModels + "dev/scheduler/scheduler_config.json");
  // The file names a sampler for noise-predicting models, so it is ignored.
  EXPECT_EQ(sampling_config(scheduler, c.scheduler), parse_json(scheduler));
  EXPECT_EQ(c.sample.prompt_2.size(), 1u);
  const ModelFolder folder = ModelFolder::open(kModels + "dev");
  testing::internal::CaptureStderr();
  const ModelWeights weights = ModelWeights::for_sampling(folder, *make_family(folder), c.model, 0);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "clip_model_name_or_path 'ariG23498/clip-vit-large-patch14-text-flax' holds no weights"))
      << log;
  EXPECT_TRUE(contains(log, "t5xxl_model_name_or_path 'ariG23498/t5-v1-1-xxl-flax' holds no weights")) << log;
  EXPECT_EQ(weights.location("text_encoder"), kModels + "dev/text_encoder");
}

TEST(FluxWeights, OfTextEncodersComeFromWhereTheirKeysSay) {
  const TemporaryFolder t;
  const ModelFolder folder = ModelFolder::open(kModels + "dev");
  const std::shared_ptr<const Family> family = make_family(folder);
  const std::string clip = t / "clip.safetensors", t5 = t / "t5";
  fs::copy(kModels + "dev/text_encoder/model.safetensors", clip);
  fs::copy(kModels + "dev/text_encoder_2", t5);
  ModelKeys keys;
  keys.clip_model_name_or_path = clip;
  keys.t5xxl_model_name_or_path = t5;
  const ModelWeights weights = ModelWeights::for_training(folder, *family, keys, 0);
  EXPECT_EQ(weights.location("text_encoder"), clip);
  EXPECT_EQ(weights.location("text_encoder_2"), t5);
  keys.clip_model_name_or_path = t / "absent.safetensors";
  EXPECT_THROW(ModelWeights::for_training(folder, *family, keys, 0), Error);
  keys.clip_model_name_or_path.clear();
  keys.train_new_flux = true;
  EXPECT_EQ(ModelWeights::for_training(folder, *family, keys, 0).location("transformer"), "");
  EXPECT_NE(ModelWeights::for_training(folder, *family, {}, 0).location("transformer"), "");
}

TEST(FluxFolder, ThatIsNotWhatTheKeysSayIsRefused) {
  const ModelFolder folder = ModelFolder::open(kModels + "schnell");
  const std::shared_ptr<const Family> family = make_family(folder);
  ModelKeys keys;
  keys.flux_name = "flux-schnell";
  check_kind(keys, folder, *family);
  keys.flux_name = "flux-dev";
  EXPECT_TRUE(contains(refusal([&] { check_kind(keys, folder, *family); }),
                       "flux_name is 'flux-dev', but " + kModels + "schnell is a FluxPipeline; expected flux-schnell"));
}

TEST(FluxFolder, OfModelsThatSeeMoreThanLatentsIsRefused) {
  std::map<std::string, std::string> files = ModelFolder::open(kModels + "dev").files();
  json index = parse_json(files.at("model_index.json")), transformer = parse_json(files.at("transformer/config.json"));
  transformer["in_channels"] = 128;
  files["transformer/config.json"] = transformer.dump();
  EXPECT_TRUE(contains(
      refusal([&] { make_family(ModelFolder::from_texts(files)); }),
      "transformer: in_channels is 128 and patch_size 1; expected 64, as the autoencoder's latents give, or "));
}

/// Timesteps of four sampling steps for images of this size; the autoencoder halves height and width.
std::vector<double> sampled_times(const json& scheduler, int64_t height, int64_t width) {
  SampleOptions o;
  o.size = {height, width};
  o.scheduler_config = scheduler;
  return sampler_of(*make_family(ModelFolder::open(kModels + "dev")), o)->table(4).timesteps;
}

/// Expects sigmas evenly spaced from 1 to 1/n before the shift.
void expect_shift(const std::vector<double>& times, double shift) {
  ASSERT_EQ(times.size(), 4);
  for (size_t i = 0; const double u : {1.0, 0.75, 0.5, 0.25})
    EXPECT_NEAR(times[i++], 1000 * shift * u / (1 + (shift - 1) * u), 1e-9) << u;
}

TEST(FluxSchedule, IsShiftedByTheNumberOfTokens) {
  json shifted = {{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"use_dynamic_shifting", true}, {"shift", 3.0}};
  const double mu_of[] = {0.5, 0.63, 1.15};
  for (size_t i = 0; const int64_t side : {64, 128, 256})
    expect_shift(sampled_times(shifted, side, side), std::exp(mu_of[i++]));
  EXPECT_EQ(sampled_times(shifted, 64, 256), sampled_times(shifted, 128, 128));
  shifted.update({{"base_shift", 0.0}, {"max_shift", 1.0}, {"base_image_seq_len", 0}, {"max_image_seq_len", 2048}});
  expect_shift(sampled_times(shifted, 128, 128), std::exp(0.5));
  shifted["time_shift_type"] = "linear";
  expect_shift(sampled_times(shifted, 128, 128), 0.5);
  expect_shift(sampled_times({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}, 64, 64), 1);
}

TEST(FluxSchedule, FollowsItsKeys) {
  const std::string file = R"({"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": true,
    "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0})";
  SchedulerKeys keys;
  keys.time_shift = false;
  keys.base_shift = 0.25;
  keys.max_shift = 2;
  json expected = parse_json(file);
  EXPECT_EQ(training_config(file, keys), expected);
  expected.update({{"use_dynamic_shifting", false}, {"base_shift", 0.25}, {"max_shift", 2.0}});
  EXPECT_EQ(sampling_config(file, keys), expected);
  keys.time_shift = true;
  keys.flow_shift = 5;
  expected["shift"] = 5.0;
  EXPECT_EQ(sampling_config(file, keys), expected) << "flow_shift takes the place of a shift by size";
  testing::internal::CaptureStderr();
  sampling_config(R"({"_class_name": "DDIMScheduler"})", keys);
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(), "time_shift, base_shift and max_shift are ignored"));
}

TEST(FluxSizes, ThatCannotBePackedAreRefusedWithTheNearest) {
  const std::shared_ptr<const Family> family = make_family(ModelFolder::open(kModels + "dev"));
  EXPECT_EQ(family->latent_dims({32, 48}), (Dims{16, 24, 16}));
  EXPECT_TRUE(contains(refusal([&] {
                         family->latent_dims({34, 48});
                       }),
                       "size 34x48 is not a multiple of 4, as this model needs; the nearest is 36x48"));
}

}  // namespace
}  // namespace md
