// No key is silent: each key of a run, set to another value than its default, must change the program, the batch, the
// state or the files of a small run, or be named by a warning or error. `rows` lists for every key the value to set and
// the run in which it has an effect; then every key is set in every kind of run.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/run/encode_dataset.h"
#include "maxdiffusion/run/train_plan.h"
#include "maxdiffusion/run/write_media.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/";

// ---- runs

enum class Kind { images, lora, videos, generate, generate_video, tfrecords };

/// Log and results of a run.
struct Outcome {
  std::string log;    // warnings, without reasons for ignored keys, and the error
  std::string lines;  // everything logged
  std::map<std::string, std::string> made;
  bool failed = false;
};

class World {
 public:
  World() {
    ::setenv("XLA_FLAGS", "--xla_backend_optimization_level=0", 1);
    for (const char* name : {"images", "others", "masks", "repeated/2_heart", "classes/1_shape", "linked"})
      write_images(name);
    std::filesystem::create_directory_symlink("../others", t_ / "linked/others");
    write_file_atomic(t_ / "dataset.toml",
                      "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'others'\nshuffle_caption = true\n");
    HostArray clips(Shape{DType::f32, {3, 11, 40, 48, 3}});
    auto v = clips.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>((i * 7919 + i / 911) % 509) / 254.5f - 1;
    make_folders(t_ / "clips");
    write_media(t_ / "clips/", "mp4", clips, 16);
    for (int i = 0; i < 3; ++i) write_file_atomic(t_ / fmt::format("clips/{}.txt", i), "a red heart");
    make_folders(t_ / "embeddings");
    fs::copy(kGoldens + "inversion/dog.safetensors", t_ / "embeddings/dog.safetensors");
    HostArrays lora = SafetensorsReader::open(kGoldens + "pipelines/lora_peft.safetensors").tensors();
    lora["lora_unet_gate.lora_down.weight"] = lora.begin()->second;
    write_safetensors(t_ / "more.safetensors", lora);
    write_changed("pipelines/sd/unet");
    write_changed("pipelines/sd/vae");
    write_changed("wan/t2v/transformer");
  }
  const std::string& path() const { return t_.path(); }

