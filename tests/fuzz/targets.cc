#include "tests/fuzz/targets.h"

#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/shard_files.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/data/folders/dataset_file.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/model_folder/model_folder.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/settings/run_config.h"
#include "maxdiffusion/tokenizers/tokenizer.h"
#include "maxdiffusion/train/state_info.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::string source(const std::string& path) { return read_file(MD_SOURCE_DIR "/" + path); }

/// Writes a file without fsync.
std::string put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return path;
}

std::string unzipped(const std::string& path) {
  gzFile in = gzopen((MD_SOURCE_DIR "/" + path).c_str(), "rb");
  std::string out, part(65536, '\0');
  for (int n; (n = gzread(in, part.data(), static_cast<unsigned>(part.size()))) > 0;)
    out.append(part, 0, static_cast<size_t>(n));
  gzclose(in);
  return out;
}

/// Parses a config.json and traces the model it describes.
void read_model(const std::string& class_name, const std::string& text) {
  const std::string index =
      R"({"_class_name": "P", "scheduler": ["diffusers", "DDIMScheduler"], "m": ["d", ")" + class_name + "\"]}";
  ModelFolder::from_texts(
      {{"model_index.json", index}, {"scheduler/scheduler_config.json", "{}"}, {"m/config.json", text}})
      .params("m");
}

FuzzTarget model(const std::string& class_name, int64_t count, const std::vector<std::string>& folders) {
  FuzzTarget t{"config.json of " + class_name, count, {}, [class_name](const std::string& bytes, const std::string&) {
                 read_model(class_name, bytes);
               }};
  for (const std::string& folder : folders) t.seeds.push_back(source(folder + "/config.json"));
  return t;
}

/// The image files of a recorded test whose names end in `end`.
std::vector<std::string> images(const std::string& end) {
  std::vector<std::string> found;
  const nlohmann::json golden = parse_json(source("tests/golden/data/pictures.json"));
  for (const auto& file : golden["files"]) {
    if (!file["name"].get<std::string>().ends_with(end)) continue;
    const std::string hex = file["file"];
    std::string bytes;
    for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    found.push_back(std::move(bytes));
  }
  return found;
}

FuzzTarget image_target(const std::string& format, int64_t count, const std::string& end) {
  return {format, count, images(end), [](const std::string& bytes, const std::string&) {
            decode_stored_image(bytes.data(), bytes.size(), "it", {.alpha = true});
          }};
}

/// Reads all records and decodes their contents.
FuzzTarget records(const std::string& format, int64_t count, const std::string& type, const std::string& file,
                   std::vector<std::string> seeds, const std::string& image = "image",
                   const std::string& caption = "text") {
  return {format, count, std::move(seeds), [=](const std::string& bytes, const std::string& folder) {
            const auto source = open_source({.dataset_type = type,
                                             .train_data_dir = put(folder + "/" + file, bytes),
                                             .image_column = image,
                                             .caption_column = caption});
            RecordStream stream(source, {.shuffle = false});
            for (int i = 0; i < 40; ++i) {
              const auto next = stream.next();
              if (next.epoch > 0) break;
              next.read();
            }
          }};
}

/// Reads a dataset file and lists its folder 'a', of one image.
FuzzTarget dataset_file(const std::string& format, int64_t count, const std::string& file, const std::string& seed) {
  return {"dataset file of " + format, count, {seed}, [=](const std::string& bytes, const std::string& folder) {
            make_folders(folder + "/a");
            put(folder + "/a/1.png", "x");
            put(folder + "/a/1.txt", "a heart, {red|blue}, big\n");
            DatasetFile d = read_dataset_file(put(folder + "/" + file, bytes), "", {});
            // Damaged paths would list other folders of this machine.
            for (DataFolder& f : d.folders) f.folder = folder + "/a", f.metadata.clear(), f.masks.clear();
            const DataFolders all(d.name, d.folders);
            for (int64_t i = 0; i < all.size(); ++i) {
              const DataFolder& f = all.folders()[static_cast<size_t>(all.folder(i))];
              applied(f.captions, all.caption(i), 7, f.where);
            }
          }};
}

/// Damages one file of a tokenizer's folder; the others are intact.
FuzzTarget tokenizer(const std::string& class_name, int64_t count, const std::string& file,
                     const std::map<std::string, std::string>& files) {
  return {
      file + " of " + class_name, count, {files.at(file)}, [=](const std::string& bytes, const std::string& folder) {
        for (const auto& [name, text] : files) put(folder + "/" + name, name == file ? bytes : text);
        open_tokenizer(class_name, folder)->tokens("a café with 12 lollipops!", 77);
      }};
}

