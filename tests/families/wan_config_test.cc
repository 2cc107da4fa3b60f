// Config files for Wan: ours must agree with the reference's of the same names, and a file in the reference's style,
// which names every key, must be readable as it is.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/settings/data_mode.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {
namespace {

/// Values that differ between the files.
struct WanFile {
  const char *name, *model, *model_name, *model_type;
  int64_t flash_min_seq_length, height, width, num_inference_steps;
  double flow_shift, magcache_thresh;
};
constexpr WanFile kFiles[] = {
    {"base_wan_14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan2.1", "T2V", 4096, 720, 1280, 50, 5, 0.12},
    {"base_wan_1_3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan2.1", "T2V", 0, 480, 832, 30, 3, 0.12},
    {"base_wan_27b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "wan2.2", "T2V", 4096, 720, 1280, 40, 12, 0.04},
    {"base_wan_i2v_14b", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "wan2.1", "I2V", 4096, 720, 1280, 50, 5, 0.12},
    {"base_wan_i2v_27b", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "wan2.2", "I2V", 4096, 720, 1280, 40, 5, 0.06},
};

std::string path_of(const char* name) { return MD_SOURCE_DIR "/configs/" + std::string(name) + ".yml"; }

TEST(WanFiles, DifferAsTheReferencesFilesDo) {
  for (const WanFile& f : kFiles) {
    const RunConfig c = RunConfig::load(path_of(f.name), {});
    EXPECT_EQ(c.model.pretrained_model_name_or_path, f.model);
    EXPECT_EQ(c.model.model_name, f.model_name) << f.name;
    EXPECT_EQ(c.model.model_type, f.model_type) << f.name;
    EXPECT_EQ(c.layers.flash_min_seq_length, f.flash_min_seq_length) << f.name;
    EXPECT_EQ(c.sample.height, f.height) << f.name;
    EXPECT_EQ(c.sample.width, f.width) << f.name;
    EXPECT_EQ(c.sample.num_inference_steps, f.num_inference_steps) << f.name;
    EXPECT_EQ(c.scheduler.flow_shift, f.flow_shift) << f.name;
    EXPECT_EQ(c.step_cache.magcache_thresh, f.magcache_thresh) << f.name;
    EXPECT_EQ(c.sample.guidance_scale, 5) << f.name;
    EXPECT_EQ(c.sample.prompt.size(), 1u) << f.name;
    EXPECT_EQ(c.sample.negative_prompt.size(), 1u) << f.name;
    EXPECT_EQ(c.sample.num_frames, 81) << f.name;
    EXPECT_EQ(c.sample.fps, 16) << f.name;
  }
  for (const auto& [name, boundary] : {std::pair{"base_wan_27b", 0.875}, std::pair{"base_wan_i2v_27b", 0.9}}) {
    const RunConfig c = RunConfig::load(path_of(name), {});
    EXPECT_EQ(c.sample.guidance_scale_low, 3) << name;
    EXPECT_EQ(c.sample.guidance_scale_high, 4) << name;
    EXPECT_EQ(c.sample.boundary_ratio, boundary) << name;
  }
}

struct Measured {
  const char *folder, *transformer;
  int64_t height;
  bool images;
  size_t numbers;
  double third, last;  // of the ratios with prompt and without
};

TEST(WanFamily, KnowsTheMagnitudeRatiosOfPublishedModels) {
  // Values from the repositories of MagCache and MaxDiffusion.
  for (const auto& [folder, transformer, height, images, numbers, third, last] :
       {Measured{"t2v", "wan21_t2v_14b", 720, false, 100, 1.02504, 0.86189},
        Measured{"t2v", "wan21_t2v_1_3b", 480, false, 100, 1.0124, 0.81939},
        Measured{"i2v", "wan21_i2v_14b", 720, true, 80, 0.99428, 0.86768},
        Measured{"i2v", "wan21_i2v_14b", 480, true, 80, 0.98783, 0.92616},
        Measured{"a14b", "wan21_t2v_14b", 720, false, 80, 1.00124, 0.80181},
        Measured{"a14b", "wan22_i2v_a14b", 720, true, 80, 0.99191, 0.79902},
        Measured{"ti2v", "wan22_ti2v_5b", 704, false, 100, 0.99505, 0.97015},
        Measured{"ti2v", "wan22_ti2v_5b", 704, true, 100, 0.99512, 0.96616},
        Measured{"flf2v", "wan21_flf2v_14b", 720, true, 0, 0, 0}}) {
    const std::string goldens = MD_SOURCE_DIR "/tests/golden/";
    TemporaryFolder t;
    std::filesystem::copy(goldens + "wan/" + folder, t / "model", std::filesystem::copy_options::recursive);
    auto put = [&](const std::string& part, const std::string& config) {
      const std::string path = t / ("model/" + part + "/config.json");
      if (exists(path)) write_file_atomic(path, read_file(goldens + "full/" + config + ".json"));
    };
    put("transformer", transformer);
    put("transformer_2", transformer);
    put("vae", std::string(folder) == "ti2v" ? "wan_vae_22" : "wan_vae_21");
    put("text_encoder", "umt5_xxl");
    put("image_encoder", "clip_vision_h");
    const auto ratios = make_family(ModelFolder::open(t / "model"))->spec().magcache_ratios({height, 1280, 81}, images);
    ASSERT_EQ(ratios.size(), numbers) << folder << " " << transformer;
    if (numbers == 0) continue;
    EXPECT_EQ(ratios[0], 1);
    EXPECT_EQ(ratios[1], 1);
    EXPECT_NEAR(ratios[2], third, 1e-9) << folder << " " << transformer << " " << height;
    EXPECT_NEAR(ratios.back(), last, 1e-9) << folder << " " << transformer << " " << height;
  }
}

TEST(WanFiles, ShareWhatTheReferencesFilesShare) {
  for (const WanFile& f : kFiles) {
    RunConfig c = RunConfig::load(path_of(f.name), {});
    EXPECT_EQ(c.layers.weights_dtype, "bfloat16");
    EXPECT_EQ(c.layers.activations_dtype, "bfloat16");
    EXPECT_EQ(c.layers.attention, "flash");
    EXPECT_TRUE(c.layers.scan_layers);
    EXPECT_EQ(c.encoders.text_encoder_dtype, "float32");
    EXPECT_EQ(c.mesh.ici_data_parallelism, 1);
    EXPECT_EQ(c.mesh.ici_context_parallelism, -1);
    EXPECT_EQ(c.mesh.dcn_data_parallelism, 1);
    EXPECT_EQ(c.mesh.dcn_context_parallelism, -1);
    EXPECT_TRUE(reads_encoded_records(c));
    EXPECT_EQ(c.batches.per_device_batch_size, 1);
    EXPECT_EQ(c.optim.learning_rate, 1e-5);
    EXPECT_EQ(c.optim.warmup_steps_fraction, 0.1);
    EXPECT_EQ(c.optim.max_train_steps, 1500);
    EXPECT_EQ(c.optim.optimizer_arg<double>("adam_weight_decay"), 0);
    EXPECT_EQ(c.profile.skip_first_n_steps_for_profiler, 5);
    EXPECT_EQ(c.profile.profiler_steps, 10);
    EXPECT_FALSE(c.loop.save_optimizer);
    EXPECT_FALSE(c.loop.save_final_checkpoint);
    EXPECT_FALSE(c.lora.enable_lora);
    EXPECT_GE(c.tfrecords.no_records_per_shard, 1);
  }
}

// Every key of the reference's files for Wan with the values of one of them, texts excluded.
constexpr const char* kOfTheReference = R"(
run_name: ''
metrics_file: ""
timing_metrics_file: ""
write_timing_metrics: True
write_metrics: True
gcs_metrics: False
save_config_to_gcs: False
log_period: 100
pretrained_model_name_or_path: 'Wan-AI/Wan2.1-T2V-14B-Diffusers'
model_name: wan2.1
model_type: 'T2V'
wan_transformer_pretrained_model_name_or_path: ''
unet_checkpoint: ''
revision: ''
weights_dtype: 'bfloat16'
activations_dtype: 'bfloat16'
text_encoder_dtype: 'float32'
compile_text_encoder: False
max_sequence_length: 512
vae_weights_dtype: 'float32'
vae_dtype: 'float32'
scheduler_dtype: 'float32'
replicate_vae: False
vae_decode_chunk: 1
vae_encode_chunk: 4
vae_spatial: -1
precision: "DEFAULT"
scan_layers: True
jit_initializers: True
norm_num_groups: 32
from_pt: True
converted_weights_dir: ''
pretrained_orbax_dir: ''
dropout: 0.0
split_head_dim: True
attention: 'flash'
mask_padding_tokens: True
attention_sharding_uniform: True
flash_min_seq_length: 4096
flash_block_sizes: {
  "block_q" : 512,
  "block_kv_compute" : 512,
  "block_kv" : 512,
  "use_fused_bwd_kernel": False,
}
use_base2_exp: True
use_experimental_scheduler: True
ulysses_shards: -1
ulysses_attention_chunks: 1
enable_tile_search: False
tile_search_mode: smart
tile_search_iters: 10
tile_search_out: ''
remat_policy: "NONE"
names_which_can_be_saved: []
names_which_can_be_offloaded: []
output_dir: 'sdxl-model-finetuned'
base_output_directory: ""
hardware: 'tpu'
skip_jax_distributed_system: False
mesh_axes: ['data', 'fsdp', 'context', 'tensor']
logical_axis_rules: [
                      ['batch', ['data', 'fsdp']],
                      ['activation_batch', ['data', 'fsdp']],
                      ['activation_self_attn_heads', ['context', 'tensor']],
                      ['activation_cross_attn_q_length', ['context', 'tensor']],
                      ['activation_length', 'context'],
                      ['activation_heads', 'tensor'],
                      ['mlp','tensor'],
                      ['embed', ['context', 'fsdp']],
                      ['heads', 'tensor'],
                      ['norm', 'tensor'],
                      ['conv_batch', ['data', 'context', 'fsdp']],
                      ['out_channels', 'tensor'],
                      ['conv_out', 'context'],
                    ]
vae_logical_axis_rules: [
                      ['activation_batch', 'redundant'],
                      ['activation_length', 'vae_spatial'],
                      ['activation_heads', null],
                      ['activation_kv_length', null],
                      ['embed', null],
                      ['heads', null],
                      ['norm', null],
                      ['conv_batch', 'redundant'],
                      ['out_channels', 'vae_spatial'],
                      ['conv_out', 'vae_spatial'],
                      ['conv_in', 'vae_spatial'],
                    ]
data_sharding: [['data', 'fsdp', 'context', 'tensor']]
dcn_data_parallelism: 1
dcn_fsdp_parallelism: 1
dcn_context_parallelism: -1
dcn_tensor_parallelism: 1
ici_data_parallelism: 1
ici_fsdp_parallelism: 1
ici_context_parallelism: -1
ici_tensor_parallelism: 1
allow_split_physical_axes: False
compile_topology_num_slices: -1
dataset_name: 'diffusers/pokemon-gpt4-captions'
train_split: 'train'
dataset_type: 'tfrecord'
cache_latents_text_encoder_outputs: True
load_tfrecord_cached: True
dataset_save_location: ''
train_data_dir: ''
dataset_config_name: ''
jax_cache_dir: ''
aot_cache_dir: ''
hf_data_dir: ''
hf_train_files: ''
hf_access_token: ''
image_column: 'image'
caption_column: 'text'
resolution: 1024
center_crop: False
random_flip: False
tokenize_captions_num_proc: 4
transform_images_num_proc: 4
reuse_example_batch: False
enable_data_shuffling: True
tfrecords_dir: ''
no_records_per_shard: 0
enable_eval_timesteps: False
timesteps_list: [125, 250, 375, 500, 625, 750, 875]
num_eval_samples: 420
checkpoint_every: -1
checkpoint_dir: ""
save_optimizer: False
save_final_checkpoint: False
enable_single_replica_ckpt_restoring: False
learning_rate: 1.e-5
scale_lr: False
max_train_samples: -1
max_train_steps: 1500
num_train_epochs: 1
seed: 0
per_device_batch_size: 1.0
global_batch_size: 0
learning_rate_schedule_steps: -1
warmup_steps_fraction: 0.1
disable_training_weights: False
snr_gamma: -1.0
timestep_bias: {
  strategy: "none",
  multiplier: 1.0,
  begin: 0,
  end: 1000,
  portion: 0.25
}
adam_b1: 0.9
adam_b2: 0.999
adam_eps: 1.e-8
adam_weight_decay: 0
opt_enable_grad_clipping: False
max_grad_value: 1.0
opt_enable_grad_global_norm_clipping: False
max_grad_norm: 1.0
train_text_encoder: False
text_encoder_learning_rate: 4.25e-6
enable_profiler: False
skip_first_n_steps_for_profiler: 5
profiler_steps: 10
enable_jax_named_scopes: False
enable_mllog: False
enable_ml_diagnostics: False
profiler_gcs_path: ""
enable_ondemand_xprof: False
prompt: "a boat"
prompt_2: "a boat"
negative_prompt: "blurred"
do_classifier_free_guidance: True
height: 720
width: 1280
num_frames: 81
guidance_scale: 5.0
guidance_scale_low: 3.0
guidance_scale_high: 4.0
boundary_ratio: 0.875
flow_shift: 5.0
guidance_rescale: 0.0
num_inference_steps: 50
fps: 16
image_url: "https://example.org/picture.jpg"
scan_diffusion_loop: False
use_batched_text_encoder: False
use_cfg_cache: False
use_kv_cache: False
use_magcache: False
magcache_thresh: 0.12
magcache_K: 2
retention_ratio: 0.2
mag_ratios_base: [1.0, 1.0, 1.02504, 1.03017]
mag_ratios_base_720p: [1.0, 1.0]
mag_ratios_base_480p: [1.0, 1.0]
use_sen_cache: False
diffusion_scheduler_config: {
  _class_name: 'FlaxEulerDiscreteScheduler',
  prediction_type: 'epsilon',
  rescale_zero_terminal_snr: False,
  timestep_spacing: 'trailing'
}
lightning_from_pt: True
lightning_repo: ""
lightning_ckpt: ""
enable_lora: False
lora_config: {
  rank: [64],
  lora_model_name_or_path: ["somebody/videos"],
  high_noise_weight_name: ["early.safetensors"],
  low_noise_weight_name: ["late.safetensors"],
  adapter_name: ["quick"],
  scale: [1.0],
  from_pt: []
}
controlnet_model_name_or_path: 'diffusers/controlnet-canny-sdxl-1.0'
controlnet_from_pt: True
controlnet_conditioning_scale: 0.5
controlnet_image: 'https://example.org/logo.png'
quantization: ''
quantization_local_shard_count: -1
use_qwix_quantization: False
weight_quantization_calibration_method: "absmax"
act_quantization_calibration_method: "absmax"
bwd_quantization_calibration_method: "absmax"
quantization_calibration_method: "absmax"
qwix_module_path: ".*"
eval_every: -1
eval_data_dir: ""
enable_generate_video_for_eval: False
eval_max_number_of_samples_in_bucket: 60
enable_ssim: False
)";

// S2-4
TEST(WanFiles, OfTheReferenceAreReadAsTheyAre) {
  const RunConfig c = RunConfig::from_source(ConfigSource::from_text(kOfTheReference));
  EXPECT_EQ(c.hardware.hardware, "tpu");
  EXPECT_EQ(c.step_cache.mag_ratios_base.size(), 4u);
  EXPECT_TRUE(chosen_loras(c.lora).empty());
  // The file's settings for noise-predicting models do not apply to a flow model.
  const std::string scheduler = R"({"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction",
    "use_flow_sigmas": true, "flow_shift": 3.0, "num_train_timesteps": 1000})";
  nlohmann::json expected = parse_json(scheduler);
  EXPECT_EQ(training_config(scheduler, c.scheduler), expected);
  expected["flow_shift"] = 5.0;
  EXPECT_EQ(sampling_config(scheduler, c.scheduler), expected);
  EXPECT_EQ(make_process(training_config(scheduler, c.scheduler), c.process)->timestep_dtype(), DType::f32);
}

// S2-59…63
TEST(WanFiles, SyntheticKeysAreThereAndMayBeNull) {
  const RunConfig c = RunConfig::load(
      path_of("base_wan_14b"),
      {"dataset_type=synthetic", "synthetic_num_samples=null", "synthetic_override_height=64",
       "synthetic_override_width=96", "synthetic_override_num_frames=9", "synthetic_override_max_sequence_length=null",
       "synthetic_override_text_embed_dim=4096", "synthetic_override_num_channels_latents=16",
       "synthetic_override_vae_scale_factor_spatial=8", "synthetic_override_vae_scale_factor_temporal=4"});
  EXPECT_EQ(c.source.synthetic_num_samples, std::nullopt);
  EXPECT_EQ(c.synthetic.synthetic_override_width, 96);
  EXPECT_EQ(c.synthetic.synthetic_override_max_sequence_length, std::nullopt);
}

}  // namespace
}  // namespace md