 private:
  void write_images(const std::string& folder) {
    make_folders(t_ / folder);
    for (int i = 0; i < 6; ++i) {
      HostArray rgb(Shape{DType::u8, {16, i % 2 == 0 ? 16 : 28, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k)
        v[k] = static_cast<uint8_t>(41 * i + static_cast<int>(k % 48) * 5 + static_cast<int>(folder[0]));
      write_png(t_ / fmt::format("{}/{}.png", folder, i), rgb);
      write_file_atomic(t_ / fmt::format("{}/{}.txt", folder, i), fmt::format("heart {}", i));
    }
  }
  /// Writes a component with some changed weights.
  void write_changed(const std::string& component) {
    const std::string to = t_ / ("changed/" + component);
    make_folders(to);
    fs::copy(kGoldens + component, to, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    const std::string file = to + "/diffusion_pytorch_model.safetensors";
    std::string bytes = read_file(file);
    for (size_t i = 1; i <= 16; ++i) bytes[bytes.size() - i * (bytes.size() / 64) / 4 * 4 - 2] ^= 0x3f;
    write_file_atomic(file, bytes);
  }
  TemporaryFolder t_;
};

World& world() {
  static World w;
  return w;
}

Words base(Kind kind) {
  const bool video = kind == Kind::videos || kind == Kind::generate_video;
  Words w = {"run_name=run",
             "output_dir={out}",
             "activations_dtype=float32",
             "pretrained_model_name_or_path=" + kGoldens + (video ? "wan/t2v" : "pipelines/sd"),
             "diffusion_scheduler_config=" + std::string(video ? "{}" : "{_class_name: DDIMScheduler}"),
             "resolution=16"};
  auto add = [&](const Words& extra) { w.insert(w.end(), extra.begin(), extra.end()); };
  if (video) add({"max_sequence_length=12", "height=32", "width=48", "num_frames=9"});
  if (kind == Kind::generate || kind == Kind::generate_video)
    add({"prompt=a (heart)", "num_inference_steps=2", "num_images_per_prompt=1", "output_type=np"});
  else
    add({"train_data_dir={world}/" + std::string(video ? "clips" : "images")});
  if (kind == Kind::images || kind == Kind::lora || kind == Kind::videos) {
    const int batch = video ? 1 : 2;
    add({"max_train_steps=3", "learning_rate=1e-2", fmt::format("per_device_batch_size={}", batch),
         fmt::format("checkpoint_every={}", 2 * batch)});
  }
  if (kind == Kind::lora) add({"train_lora=true"});
  if (kind == Kind::tfrecords) add({"tfrecords_dir={out}/records"});
  return w;
}

const char* command_of(Kind kind) {
  return kind == Kind::tfrecords                                  ? "prepare_tfrecords"
         : kind == Kind::generate || kind == Kind::generate_video ? "generate"
                                                                  : "train";
}

Words filled(Words words, const std::string& out) {
  for (std::string& w : words)
    for (const auto& [mark, path] :
         std::map<std::string, std::string>{{"{out}", out}, {"{world}", world().path()}, {"{goldens}/", kGoldens}})
      for (size_t at; (at = w.find(mark)) != w.npos;) w.replace(at, mark.size(), path);
  return words;
}

/// Calls `body` with the config of these words; returns what it logs and whether it fails.
Outcome watched(Kind kind, const Words& words, const std::string& out,
                const std::function<void(const RunConfig&, Outcome&)>& body) {
  Outcome o;
  std::mutex mutex;
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  std::string error;
  try {
    Words all = base(kind);
    all.insert(all.end(), words.begin(), words.end());
    RunConfig c = RunConfig::from_source(ConfigSource::from_text("", filled(all, out)));
    c.compile.uses = [&](const std::string& program) {
      const std::lock_guard lock(mutex);
      o.made["program " + program];
    };
    body(c, o);
  } catch (const Error& e) {
    o.failed = true;
    error = e.what();
  }
  testing::internal::GetCapturedStdout();
  o.lines = testing::internal::GetCapturedStderr() + error;
  std::istringstream in(o.lines);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("W ")) o.log += line.substr(0, line.find("ignored")) + "\n";
  o.log += error;
  return o;
}

/// The programs of a run that is only planned; `trace` false: no programs, only what is logged before.
Outcome planned(Kind kind, const Words& words, bool trace) {
  const TemporaryFolder out;
  return watched(kind, words, out.path(), [&](const RunConfig& c, Outcome& o) {
    const std::string command = command_of(kind);
    const bool samples = command == "generate";
    TrainingRequest r = training_request(c);
    r.components.model.purpose = samples ? Purpose::sampling : Purpose::training;
    const ModelComponents m(r.components);
    r.rules.warn_of_ignored(m.opened(), command);
    if (!trace) return;
    const GraphOptions placed = m.devices().graph_options(&m.devices().rules());
    if (samples) {
      const SampleOptions options = planned_sampling(m, r.sampling, m.devices().mesh().devices());
      for (const SamplingGraph& g : sampling_graphs(*m.family(), options, placed))
        o.made[g.denoiser] = to_stablehlo(*g.graph, "denoise");
    } else if (command == "train") {
      const TrainPlan plan = plan_training(r, m);
      for (const DenoiseTask& task : plan.tasks) {
        const StepGraph g = trace_step(task, placed, plan.loop.step);
        o.made[task.model()] = to_stablehlo(*g.graph, "train");
      }
    }
  });
}

Outcome opened(Kind kind, const Words& words) { return planned(kind, words, false); }
Outcome traced(Kind kind, const Words& words) { return planned(kind, words, true); }

/// The contents of a file without timestamps and speeds.
std::string content_of(const std::string& path) {
  if (path.ends_with("config.yml") || path.find("tfevents") != path.npos || path.ends_with("lora_kohya.safetensors"))
    return "";  // contain keys or times
  std::string text = read_file(path);
  if (path.ends_with(".tfrec")) return std::to_string(text.size());  // members have no fixed order
  if (path.ends_with(".safetensors") || path.ends_with(".png") || path.ends_with(".mp4")) return text;
  static const std::regex measured(
      R"re("?(step_time_seconds|samples_per_second|host_memory_bytes|device_peak_memory_bytes|per_device_tflops\w*|mfu|perf/\w+|time)"?: ?[-+0-9.e]+)re");
  text = std::regex_replace(text, measured, "");
  if (path.ends_with("timing.txt")) text = std::to_string(std::ranges::count(text, '\n'));
  return text;
}

/// The files of a run.
Outcome done(Kind kind, const Words& words) {
  const TemporaryFolder out;
  Outcome o = watched(kind, words, out.path(), [&](const RunConfig& c, Outcome&) {
    const std::string command = command_of(kind);
    if (command == "train") train(training_request(c));
    if (command == "generate") generate(generate_request(c));
    if (command == "prepare_tfrecords") prepare_tfrecords(training_request(c));
  });
  static const std::regex number("[0-9]{6,}[^/]*");
  for (const auto& f : fs::recursive_directory_iterator(out.path())) {
    if (!f.is_regular_file() || f.path().filename().string().starts_with('.')) continue;
    const std::string name = f.path().string().substr(out.path().size());
    if (name.find("/cache/used/") != name.npos) continue;  // holds the run's folder, which is another one each time
    const bool times = name.find("tfevents") != name.npos || name.find("/profile/") != name.npos;
    o.made[times ? std::regex_replace(name, number, "") : name] = content_of(f.path());
  }
  return o;
}

/// Caches results, so that runs without the key are done once.
const Outcome& known(Outcome (*how)(Kind, const Words&), Kind kind, const Words& words) {
  static std::map<std::tuple<void*, Kind, Words>, Outcome> all;
  auto [at, fresh] = all.try_emplace({reinterpret_cast<void*>(how), kind, words});
  if (fresh) at->second = how(kind, words);
  return at->second;
}

bool names(const std::string& log, const std::string& key) {
  auto letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  for (size_t at = 0; (at = log.find(key, at)) != log.npos; ++at)
    if ((at == 0 || !letter(log[at - 1])) && (at + key.size() == log.size() || !letter(log[at + key.size()])))
      return true;
  return false;
}

enum class Effect { none, named, acts, fails };

/// The effect of a key in a run that already has the words `with`.
Effect effect(Kind kind, const Words& with, const std::string& key, const std::string& value, std::string& log) {
  Words changed = with;
  changed.push_back(key + "=" + value);
  for (auto how : {opened, traced, done}) {
    const Outcome& before = known(how, kind, with);
    const Outcome after = how(kind, changed);
    log = after.lines;
    // A message may name the file or folder instead of its key.
    static const std::regex place(R"([\w.]+\.\w+|\w+/\w+(?=$))");
    std::smatch name;
    const bool reported = after.failed && !before.failed && value.starts_with('{') &&
                          std::regex_search(value, name, place) && after.log.find(name.str()) != after.log.npos;
    if (reported || (names(after.log, key) && !names(before.log, key))) return Effect::named;
    if (after.failed && !before.failed) return Effect::fails;
    if (after.made != before.made) return Effect::acts;
  }
  return Effect::none;
}

// ---- keys

/// How the test shows that a key is read.
struct Row {
  const char* key;
  std::string value;  // not its default
  Kind kind = Kind::images;
  Words with = {};        // keys that make it effective
  std::string says = {};  // the message, for a key that only has an effect together with `with`
};

void PrintTo(const Row& row, std::ostream* os) { *os << row.key; }

const std::string kNamed = "*";  // no run here uses the key: a message names it
const std::string kPace = "!";   // only affects timing: threads and prefetch
const Words kSamples = {"prompt=heart", "sample_every=-1", "num_inference_steps=2"};
const Words kEvaluates = {"eval_every=1", "eval_data_dir={world}/others"};
const Words kTwo = {"cpu_device_count=2", "per_device_batch_size=1"};
const Words kBuckets = {"enable_bucket=true", "resolution=32",       "min_bucket_reso=16",
                        "max_bucket_reso=64", "bucket_reso_steps=8", "per_device_batch_size=1"};
const Words kSdxl = {"pretrained_model_name_or_path={goldens}/pipelines/sdxl"};
const Words kAutoencoder = {"train_new_vae=true", "vae_max_train_steps=1", "vae_per_device_batch_size=2"};
const Words kMade = {"dataset_type=synthetic", "train_data_dir=", "synthetic_num_samples=4"};
const Words kDreams = {"instance_data_dir={world}/images", "class_data_dir={world}/others", "instance_prompt=a heart",
                       "class_prompt=heart", "num_class_images=6"};
const Words kInt8 = {"use_qwix_quantization=true", "quantization=int8"};
const Words kFp8 = {"use_qwix_quantization=true", "quantization=fp8_full"};
const Words kFlux = {"pretrained_model_name_or_path={goldens}/flux/dev", "diffusion_scheduler_config={}",
                     "max_sequence_length=12"};
const Words kFlux2 = {"pretrained_model_name_or_path={goldens}/flux2/base", "diffusion_scheduler_config={}",
                      "text_encoder_out_layers=[1, 2, 3]"};
const Words kQwenEdit = {"pretrained_model_name_or_path={goldens}/qwenimage_edit/edit", "diffusion_scheduler_config={}",
                         "reference_resolution=32", "image={world}/images/0.png"};
const Words kMagCache = {"use_magcache=true",   "num_inference_steps=4", "guidance_scale=3",
                         "retention_ratio=0.1", "magcache_thresh=1",     "mag_ratios_base=1,1,1,1,1,1,1,1"};
const Words kI2v = {"pretrained_model_name_or_path={goldens}/wan/i2v", "max_sequence_length=512"};
const Words kInversion = {"placeholder_token=<new>", "initializer_token=red"};
const Words kIpAdapter = {"ip_adapter={goldens}/adapters/sd_ip", "ip_adapter_image={world}/images/0.png"};
const Words kT2iAdapter = {"t2i_adapter={goldens}/adapters/sd_t2i", "t2i_adapter_image={world}/images/0.png"};
const Words kControl = {"controlnet_model_name_or_path={goldens}/pipelines/controlnet",
                        "controlnet_image={world}/images/0.png"};
const Words kMasked = {"image={world}/images/0.png", "mask_image={world}/images/1.png"};
Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::vector<Row>& rows() {
  static const std::vector<Row> all = {
      // The run.
      {"run_name", "other"},
      {"output_dir", "{out}/elsewhere"},
      {"base_output_directory", "{out}/base", Kind::images, {"output_dir="}},
      {"save_config_to_gcs", "true", Kind::images, {"base_output_directory={out}/base"}},
      {"seed", "1"},
      {"sample_every", "1", Kind::images, kSamples},
      {"enable_generate_video_for_eval", "true", Kind::images, kSamples + kEvaluates},
      {"enable_ssim", "true", Kind::images, kSamples, "SSIM score after training"},
      {"timing_metrics_file", "{out}/timing.txt"},
      {"check_dir", "{out}/look", Kind::images, {}, kNamed},
      {"write_timing_metrics", "false", Kind::images, {"timing_metrics_file={out}/timing.txt"}},
      {"hardware", "gpu", Kind::images, {}, kNamed},
      {"plugin", "/nowhere/plugin.so", Kind::images, {}, kNamed},
      {"cpu_device_count", "2"},
      {"compile_target", "sampling", Kind::images, {}, kNamed},
      {"topology", "v5p:2x2x1", Kind::images, {}, kNamed},
      {"gpu_type", "h100", Kind::images, {}, kNamed},
      {"compile_topology_num_slices", "2", Kind::images, {}, kNamed},
      // Devices.
      {"mesh_axes", "[data,fsdp,context]", Kind::images, {"cpu_device_count=2", "ici_tensor_parallelism=2"}, kNamed},
      {"ici_data_parallelism", "2", Kind::images, {}, kNamed},
      {"ici_fsdp_parallelism", "2", Kind::images, kTwo},
      {"ici_fsdp_batch_parallelism", "2", Kind::images, kTwo},
      {"ici_context_parallelism", "2", Kind::images, kTwo},
      {"ici_tensor_parallelism", "2", Kind::images, kTwo},
      {"dcn_data_parallelism", "2", Kind::images, {}, kNamed},
      {"dcn_fsdp_parallelism", "2", Kind::images, {}, kNamed},
      {"dcn_fsdp_batch_parallelism", "2", Kind::images, {}, kNamed},
      {"dcn_context_parallelism", "2", Kind::images, {}, kNamed},
      {"dcn_tensor_parallelism", "2", Kind::images, {}, kNamed},
      {"allow_split_physical_axes", "true", Kind::images, {}, kNamed},
      {"logical_axis_rules", "[['conv_out', 'fsdp']]", Kind::images, kTwo + Words{"ici_fsdp_parallelism=2"}},
      {"data_sharding", "[['fsdp']]", Kind::images, kTwo + Words{"logical_axis_rules=[['conv_out', 'fsdp']]"}},
      {"attention_sharding_uniform", "false", Kind::images, kTwo + Words{"ici_context_parallelism=2"}},
      // Models.
      {"pretrained_model_name_or_path", "{goldens}/pipelines/sd2"},
      {"single_file_config", "{goldens}/pipelines/sd", Kind::images, {}, kNamed},
      {"variant", "fp16", Kind::images, {}, kNamed},
      {"vae_file", "{world}/changed/pipelines/sd/vae"},
      {"model_name", "wan2.1", Kind::images, {}, kNamed},
      {"flux_name", "flux-dev", Kind::images, {}, kNamed},
      {"clip_model_name_or_path", "{goldens}/pipelines/sd2/text_encoder"},
      {"t5xxl_model_name_or_path", "/nowhere", Kind::images, {}, kNamed},
      {"model_type", "I2V", Kind::images, {}, kNamed},
      {"revision", "other", Kind::images, {}, kNamed},
      {"clip_bpe_file", "/nowhere.txt", Kind::images, {}, kNamed},
      {"unet_checkpoint", "{world}/changed/pipelines/sd/unet"},
      {"wan_transformer_pretrained_model_name_or_path", "{world}/changed/wan/t2v/transformer", Kind::videos},
      {"max_sequence_length", "16", Kind::videos},
      {"reference_resolution", "64", Kind::generate, kQwenEdit},
      {"text_encoder_out_layers", "[3, 2, 1]", Kind::generate, kFlux2},
      {"train_expert", "high", Kind::images, {}, kNamed},
      {"lightning_repo",
       "{world}/changed/pipelines/sd/unet",
       Kind::images,
       {"lightning_ckpt=diffusion_pytorch_model.safetensors"}},
      {"lightning_ckpt", "other.safetensors", Kind::images, {}, kNamed},
      {"train_new_unet", "true"},
      {"train_new_flux", "true"},
      {"train_new_vae", "true", Kind::images, {"vae_max_train_steps=1", "vae_per_device_batch_size=2"}},
      {"random_text_encoder", "true"},
      // Layers.
      {"weights_dtype", "bfloat16"},
      {"activations_dtype", "bfloat16"},
      {"precision", "HIGHEST"},
      {"attention", "ring", Kind::images, kTwo + Words{"ici_context_parallelism=2"}},
      {"remat_policy", "FULL"},
      {"names_which_can_be_saved", "[attn_output]", Kind::images, {"remat_policy=CUSTOM"}},
      {"names_which_can_be_offloaded", "[attn_output]", Kind::images, {"remat_policy=CUSTOM"}},
      {"scan_layers", "true", Kind::videos},
      {"flash_min_seq_length", "0", Kind::images, {"attention=flash"}, kNamed},
      {"flash_block_sizes", "{block_q: 16}", Kind::images, {"attention=flash"}, kNamed},
      {"enable_tile_search", "true", Kind::images, {"attention=flash"}, kNamed},
      {"tile_search_mode", "full", Kind::images, {}, kNamed},
      {"tile_search_iters", "1", Kind::images, {}, kNamed},
      {"tile_search_out", "{out}/tiles", Kind::images, {}, kNamed},
      {"use_qwix_quantization", "true", Kind::images, {"quantization=int8"}},
      {"quantization", "int8", Kind::images, {"use_qwix_quantization=true"}},
      {"base_weights_dtype", "int8", Kind::images, {"train_lora=true", "lora_rank=2"}},
      {"base_quantization_skip",
       "[attn1]",
       Kind::images,
       {"train_lora=true", "lora_rank=2", "base_weights_dtype=int8"}},
      {"text_encoder_base_weights_dtype", "int8"},
      {"blocks_to_swap", "1", Kind::videos, {"train_lora=true", "lora_rank=2", "scan_layers=true"}, kNamed},
      {"qwix_module_path", "down_blocks.*", Kind::images, kInt8},
      {"quantization_calibration_method", "rms,3", Kind::images, kFp8},
      {"weight_quantization_calibration_method", "rms,3", Kind::images, kFp8},
      {"act_quantization_calibration_method", "rms,3", Kind::images, kFp8},
      {"bwd_quantization_calibration_method", "rms,3", Kind::images, kFp8},
      {"quantization_local_shard_count", "2", Kind::images, {}, kNamed},
      {"dropout", "0.1"},
      // Data.
      {"dataset_type", "synthetic", Kind::images, {"synthetic_num_samples=4"}},
      {"dataset_name", "{world}/others", Kind::images, {"train_data_dir="}},
      {"train_data_dir", "{world}/others"},
      {"follow_links", "true", Kind::images, {"train_data_dir={world}/linked"}},
      {"hf_train_files",
       "{goldens}/data/files/plain.parquet",
       Kind::images,
       {"train_data_dir=", "image_column=picture", "caption_column=captions"}},
      {"hf_data_dir", "{world}/others", Kind::images, {"train_data_dir="}},
      {"grain_train_files", "/nowhere.array_record", Kind::images, {}, kNamed},
      {"dataset_config", "{world}/dataset.toml", Kind::images, {"train_data_dir="}},
      {"reg_data_dir", "{world}/classes", Kind::images, {"train_data_dir=", "dataset_config={world}/repeated"}},
      {"train_split", "test", Kind::images, {}, kNamed},
      {"image_column",
       "picture",
       Kind::images,
       {"train_data_dir={goldens}/data/files/plain.parquet", "caption_column=captions"}},
      {"caption_column",
       "captions",
       Kind::images,
       {"train_data_dir={goldens}/data/files/plain.parquet", "image_column=picture"}},
      {"cond_image_column", "source", Kind::images, {}, kNamed},
      {"conditioning_data_dir", "{world}/masks", Kind::images, {"masked_loss=true"}},
      {"max_train_samples", "3"},
      {"synthetic_num_samples", "3", Kind::images, kMade},
      {"load_tfrecord_cached",
       "false",
       Kind::images,
       {"dataset_type=tfrecord", "train_data_dir={goldens}/data/files/pictures.tfrecord"}},
      {"resolution", "32"},
      {"center_crop", "true"},
      {"random_crop", "true", Kind::images, {"cache_latents_text_encoder_outputs=false"}},
      {"random_flip", "true"},
      {"enable_bucket",
       "true",
       Kind::images,
       {"resolution=32", "min_bucket_reso=16", "max_bucket_reso=64", "bucket_reso_steps=8", "per_device_batch_size=1"}},
      {"min_bucket_reso", "32", Kind::images, kBuckets},
      {"max_bucket_reso", "32", Kind::images, kBuckets},
      {"bucket_reso_steps", "16", Kind::images, kBuckets},
      {"bucket_no_upscale", "true", Kind::images, kBuckets},
      {"frame_buckets", "[5]", Kind::videos},
      {"original_size_conditioning", "true", Kind::images, kSdxl},
      {"alpha_mask", "true"},
      {"unmasked_weight", "0.9", Kind::images, {"masked_loss=true", "conditioning_data_dir={world}/masks"}},
      {"per_device_batch_size", "4"},
      {"global_batch_size", "3"},
      {"grain_worker_count", "1", Kind::images, {}, kPace},
      {"enable_data_shuffling", "false"},
      {"dataset_save_location", "{out}/cache"},
      {"synthetic_override_height", "32", Kind::images, kMade},
      {"synthetic_override_width", "32", Kind::images, kMade},
      {"synthetic_override_num_frames", "5", Kind::videos, kMade},
      {"synthetic_override_max_sequence_length", "5", Kind::images, kMade},
      {"synthetic_override_text_embed_dim", "5", Kind::images, kMade, kNamed},
      {"synthetic_override_num_channels_latents", "5", Kind::images, kMade, kNamed},
      {"synthetic_override_vae_scale_factor_spatial", "5", Kind::images, kMade, kNamed},
      {"synthetic_override_vae_scale_factor_temporal", "5", Kind::videos, kMade, kNamed},
      {"tfrecords_dir", "{out}/other", Kind::tfrecords},
      {"no_records_per_shard", "2", Kind::tfrecords},
      {"enable_eval_timesteps", "true", Kind::tfrecords, {"num_eval_samples=6", "timesteps_list=[1, 500]"}},
      {"num_eval_samples",
       "4",
       Kind::tfrecords,
       {"enable_eval_timesteps=true", "timesteps_list=[1, 500]", "num_eval_samples=6"}},
      {"data_files_pattern", "{goldens}/data/files/shard-00000*.tar", Kind::tfrecords},
      {"extracted_files_dir", "/tmp", Kind::tfrecords, {}, kNamed},
      // Only downloads send it: HubTest.TheTokenGoesToTheHubOnly.
      {"hf_access_token", "secret", Kind::images, {}, kPace},
      // DreamBooth.
      {"instance_data_dir", "{world}/others", Kind::images, kDreams},
      {"class_data_dir", "{world}/images", Kind::images, kDreams},
      {"instance_prompt", "a sks heart", Kind::images, kDreams},
      {"class_prompt", "hearts", Kind::images, kDreams},
      {"prior_loss_weight", "0.5", Kind::images, kDreams},
      {"num_class_images", "3", Kind::images, kDreams + Words{"class_data_dir={out}/class", "num_inference_steps=2"}},
      {"cache_dreambooth_dataset", "true", Kind::images, {}, kNamed},
      // Noise.
      {"prediction_type", "v_prediction"},
      {"timestep_lookup", "reference_table", Kind::videos},
      {"scheduler", "euler", Kind::generate, {"diffusion_scheduler_config={}"}},
      {"sigma_schedule", "simple", Kind::generate, {"diffusion_scheduler_config={}", "scheduler=euler"}},
      {"flow_shift", "5", Kind::generate_video},
      {"time_shift", "false", Kind::generate, kFlux},
      {"base_shift", "0.7", Kind::generate, kFlux},
      {"max_shift", "2", Kind::generate, kFlux},
      {"diffusion_scheduler_config", "{_class_name: DDIMScheduler, beta_end: 0.02}"},
      {"snr_gamma", "5"},
      {"debiased_estimation_loss", "true"},
      {"scale_v_pred_loss_like_noise_pred", "true", Kind::images, {"prediction_type=v_prediction"}},
      {"timestep_bias", "{strategy: later, multiplier: 2, portion: 0.5}"},
      {"min_timestep", "500"},
      {"max_timestep", "500", Kind::videos},
      {"timestep_sampling", "logit_normal", Kind::videos},
      {"logit_mean", "0.5", Kind::videos, {"timestep_sampling=logit_normal"}},
      {"logit_std", "0.5", Kind::videos, {"timestep_sampling=logit_normal"}},
      {"mode_scale", "0.5", Kind::videos, {"timestep_sampling=mode"}},
      {"sigmoid_scale", "0.5", Kind::videos, {"timestep_sampling=flux_shift"}},
      {"weighting_scheme", "cosmap", Kind::videos},
      {"train_flow_shift", "5", Kind::videos},
      {"disable_training_weights", "true", Kind::videos},
      {"noise_offset", "0.1"},
      {"input_perturbation", "0.1"},
      {"multires_noise_iterations", "3"},
      {"multires_noise_discount", "0.8", Kind::images, {"multires_noise_iterations=3"}},
      {"loss_type", "l1"},
      {"huber_c", "0.5", Kind::images, {"loss_type=huber"}},
      {"huber_schedule", "constant", Kind::images, {"loss_type=smooth_l1"}},
      {"huber_scale", "0.5", Kind::images, {"loss_type=huber", "huber_schedule=exponential"}},
      {"contrastive_flow_matching", "true", Kind::images, {"prediction_type=v_prediction"}},
      {"cfm_lambda", "0.5", Kind::images, {"prediction_type=v_prediction", "contrastive_flow_matching=true"}},
      {"caption_dropout", "0.5"},
      {"train_text_encoder", "true", Kind::images, {"cache_latents_text_encoder_outputs=false"}},
      {"cache_latents_text_encoder_outputs", "false"},
      {"masked_loss", "true", Kind::images, {"conditioning_data_dir={world}/masks"}},
      {"replay_batches", "{goldens}/training/batches_sd.safetensors"},
      // The autoencoder.
      {"vae_max_train_steps", "2", Kind::images, kAutoencoder},
      {"vae_image_pretrain_steps", "1", Kind::videos, kAutoencoder + Words{"vae_per_device_batch_size=1"}},
      {"vae_learning_rate", "1e-2", Kind::images, kAutoencoder},
      {"vae_kl_weight", "1e-2", Kind::images, kAutoencoder},
      {"vae_per_device_batch_size", "1", Kind::images, kAutoencoder},
      {"text_encoder_dtype", "bfloat16"},
      {"vae_dtype", "bfloat16"},
      {"vae_weights_dtype", "bfloat16", Kind::images, {"vae_file={world}/changed/pipelines/sd/vae"}},
      {"replicate_vae",
       "true",
       Kind::generate_video,
       {"cpu_device_count=2", "ici_fsdp_parallelism=2", "logical_axis_rules=[['conv_out', 'fsdp']]"}},
      {"encoder_batch_size", "1"},
      {"vae_encode_chunk", "8", Kind::videos},
      {"vae_decode_chunk", "-1", Kind::generate_video},
      // Textual inversion.
      {"embeddings", "{goldens}/inversion/cat.safetensors", Kind::generate, {"prompt=a <cat>"}},
      {"embedding_tokens", "heart", Kind::generate, {"embeddings={goldens}/inversion/cat.safetensors", "prompt=heart"}},
      {"embeddings_dir", "{world}/embeddings", Kind::generate, {"prompt=a <dog>"}},
      {"placeholder_token", "<new>", Kind::images, {"initializer_token=red"}},
      {"initializer_token", "heart", Kind::images, {"placeholder_token=<new>"}},
      {"num_vectors", "2", Kind::images, kInversion},
      {"learnable_property", "style", Kind::images, kInversion},
      {"repeats", "2", Kind::images, kInversion},
      // LoRA.
      {"train_lora", "true"},
      {"lora_rank", "2", Kind::lora},
      {"lora_alpha", "2", Kind::lora},
      {"lora_target_modules", "[to_q]", Kind::lora},
      {"adapter", "loha", Kind::lora},
      {"use_rslora", "true", Kind::lora},
      {"rank_pattern", "{to_q: 2}", Kind::lora},
      {"alpha_pattern", "{to_q: 2}", Kind::lora},
      {"conv_dim", "2", Kind::lora},
      {"conv_alpha", "1", Kind::lora, {"conv_dim=2"}},
      {"lora_dropout", "0.5", Kind::lora},
      {"rank_dropout", "0.5", Kind::lora},
      {"module_dropout", "0.5", Kind::lora},
      {"decompose_factor", "2", Kind::lora, {"adapter=lokr"}},
      {"decompose_both", "true", Kind::lora, {"adapter=lokr", "lora_rank=1"}},
      {"feedforward_modules", "[to_q]", Kind::lora, {"adapter=ia3"}},
      {"lora_init", "{goldens}/pipelines/lora_peft.safetensors", Kind::lora, kSdxl, kNamed},
      {"lora_files", "{goldens}/pipelines/lora_peft.safetensors", Kind::generate, kSdxl},
      {"lora_scales", "0.5", Kind::generate, kSdxl + Words{"lora_files={goldens}/pipelines/lora_peft.safetensors"}},
      {"lora_text_scales", "0.5", Kind::generate,
       kSdxl + Words{"lora_files={goldens}/pipelines/lora_peft.safetensors"}},
      {"lora_block_weights", "NONE", Kind::generate,
       kSdxl + Words{"lora_files={goldens}/pipelines/lora_peft.safetensors"}},
      {"lora_missing_keys", "warn", Kind::generate, kSdxl + Words{"lora_files={world}/more.safetensors"}},
      {"lora_steps", "1-", Kind::generate, kSdxl + Words{"lora_files={goldens}/pipelines/lora_peft.safetensors"}},
      {"lora_config", "{lora_model_name_or_path: [{goldens}/pipelines], weight_name: [lora_peft.safetensors]}",
       Kind::generate, kSdxl},
      {"enable_lora", "false", Kind::generate,
       kSdxl +
           Words{"lora_config={lora_model_name_or_path: [{goldens}/pipelines], weight_name: [lora_peft.safetensors]}"}},
      // Updates.
      {"learning_rate", "2e-3"},
      {"scale_lr", "true"},
      {"max_train_steps", "4"},
      {"learning_rate_schedule_steps", "30"},
      {"warmup_steps_fraction", "0.5"},
      {"lr_scheduler", "cosine"},
      {"lr_num_cycles", "2", Kind::images, {"lr_scheduler=cosine_with_restarts"}},
      {"lr_power", "2", Kind::images, {"lr_scheduler=polynomial"}},
      {"lr_warmup_steps", "7"},
      {"lr_decay_steps", "3", Kind::images, {"lr_scheduler=warmup_stable_decay", "lr_warmup_steps=0"}},
      {"lr_scheduler_min_lr_ratio", "0.1", Kind::images, {"lr_scheduler=rex"}},
      {"optimizer", "sgd"},
      {"optimizer_args", "weight_decay=0.2"},
      {"unet_lr", "3e-3"},
      {"network_reg_lrs", "[conv_in=0.1]"},
      {"loraplus_lr_ratio", "16", Kind::lora},
      {"frozen_layers", "conv_in"},
      {"sgd_momentum", "0.5", Kind::images, {"optimizer=sgd"}},
      {"sgd_nesterov", "true", Kind::images, {"optimizer=sgd"}},
      {"sgd_weight_decay", "0.1", Kind::images, {"optimizer=sgd"}},
      {"adam_b1", "0.8"},
      {"adam_b2", "0.9"},
      {"adam_eps", "1e-4"},
      {"adam_weight_decay", "0.1"},
      {"max_grad_norm", "0.1"},
      {"max_grad_value", "0.1", Kind::images, {"opt_enable_grad_clipping=true"}},
      {"opt_enable_grad_clipping", "true"},
      {"opt_enable_grad_global_norm_clipping", "true", Kind::images, kSdxl},
      {"low_precision_update", "round_to_nearest", Kind::images, {"weights_dtype=bfloat16"}},
      {"moments_dtype", "bfloat16"},
      {"ema_decay", "0.9"},
      {"text_encoder_learning_rate",
       "1e-3",
       Kind::images,
       {"train_text_encoder=true", "cache_latents_text_encoder_outputs=false"}},
      {"gradient_accumulation_steps", "2"},
      // The loop.
      {"checkpoint_every", "1"},
      {"checkpoints_to_keep", "1"},
      {"checkpoint_dir", "{out}/elsewhere"},
      {"save_final_checkpoint", "false", Kind::images, {"checkpoint_every=-1"}},
      {"save_optimizer", "false"},
      {"enable_single_replica_ckpt_restoring", "true", Kind::images, {}, kNamed},
      {"prefetch_depth", "1", Kind::images, {}, kPace},
      {"reuse_example_batch", "true"},
      {"log_sharding", "true", Kind::images, {}, "unet/conv_in.weight"},
      {"num_train_epochs", "2", Kind::images, {"max_train_steps=-1"}},
      {"eval_every", "1", Kind::images, {"eval_data_dir={world}/others"}},
      {"eval_data_dir", "{world}/images", Kind::images, kEvaluates},
      {"timesteps_list", "[1, 900]", Kind::images, kEvaluates},
      {"eval_max_number_of_samples_in_bucket", "1", Kind::images, kEvaluates},
      {"eval_seed", "1", Kind::images, kEvaluates},
      {"metrics_file", "{out}/metrics.jsonl"},
      {"write_metrics", "false"},
      {"gcs_metrics", "true"},
      {"log_period", "1", Kind::images, {}, "completed step:"},
      {"enable_profiler",
       "true",
       Kind::images,
       {"plugin=" MD_BINARY_DIR "/test_plugins/profiling.so", "skip_first_n_steps_for_profiler=0"}},
      {"skip_first_n_steps_for_profiler",
       "0",
       Kind::images,
       {"plugin=" MD_BINARY_DIR "/test_plugins/profiling.so", "enable_profiler=true"},
       "profile of steps 1 to"},
      {"profiler_steps",
       "1",
       Kind::images,
       {"plugin=" MD_BINARY_DIR "/test_plugins/profiling.so", "enable_profiler=true",
        "skip_first_n_steps_for_profiler=0"},
       "profile of steps 1 to 1"},
      // Samples.
      {"prompt", "a red heart", Kind::generate},
      {"negative_prompt", "grey", Kind::generate},
      {"negative_prompt_2", "grey", Kind::generate, kSdxl + Words{"negative_prompt=red"}},
      {"prompt_2", "grey", Kind::generate, kSdxl},
      {"do_classifier_free_guidance", "false", Kind::generate},
      {"guidance_scale", "3", Kind::generate},
      {"true_cfg_scale", "3", Kind::generate, kFlux},
      {"guidance_scale_high", "3", Kind::generate_video, {"pretrained_model_name_or_path={goldens}/wan/a14b"}},
      {"guidance_scale_low", "3", Kind::generate_video, {"pretrained_model_name_or_path={goldens}/wan/a14b"}},
      {"boundary_ratio", "0.1", Kind::generate_video, {"pretrained_model_name_or_path={goldens}/wan/a14b"}},
      {"guidance_rescale", "0.5", Kind::generate},
      {"cfg_normalization", "0.5", Kind::generate},
      {"cfg_truncation", "0.2", Kind::generate},
      {"only_image", "1", Kind::generate, {"num_images_per_prompt=2"}},
      {"prompt_syntax", "a1111", Kind::generate},
      {"dynamic_prompts", "true", Kind::generate, {"prompt=a {heart|red heart}"}},
      {"wildcards_dir", "{world}/images", Kind::generate, {"prompt=a __4__", "dynamic_prompts=true"}},
      {"prompt_file", "{world}/images/4.txt", Kind::generate},
      {"lora_dir", "{world}/images", Kind::generate, {}, kNamed},
      {"xy", "steps:2,3", Kind::generate},
      {"guidance_method", "apg", Kind::generate},
      {"guidance_interval", "[0, 0.5]", Kind::generate},
      {"apg_eta", "0.5", Kind::generate, {"guidance_method=apg"}},
      {"apg_norm_threshold", "0.01", Kind::generate, {"guidance_method=apg"}},
      {"apg_momentum", "-0.5", Kind::generate, {"guidance_method=apg", "apg_norm_threshold=0"}},
      {"cfg_zero_init_steps", "0", Kind::generate, {"guidance_method=cfg_zero"}},
      {"cfg_pp_lambda", "0.9", Kind::generate, {"guidance_method=cfg_pp", "scheduler=euler"}},
      {"pag_scale", "3", Kind::generate},
      {"pag_adaptive_scale", "0.01", Kind::generate, {"pag_scale=3"}},
      {"pag_applied_layers", "[attn1]", Kind::generate, {"pag_scale=3"}},
      {"skip_layer_guidance_scale",
       "3",
       Kind::generate_video,
       {"skip_layer_guidance_layers=0", "skip_layer_guidance_start=0", "skip_layer_guidance_stop=1"}},
      {"skip_layer_guidance_start",
       "0.8",
       Kind::generate_video,
       {"skip_layer_guidance_layers=0", "skip_layer_guidance_scale=3", "skip_layer_guidance_stop=1"}},
      {"skip_layer_guidance_stop",
       "1",
       Kind::generate_video,
       {"skip_layer_guidance_layers=0", "skip_layer_guidance_scale=3", "skip_layer_guidance_start=0"}},
      {"skip_layer_guidance_layers",
       "1",
       Kind::generate_video,
       {"skip_layer_guidance_layers=0", "skip_layer_guidance_scale=3", "skip_layer_guidance_stop=1"}},
      {"freeu", "[0.9, 0.2, 1.5, 1.6]", Kind::generate},
      {"num_inference_steps", "3", Kind::generate},
      {"scan_diffusion_loop", "true", Kind::generate_video},
      {"num_images_per_prompt", "2", Kind::generate},
      {"sample_seed", "1", Kind::generate},
      {"height", "32", Kind::generate},
      {"width", "32", Kind::generate},
      {"num_frames", "5", Kind::generate_video},
      {"fps", "8", Kind::generate_video, {"output_type=mp4"}},
      {"original_size", "[32, 32]", Kind::generate, kSdxl},
      {"crops_coords_top_left", "[4, 4]", Kind::generate, kSdxl},
      {"target_size", "[32, 32]", Kind::generate, kSdxl},
      {"clip_skip", "1", Kind::generate},
      {"image", "{world}/images/1.png", Kind::generate_video, kI2v + Words{"image={world}/images/0.png"}},
      {"image_url", "{world}/images/1.png", Kind::generate_video, kI2v + Words{"image_url={world}/images/0.png"}},
      {"strength", "1", Kind::generate, {"image={world}/images/0.png"}},
      {"mask_image", "{world}/images/1.png", Kind::generate, {"image={world}/images/0.png"}},
      {"mask_grow", "3", Kind::generate, kMasked},
      {"mask_blur", "3", Kind::generate, kMasked},
      {"padding_mask_crop", "2", Kind::generate, kMasked},
      {"outpaint", "2,0,4,0", Kind::generate, {"image={world}/images/0.png"}},
      {"hires_scale", "2", Kind::generate, {"num_inference_steps=4"}},
      {"hires_strength", "1", Kind::generate, {"hires_scale=2", "num_inference_steps=4"}},
      {"denoising_start", "0.5", Kind::generate, {"image={world}/images/0.png", "num_inference_steps=4"}},
      {"denoising_end", "0.5", Kind::generate, {"num_inference_steps=4"}},
      {"refiner", "{goldens}/refiner/refiner", Kind::generate, kSdxl},
      {"aesthetic_score", "3", Kind::generate, kSdxl + Words{"refiner={goldens}/refiner/refiner"}},
      {"negative_aesthetic_score", "5", Kind::generate, kSdxl + Words{"refiner={goldens}/refiner/refiner"}},
      {"hires_upscaler", "latent", Kind::generate, {"hires_scale=2", "num_inference_steps=4"}},
      {"upscale", "2", Kind::generate},
      {"upscaler", "{goldens}/upscalers/x4.safetensors", Kind::generate, {"upscale=2"}},
      {"upscaler_tile",
       "16",
       Kind::generate,
       {"upscale=2", "upscaler={goldens}/upscalers/x4.safetensors", "resolution=32"}},
      {"preview_every", "1", Kind::generate},
      {"preview_autoencoder", "{goldens}/previews/taesd", Kind::generate, {"preview_every=1"}},
      {"last_image",
       "{world}/images/1.png",
       Kind::generate_video,
       {"pretrained_model_name_or_path={goldens}/wan/flf2v", "max_sequence_length=512", "image={world}/images/0.png",
        "last_image={world}/images/0.png"}},
      {"latents", "/nowhere.safetensors", Kind::generate, {}, kNamed},
      {"output_type", "png", Kind::generate},
      {"vae_slicing", "true", Kind::generate, {"num_images_per_prompt=2", "per_device_batch_size=2"}},
      {"vae_tiling", "true", Kind::generate, {"resolution=256"}},
      {"use_cfg_cache", "true", Kind::generate_video, {"num_inference_steps=8", "guidance_scale=3"}},
      {"use_magcache",
       "true",
       Kind::generate_video,
       {"num_inference_steps=4", "guidance_scale=3", "retention_ratio=0.1", "magcache_thresh=1",
        "mag_ratios_base=1,1,1,1,1,1,1,1"}},
      {"magcache_thresh", "0", Kind::generate_video, kMagCache},
      {"magcache_K", "1", Kind::generate_video, kMagCache},
      {"retention_ratio", "1", Kind::generate_video, kMagCache},
      {"mag_ratios_base", "9,9,9,9,9,9,9,9", Kind::generate_video, kMagCache},
      {"mag_ratios_base_720p", "1,1", Kind::generate_video, {}, kNamed},
      {"mag_ratios_base_480p", "9,9,9,9,9,9,9,9", Kind::generate_video, kMagCache + Words{"mag_ratios_base=[]"}},
      {"use_sen_cache", "true", Kind::generate_video, {"num_inference_steps=8", "guidance_scale=3"}},
      {"use_first_block_cache",
       "true",
       Kind::generate_video,
       {"num_inference_steps=4", "first_block_cache_threshold=99"}},
      {"first_block_cache_threshold",
       "99",
       Kind::generate_video,
       {"num_inference_steps=4", "use_first_block_cache=true"}},
      {"use_teacache",
       "true",
       Kind::generate_video,
       {"num_inference_steps=4", "teacache_thresh=99", "teacache_coefficients=1,0"}},
      {"teacache_thresh",
       "99",
       Kind::generate_video,
       {"num_inference_steps=4", "use_teacache=true", "teacache_coefficients=1,0"}},
      {"teacache_coefficients",
       "1,0",
       Kind::generate_video,
       {"num_inference_steps=4", "use_teacache=true", "teacache_thresh=99", "teacache_coefficients=0,999"}},
      {"use_deepcache", "true", Kind::generate, {"num_inference_steps=4"}},
      {"deepcache_interval", "2", Kind::generate, {"num_inference_steps=4", "use_deepcache=true"}},
      {"deepcache_branch", "1", Kind::generate, {"num_inference_steps=4", "use_deepcache=true"}},
      {"use_kv_cache", "true", Kind::generate_video, kI2v + Words{"image={world}/images/0.png"}},
      {"use_batched_text_encoder", "true", Kind::generate, {}, kNamed},
      {"controlnet_model_name_or_path",
       "{goldens}/pipelines/controlnet",
       Kind::generate,
       {"controlnet_image={world}/images/0.png"}},
      {"ip_adapter", "{goldens}/adapters/sd_ip", Kind::generate, {"ip_adapter_image={world}/images/0.png"}},
      {"ip_adapter_image", "{world}/images/1.png", Kind::generate, kIpAdapter},
      {"ip_adapter_scale", "0.5", Kind::generate, kIpAdapter},
      {"ip_adapter_image_encoder", "{goldens}/adapters/sdxl_ip/image_encoder", Kind::generate, kIpAdapter},
      {"t2i_adapter", "{goldens}/adapters/sd_t2i", Kind::generate, {"t2i_adapter_image={world}/images/0.png"}},
      {"t2i_adapter_image", "{world}/images/1.png", Kind::generate, kT2iAdapter},
      {"t2i_adapter_conditioning_scale", "0.5", Kind::generate, kT2iAdapter},
      {"controlnet_image", "{world}/images/1.png", Kind::generate, kControl},
      {"controlnet_preprocessor", "canny", Kind::generate, kControl},
      {"controlnet_conditioning_scale", "0.5", Kind::generate, kControl},
      {"control_guidance_start", "0.5", Kind::generate, kControl},
      {"control_guidance_end", "0.5", Kind::generate, kControl},
      // The compiler.
      {"jax_cache_dir", "{out}/programs"},
      {"aot_cache_dir", "{out}/programs"},
      {"xla_flags", "--xla_cpu_enable_fast_math=true", Kind::images, {"jax_cache_dir={out}/programs"}},
      {"libtpu_flags", "wan_light", Kind::images, {}, kNamed},
  };
  return all;
}

/// Keys without effect: a message names any value other than the default.
const std::vector<std::pair<const char*, const char*>> kOfTheReference = {
    {"jit_initializers", "false"},
    {"from_pt", "false"},
    {"controlnet_from_pt", "false"},
    {"lightning_from_pt", "false"},
    {"split_head_dim", "false"},
    {"mask_padding_tokens", "false"},
    {"skip_jax_distributed_system", "true"},
    {"offload_encoders", "false"},
    {"tokenize_captions_num_proc", "1"},
    {"transform_images_num_proc", "1"},
    {"tensorboard_dir", "/a"},
    {"use_base2_exp", "false"},
    {"use_experimental_scheduler", "false"},
    {"ulysses_attention_chunks", "2"},
    {"compile_text_encoder", "true"},
    {"enable_jax_named_scopes", "true"},
    {"vae_logical_axis_rules", "[['conv_in', 'vae_spatial']]"},
    {"sharding", "{transformer: default}"},
    {"output_file", "/a.png"},
    {"norm_num_groups", "8"},
    {"enable_mllog", "true"},
    {"enable_ml_diagnostics", "true"},
    {"enable_ondemand_xprof", "true"},
    {"profiler", "none"},
    {"profiler_gcs_path", "gs://b"},
    {"dataset_config_name", "a"},
    {"ulysses_shards", "2"},
    {"vae_spatial", "2"},
    {"converted_weights_dir", "/a"},
    {"pretrained_orbax_dir", "/a"},
    {"scheduler_dtype", "bfloat16"}};

TEST(Keys, EachHasARow) {
  RunConfig defaults;
  KeyList keys;
  keys.add(defaults);
  std::set<std::string> missing;
  for (const ConfigKey& k : keys.keys()) missing.insert(k.name);
  for (const Row& row : rows()) EXPECT_EQ(missing.erase(row.key), 1u) << row.key << " is no key, or has two rows";
  for (const auto& [key, value] : kOfTheReference) EXPECT_EQ(missing.erase(key), 1u) << key;
  for (const std::string& key : missing) ADD_FAILURE() << key << " has no row here: say how it proves that it is read";
}

TEST(Keys, RunsAlikeMakeTheSame) {
  for (Kind kind : {Kind::images, Kind::lora, Kind::videos, Kind::generate, Kind::generate_video, Kind::tfrecords}) {
    const Outcome &a = known(done, kind, {}), b = done(kind, {});
    EXPECT_FALSE(a.failed) << a.log;
    for (const auto& [name, content] : a.made) EXPECT_TRUE(b.made.contains(name) && b.made.at(name) == content) << name;
    EXPECT_EQ(a.made.size(), b.made.size());
  }
}

class EachKey : public testing::TestWithParam<Row> {};

TEST_P(EachKey, ActsWhereItIsRead) {
  const Row& row = GetParam();
  std::string log;
  const Effect found = effect(row.kind, row.with, row.key, row.value, log);
  if (row.says == kPace)
    EXPECT_EQ(found, Effect::none) << log;
  else if (row.says == kNamed)
    EXPECT_EQ(found, Effect::named) << log;
  else if (row.says.empty())
    EXPECT_EQ(found, Effect::acts) << log;
  else
    EXPECT_TRUE(log.find(row.says) != log.npos && found != Effect::fails && found != Effect::named) << log;
}
INSTANTIATE_TEST_SUITE_P(Rows, EachKey, testing::ValuesIn(rows()),
                         [](const auto& row) { return std::string(row.param.key); });

/// Keys that have no effect in these kinds of runs and need no message.
const std::vector<std::tuple<const char*, std::set<Kind>, const char*>> kExceptions = {
    {"mesh_axes", {}, "an axis of size 1 may be left out, which changes nothing"},
    {"run_name", {Kind::generate, Kind::generate_video}, "says where the run's checkpoints are, and there are none"},
    {"checkpoint_dir", {Kind::generate, Kind::generate_video}, "likewise"},
    {"vae_file", {Kind::generate}, "the weights that differ here are the encoder's"},
    {"follow_links", {Kind::images, Kind::lora, Kind::videos, Kind::tfrecords}, "no link leads out of the folder"},
    {"train_new_flux", {Kind::lora}, "the error names train_new_unet, which is the same"},
    {"opt_enable_grad_global_norm_clipping", {}, "asks for what models with one text encoder always do"},
};

/// In a default run of each kind: keys without effect must be named.
class EveryKey : public testing::TestWithParam<Kind> {};

TEST_P(EveryKey, ActsOrIsNamed) {
  for (const Row& row : rows()) {
    if (row.says == kPace || (row.kind == GetParam() && row.with.empty())) continue;  // tested above
    const Words words = base(GetParam());
    if (std::ranges::count(words, std::string(row.key) + "=" + row.value) > 0) continue;
    if (std::ranges::any_of(kExceptions, [&](const auto& e) {
          return std::get<0>(e) == std::string(row.key) &&
                 (std::get<1>(e).empty() || std::get<1>(e).contains(GetParam()));
        }))
      continue;
    std::string log;
    const Effect found = effect(GetParam(), {}, row.key, row.value, log);
    const bool logged = row.says.size() > 1 && log.find(row.says) != log.npos;
    EXPECT_TRUE(found == Effect::acts || found == Effect::named || logged)
        << row.key << (found == Effect::fails ? " fails, and is not named\n" + log : " is silent");
  }
}
INSTANTIATE_TEST_SUITE_P(
    Kinds, EveryKey, testing::Values(Kind::images, Kind::lora, Kind::generate), [](const auto& kind) {
      return std::string(std::array{"images", "lora", "videos", "generate"}[static_cast<size_t>(kind.param)]);
    });

TEST(Keys, OfShiftsAndBetasAreNamedOnVideos) {
  std::string log;
  for (const auto& [key, value] : {std::pair{"time_shift", "true"}, {"base_shift", "0.7"}, {"max_shift", "2"}}) {
    EXPECT_EQ(effect(Kind::videos, {}, key, value, log), Effect::named) << key << "\n" << log;
    EXPECT_EQ(effect(Kind::generate_video, {"flow_shift=2"}, key, value, log), Effect::named) << key << "\n" << log;
    const Effect alone = effect(Kind::generate_video, {}, key, value, log);
    EXPECT_EQ(alone, key == std::string("time_shift") ? Effect::acts : Effect::named) << key << "\n" << log;
  }
  EXPECT_EQ(effect(Kind::generate_video, {"time_shift=true"}, "base_shift", "0.7", log), Effect::acts) << log;
  for (const auto& [kind, members] :
       {std::pair{Kind::videos, "beta_start"}, {Kind::generate_video, "beta_end"}, {Kind::videos, "trained_betas"}}) {
    const std::string value = members == std::string("trained_betas") ? "[0.1, 0.2]" : "0.015";
    EXPECT_EQ(effect(kind, {}, "diffusion_scheduler_config", fmt::format("{{{}: {}}}", members, value), log),
              Effect::named);
    EXPECT_NE(log.find(fmt::format("diffusion_scheduler_config: {} is ignored: a flow-matching model has no", members)),
              log.npos)
        << log;
  }
}

TEST(Keys, OfAFileThatAreIgnoredTakeFewLines) {
  const auto message = [](const std::string& yaml, const Words& words) {
    const RunConfig c =
        RunConfig::from_source(ConfigSource::from_text(yaml, filled(base(Kind::images) + words, world().path())));
    const TrainingRequest r = training_request(c);
    const ModelComponents models(r.components);
    testing::internal::CaptureStderr();
    r.rules.warn_of_ignored(models.opened(), "train");
    return testing::internal::GetCapturedStderr();
  };
  const std::string five = "{max_grad_value: 2, lr_power: 2, lora_rank: 8, vae_kl_weight: 0, magcache_K: 3, ";
  std::string log = message(five + "lora_alpha: 2}", {"lr_num_cycles=3"});
  EXPECT_EQ(std::ranges::count(log, '\n'), 6) << log;
  EXPECT_NE(log.find("lora_rank, lora_alpha are ignored: no LoRA is trained"), log.npos) << log;
  const std::string six = five + "teacache_thresh: 0.5}";
  log = message(six, {"lr_num_cycles=3"});
  EXPECT_EQ(std::ranges::count(log, '\n'), 2) << log;
  EXPECT_NE(
      log.find("lr_num_cycles is ignored: only lr_scheduler=cosine_with_restarts and warmup_stable_decay read it"),
      log.npos)
      << log;
  EXPECT_NE(
      log.find("6 keys of the config are ignored in this run: max_grad_value, lr_power, vae_kl_weight, lora_rank, "
               "magcache_K, teacache_thresh (MAXDIFFUSION_LOG=debug prints why)"),
      log.npos)
      << log;
  set_log_level(LogLevel::debug);
  log = message(six, {});
  set_log_level(LogLevel::info);
  EXPECT_EQ(std::ranges::count(log, '\n'), 7) << log;
  EXPECT_NE(log.find("magcache_K is ignored: use_magcache=false"), log.npos) << log;
}

TEST(Keys, OfTheQuickstartsAreAllRead) {
  for (const char* file : {"quickstart.yml", "quickstart_video.yml"}) {
    const RunConfig c = RunConfig::load(MD_SOURCE_DIR "/configs/" + std::string(file), {});
    testing::internal::CaptureStderr();
    const TrainingRequest r = training_request(c);
    const ModelComponents m(r.components);
    for (const char* command : {"train", "generate"}) r.rules.warn_of_ignored(m.opened(), command);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("ignored"), log.npos) << file << "\n" << log;
  }
}

// S2-15, S2-19, S2-21, S2-91, S4-15, S4-18, S4-20, S4-83, S4-92
TEST(KeysOfTheReference, ChangeNoProgramNoStateAndNoFileAndAreNamed) {
  const Words kTensor = {"cpu_device_count=2", "per_device_batch_size=1", "ici_tensor_parallelism=2"};
  Words changed;
  for (const auto& [key, value] : kOfTheReference) {
    const std::string word = std::string(key) + "=" + value;
    if (std::set<std::string>{"enable_ml_diagnostics", "enable_ondemand_xprof", "scheduler_dtype"}.contains(key)) {
      const Outcome refused = opened(Kind::images, {word});
      EXPECT_TRUE(refused.failed && refused.log.starts_with(key)) << key;
      continue;
    }
    changed.push_back(word);
  }
  const Outcome after = done(Kind::images, changed);
  for (const std::string& word : changed) EXPECT_TRUE(names(after.log, word.substr(0, word.find('=')))) << word;
  EXPECT_EQ(after.made, known(done, Kind::images, {}).made);  // programs, weights and metrics are equal to the bit
  EXPECT_EQ(traced(Kind::images, kTensor + changed).made, traced(Kind::images, kTensor).made);
  EXPECT_EQ(done(Kind::generate, changed).made, known(done, Kind::generate, {}).made);
  // Operations carry their layers' paths for any value of enable_jax_named_scopes.
  const std::string text = known(traced, Kind::images, {}).made.at("unet");
  for (const char* path : {"down_blocks.0", "up_blocks.1"}) EXPECT_NE(text.find(path), text.npos) << path;
}

// ---- numeric

/// The first moments after a run's first update, which are 0.1 times the gradients, and its log.
struct FirstUpdate {
  std::map<std::string, std::vector<double>> gradients;
  double norm = 0, reported = 0;  // norm of `gradients`; norm in the metrics, before clipping
  std::string log;
};
FirstUpdate first_update(const Words& extra) {
  const TemporaryFolder out;
  Words words = {"max_train_steps=1"};
  words.insert(words.end(), extra.begin(), extra.end());
  FirstUpdate u;
  u.log =
      watched(Kind::images, words, out.path(), [](const RunConfig& c, Outcome&) { train(training_request(c)); }).log;
  double squares = 0;
  const SafetensorsReader state = SafetensorsReader::open(out / "run/checkpoints/1/training_state/arrays.safetensors");
  for (const auto& [name, array] : state.tensors()) {
    if (!name.starts_with("adam_m/")) continue;
    for (double m : array.to_doubles()) {
      u.gradients[name].push_back(m / 0.1);
      squares += m * m / 0.01;
    }
  }
  u.norm = std::sqrt(squares);
  u.reported = parse_json(read_file(out / "run/metrics.jsonl")).at("grad_norm");
  return u;
}

TEST(Keys, OfTheOtherOptimizerAreNamed) {
  const Outcome adamw = opened(Kind::images, {"sgd_momentum=0.5", "adam_b1=0.8"});
  EXPECT_NE(adamw.lines.find("sgd_momentum is ignored: only optimizer=sgd reads it"), std::string::npos) << adamw.lines;
  EXPECT_FALSE(names(adamw.log, "adam_b1"));
  const Outcome sgd = opened(Kind::images, {"optimizer=sgd", "sgd_momentum=0.5", "adam_b1=0.8", "adam_eps=1e-4"});
  EXPECT_NE(sgd.lines.find("adam_b1, adam_eps are ignored: only optimizer=adamw reads it"), std::string::npos)
      << sgd.lines;
  EXPECT_FALSE(names(sgd.log, "sgd_momentum"));
}

TEST(Lora, MetadataNamesTheOptimizerAsKohyaDoes) {
  const std::pair<Words, const char*> runs[] = {
      {{}, "torch.optim.adamw.AdamW(betas=(0.9, 0.999),eps=1e-08,weight_decay=0.01)"},
      {{"optimizer=sgd", "sgd_nesterov=true"}, "torch.optim.sgd.SGD(momentum=0.9,weight_decay=0,nesterov=True)"}};
  for (const auto& [words, name] : runs) {
    const TemporaryFolder out;
    watched(Kind::lora, words + Words{"max_train_steps=1"}, out.path(),
            [](const RunConfig& c, Outcome&) { train(training_request(c)); });
    const std::string file = out / "run/checkpoints/1/lora_kohya.safetensors";
    EXPECT_EQ(SafetensorsReader::open(file).metadata().at("ss_optimizer"), name);
  }
}

// max_grad_norm and max_grad_value, each with and without its switch.
// S2-36, S4-36
TEST(Clipping, FollowsItsSwitchesByNumber) {
  const Words sdxl = {"pretrained_model_name_or_path=" + kGoldens + "pipelines/sdxl", "max_grad_norm=0.01",
                      "max_grad_value=0.001"};
  const FirstUpdate plain = first_update(sdxl);
  ASSERT_GT(plain.reported, 0.02);
  EXPECT_NEAR(plain.norm / plain.reported, 1, 1e-5);
  EXPECT_EQ(plain.log.find("W "), 0u);
  for (const char* key : {"max_grad_norm is ", "max_grad_value is "}) EXPECT_NE(plain.log.find(key), plain.log.npos);

  const FirstUpdate by_norm = first_update(sdxl + Words{"opt_enable_grad_global_norm_clipping=true"});
  EXPECT_NEAR(by_norm.norm, 0.01, 1e-7);
  EXPECT_NEAR(by_norm.reported / plain.reported, 1, 1e-6);
  EXPECT_FALSE(names(by_norm.log, "max_grad_norm"));

  const FirstUpdate by_value = first_update(sdxl + Words{"opt_enable_grad_clipping=true"});
  for (const auto& [name, gradients] : plain.gradients)
    for (size_t i = 0; i < gradients.size(); ++i)
      ASSERT_NEAR(by_value.gradients.at(name)[i], std::clamp(gradients[i], -0.001, 0.001), 1e-8) << name;
  EXPECT_FALSE(names(by_value.log, "max_grad_value"));

  // Models with one text encoder are always clipped by norm.
  const FirstUpdate always = first_update({"max_grad_norm=0.01"});
  EXPECT_GT(always.reported, 0.02);
  EXPECT_NEAR(always.norm, 0.01, 1e-7);
  EXPECT_FALSE(names(always.log, "max_grad_norm"));
}

}  // namespace
}  // namespace md