std::map<std::string, std::string> clip_files() {
  // Single letters, and merges that form a few words.
  nlohmann::json vocab = nlohmann::json::object();
  int id = 0;
  for (const char* end : {"", "</w>"})
    for (char c = '!'; c <= '~'; ++c) vocab[std::string(1, c) + end] = id++;
  std::string merges = "#version: 0.2\n";
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{{"l", "o"},
                                                                                    {"lo", "l"},
                                                                                    {"p", "o"},
                                                                                    {"lol", "l"},
                                                                                    {"i", "po"},
                                                                                    {"w", "i"},
                                                                                    {"wi", "t"},
                                                                                    {"wit", "h</w>"},
                                                                                    {"1", "2</w>"}}) {
    vocab[left + right] = id++;
    merges += left + " " + right + "\n";
  }
  vocab["<|startoftext|>"] = id++;
  vocab["<|endoftext|>"] = id++;
  return {
      {"vocab.json", vocab.dump()},
      {"merges.txt", merges},
      {"tokenizer_config.json",
       R"({"bos_token": "<|startoftext|>", "eos_token": {"content": "<|endoftext|>", "normalized": true}, "added_tokens_decoder": {"197": {"content": "<new>", "special": true}}})"}};
}

FuzzTarget safetensors(const std::string& name, int64_t count, const std::vector<std::string>& seeds) {
  return {name, count, seeds, [](const std::string& bytes, const std::string& folder) {
            const auto reader = SafetensorsReader::open(put(folder + "/a.safetensors", bytes));
            double sum = 0;
            for (const auto& [tensor, a] : reader.tensors())
              for (double v : a.to_doubles()) sum += v;
          }};
}

/// Reads quantized weights and matches them by name. `values` holds their shapes under their names without `end`.
FuzzTarget quantized(const std::string& name, int64_t count, const std::string& file, const std::string& values,
                     const std::string& end) {
  std::vector<WantedWeight> expected;
  const std::string folder = MD_SOURCE_DIR "/tests/golden/quantized_files/";
  for (const auto& [weight, array] : SafetensorsReader::open(folder + values).tensors())
    if (!weight.ends_with(".read")) expected.push_back({weight + end, array.shape()});
  return {name,
          count,
          {source("tests/golden/quantized_files/" + file)},
          [=](const std::string& bytes, const std::string& t) {
            const LoadOptions options{.allow_unused = true};
            const SafetensorsReader reader = SafetensorsReader::open(put(t + "/" + file, bytes));
            for (const WantedWeight& w : expected) open_weights(reader, file, {w}, options)();
          }};
}

std::string checksums_seed() {
  const TemporaryFolder t;
  put(t / "a.txt", "a");
  FileChecksums sums = checksums_of(t.path(), {"a.txt"});
  sums["training_state/state.json"] = checksum_of_text("{}");
  return to_json(sums);
}

}  // namespace

std::vector<FuzzTarget> fuzz_targets() {
  std::vector<FuzzTarget> all;
  all.push_back(safetensors("safetensors", 10000,
                            {source("tests/golden/safetensors/all_types.safetensors"),
                             source("tests/golden/safetensors/shapes.safetensors")}));
  all.push_back(quantized("GGUF", 4000, "types.gguf", "types.safetensors", ""));
  all.push_back(quantized("bitsandbytes", 2000, "bnb.safetensors", "bnb_values.safetensors", ".weight"));
  all.push_back({"safetensors index",
                 10000,
                 {R"({"metadata": {"total_size": 8}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors"}})"},
                 [](const std::string& bytes, const std::string& folder) {
                   const float v = 1;
                   const HostArray a = HostArray::of<float>({DType::f32, {1}}, {&v, 1});
                   if (!exists(folder + "/a.safetensors"))
                     write_safetensors(folder + "/a.safetensors", {{"a", a}, {"b", a}});
                   SafetensorsReader::open(put(folder + "/model.safetensors.index.json", bytes));
                 }});
  all.push_back(model("UNet2DConditionModel", 7000,
                      {"configs/models/emoji/unet", "tests/golden/unet_sd15", "tests/golden/unet_sdxl"}));
  all.push_back(model("AutoencoderKL", 10000, {"configs/models/emoji/vae", "tests/golden/vae_sd"}));
  all.push_back(model("CLIPTextModel", 7500, {"tests/golden/clip_legacy"}));
  all.push_back(model("CLIPVisionModelWithProjection", 8500, {"tests/golden/clip_vision_projection"}));
  all.push_back(model("ControlNetModel", 8500, {"tests/golden/controlnet_sdxl"}));
  all.push_back(model("UMT5EncoderModel", 8500, {"tests/golden/umt5"}));
  all.push_back(model("FluxTransformer2DModel", 10000, {"tests/golden/flux_dev", "tests/golden/flux_schnell"}));
  all.push_back(model("WanTransformer3DModel", 10000, {"tests/golden/wan/i2v/transformer"}));
  all.push_back(model("AutoencoderKLWan", 10000, {"tests/golden/wan/i2v/vae"}));
  all.push_back({"model_index.json",
                 9000,
                 {source("configs/models/emoji/model_index.json")},
                 [](const std::string& bytes, const std::string&) {
                   std::map<std::string, std::string> files{{"model_index.json", bytes}};
                   for (const char* name : {"unet/config.json", "vae/config.json", "text_encoder/config.json",
                                            "text_encoder_2/config.json", "scheduler/scheduler_config.json"})
                     files[name] = source(std::string("configs/models/emoji/") + name);
                   ModelFolder::from_texts(files);
                 }});
  all.push_back({"scheduler_config.json",
                 15000,
                 {source("configs/models/emoji/scheduler/scheduler_config.json"),
                  source("configs/models/moving_emoji/scheduler/scheduler_config.json"),
                  source("tests/golden/pipelines/sd/scheduler/scheduler_config.json")},
                 [](const std::string& bytes, const std::string&) {
                   const nlohmann::json config = parse_scheduler_config(bytes);
                   make_process(config, ProcessKeys{});
                   make_scheduler(config)->table(7);
                 }});
  all.push_back(
      {"state.json",
       60000,
       {R"({"maxdiffusion_version": "0.5.0", "step": 6, "epoch": 1, "index": 12, "seed": 3, "shard": 0, "offset": 0, "taken": 4})"},
       [](const std::string& bytes, const std::string&) { parse_state_info(bytes, "state.json", 6); }});
  all.push_back({"checksums.json", 6000, {checksums_seed()}, [](const std::string& bytes, const std::string& folder) {
                   make_folders(folder + "/training_state");
                   put(folder + "/a.txt", "a");
                   put(folder + "/training_state/state.json", "{}");
                   put(folder + "/" + kChecksums, bytes);
                   verify_checksums(folder);
                 }});
  all.push_back(
      {"index of shards",
       100000,
       {R"({"arrays": {"a": {"dtype": "F32", "shape": [4, 2], "pieces": [{"file": "training_state/p.safetensors", "tensor": "a@0,0", "offset": [0, 0], "size": [2, 2]}, {"file": "training_state/p.safetensors", "tensor": "a@2,0", "offset": [2, 0], "size": [2, 2]}]}}})"},
       [](const std::string& bytes, const std::string&) { check_tiled(parse_index(bytes, "index.json"), "read"); }});
  all.push_back(
      {"YAML of a run",
       5000,
       {source("configs/quickstart.yml"), source("configs/base_wan_27b.yml"), "prompt: [a, \"b\"]\nseed: 1e3\n"},
       [](const std::string& bytes, const std::string&) {
         std::string text = bytes;  // without "base", which names a file
         if (const size_t base = text.find("base:"); base != std::string::npos)
           text.erase(base, std::min(text.find('\n', base), text.size()) - base);
         RunConfig::from_source(ConfigSource::from_text(text));
       }});
  all.push_back({"command line",
                 5000,
                 {"prompt=[\"a\", 'b']\nseed=3\nlearning_rate=1e-4\ndiffusion_scheduler_config={_class_name: x, "
                  "beta_start: 0.1}\n"
                  "logical_axis_rules=[['batch', ['data', 'fsdp']]]\ntimesteps_list=1,2\nmesh_axes=[data, fsdp, "
                  "tensor]\nheight=null"},
                 [](const std::string& bytes, const std::string&) {
                   std::vector<std::string> words;
                   std::istringstream in(bytes);
                   for (std::string word; std::getline(in, word);) words.push_back(word);
                   RunConfig::from_source(ConfigSource::from_text("", words));
                 }});
  const std::map<std::string, std::string> clip = clip_files();
  for (const auto& [file, text] : clip) all.push_back(tokenizer("CLIPTokenizer", 2000, file, clip));
  const std::string t5 = "tests/golden/data/t5/";
  all.push_back(tokenizer("T5Tokenizer", 1500, "tokenizer.json",
                          {{"tokenizer.json", source(t5 + "flags/tokenizer.json")},
                           {"tokenizer_config.json", source(t5 + "flags/tokenizer_config.json")}}));
  const std::string any = "tests/golden/data/tokenizers/";
  for (const auto& [folder, class_name] : {std::pair{"qwen", "Qwen2Tokenizer"}, std::pair{"llama", "TokenizersBackend"},
                                           std::pair{"unigram", "PreTrainedTokenizerFast"}})
    all.push_back(tokenizer(class_name, 500, "tokenizer.json",
                            {{"tokenizer.json", source(any + folder + "/tokenizer.json")},
                             {"tokenizer_config.json", source(any + folder + "/tokenizer_config.json")}}));
  all.push_back(tokenizer("T5Tokenizer", 4500, "spiece.model",
                          {{"spiece.model", source(t5 + "spiece/spiece.model")},
                           {"tokenizer_config.json", source(t5 + "spiece/tokenizer_config.json")}}));
  const std::string files = "tests/golden/data/files/";
  all.push_back(records("TFRecord", 10000, "tfrecord", "a.tfrecord", {source(files + "pictures.tfrecord")}));
  std::vector<std::string> array_records;
  for (const char* name : {"plain", "zstd", "brotli", "snappy"})
    array_records.push_back(unzipped(files + name + ".array_record.gz"));
  all.push_back(records("ArrayRecord", 8000, "grain", "a.array_record", array_records));
  all.push_back(records("tar of WebDataset", 10000, "webdataset", "a.tar", {source(files + "shard-000000.tar")}));
  all.push_back(records("Parquet", 4000, "hf", "a.parquet", {source(files + "plain.parquet")}, "picture", "captions"));
  all.push_back(records("Arrow", 7000, "hf", "a.arrow", {source(files + "plain.arrow")}, "picture", "captions"));
  for (const char* name : {"metadata.jsonl", "metadata.csv"}) {
    const std::string seed =
        std::string(name) == "metadata.csv"
            ? "file_name,text\na.png,\"one, two\"\nb.png,x\n"
            : "{\"file_name\": \"a.png\", \"text\": \"one\"}\n{\"file_name\": \"b.png\", \"text\": [\"two\"]}\n";
    all.push_back({name, 5500, {seed}, [name](const std::string& bytes, const std::string& folder) {
                     for (const char* image : {"a.png", "b.png"}) put(folder + "/" + image, "x");
                     put(folder + "/" + name, bytes);
                     list_image_folder(folder, {});
                   }});
  }
  all.push_back(dataset_file("kohya", 4000, "d.toml",
                             "[general]\nshuffle_caption = true\ncaption_extension = '.txt'\nkeep_tokens = 1\n"
                             "[[datasets]]\nresolution = [64, 48]\nbatch_size = 2\nenable_bucket = true\n"
                             "[[datasets.subsets]]\nimage_dir = 'a'\nnum_repeats = 3\nis_reg = false\n"
                             "caption_prefix = 'x'\nenable_wildcard = true\ncaption_tag_dropout_rate = 0.5\n"));
  all.push_back(dataset_file("musubi-tuner", 4000, "d.toml",
                             "[general]\nresolution = 64\n[[datasets]]\nimage_directory = 'a'\nnum_repeats = 2\n"
                             "caption_extension = '.txt'\nbatch_size = 1\n"));
  all.push_back(
      dataset_file("SimpleTuner", 4000, "d.json",
                   R"([{"id": "x", "type": "local", "instance_data_dir": "a", "resolution": 1, )"
                   R"("resolution_type": "area", "repeats": 2, "caption_strategy": "textfile", "crop": true, )"
                   R"("caption_shuffle": {"enable": true, "split_on": "comma", "position_start": 1}}])"));
  all.push_back(dataset_file("ai-toolkit", 4000, "d.yaml",
                             "config:\n  process:\n  - type: sd_trainer\n    trigger_word: zwx\n    datasets:\n"
                             "    - folder_path: a\n      caption_ext: txt\n      resolution: [64, 96]\n"
                             "      shuffle_tokens: true\n      num_repeats: 2\n      caption_dropout_rate: 0.1\n"));
  all.push_back(image_target("PNG", 150000, ".png"));
  all.push_back(image_target("JPEG", 150000, ".jpg"));
  all.push_back(image_target("WebP", 100000, ".webp"));
  return all;
}

}  // namespace md
