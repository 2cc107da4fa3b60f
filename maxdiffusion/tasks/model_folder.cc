#include "maxdiffusion/tasks/model_folder.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/hub_cache.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/models/controlnet.h"

namespace md {
namespace {

using nlohmann::json;

json parse_json(const std::string& path, const std::string& text) {
  try {
    return json::parse(text);
  } catch (const json::exception& e) {
    fail(Code::invalid_config, "{}: not JSON: {}", path, e.what());
  }
}

template <class Config>
Config parse_config(const std::string& path, const std::string& text) {
  try {
    return Config::from_json(parse_json(path, text));
  } catch (Error& e) {
    throw e.note("in " + path);
  } catch (const json::exception& e) {
    fail(Code::invalid_config, "{}: {}", path, e.what());
  }
}

/// Matches what `weights` holds with the component's parameters now, reads when called.
std::function<HostArrays()> reader(const ParamTable& params, const std::string& component, const std::string& weights) {
  std::vector<const Param*> own;
  for (const Param& p : params.params())
    if (p.model == component) own.push_back(&p);
  if (own.empty()) return [] { return HostArrays(); };  // text_encoder_2 of a model with one
  std::vector<WantedWeight> wanted;
  for (const Param* p : own) wanted.push_back({p->path, p->shape});
  return [own, read = open_weights(weights, wanted)] {
    HostArrays out, found = read();
    for (const Param* p : own) out[p->input] = found.at(p->path);
    return out;
  };
}

}  // namespace

template <>
ControlNetConfig read_config(const std::string& path) {
  return parse_config<ControlNetConfig>(path, read_file(path));
}

ModelFolder ModelFolder::open(const std::string& name, const std::string& bpe_file, const std::string& revision) {
  check(!name.empty(), Code::invalid_config, "pretrained_model_name_or_path is empty; it names a model folder");
  const std::string path = local_folder(name, revision);
  ModelFolder m;
  m.path = path;
  auto read = [&](const std::string& file) { return m.files[file] = read_file(path + "/" + file); };
  read("model_index.json");
  m.unet = parse_config<UNetConfig>(path + "/unet/config.json", read("unet/config.json"));
  m.vae = parse_config<VaeConfig>(path + "/vae/config.json", read("vae/config.json"));
  m.text_encoder = parse_config<ClipTextConfig>(path + "/text_encoder/config.json", read("text_encoder/config.json"));
  read("scheduler/scheduler_config.json");
  const bool two = exists(path + "/text_encoder_2/config.json");
  if (two)
    m.text_encoder_2 =
        parse_config<ClipTextConfig>(path + "/text_encoder_2/config.json", read("text_encoder_2/config.json"));
  auto tokenizer = [&](const std::string& name) {
    std::string folder = path + "/" + name;
    if (exists(folder + "/vocab.json") || exists(folder + "/tokenizer.json"))
      return std::make_shared<ClipTokenizer>(ClipTokenizer::from_folder(folder));
    return std::make_shared<ClipTokenizer>(
        ClipTokenizer::from_bpe(bpe_file.empty() ? MD_DEPS_DIR "/open_clip/bpe_simple_vocab_16e6.txt.gz" : bpe_file));
  };
  m.tokenizer = tokenizer("tokenizer");
  if (two) {
    m.tokenizer_2 = tokenizer("tokenizer_2");
    if (!exists(path + "/tokenizer_2")) m.tokenizer_2->set_pad_id(0);  // "!", as OpenCLIP pads
  }
  return m;
}

void ModelFolder::add_tokenizers(std::map<std::string, std::string>& out) const {
  for (const auto& [name, t] : {std::pair{"tokenizer", tokenizer}, std::pair{"tokenizer_2", tokenizer_2}}) {
    if (!t) continue;
    for (auto& [file, text] : t->files()) out[std::string(name) + "/" + file] = std::move(text);
  }
}

HostArrays ModelFolder::values(const ParamTable& params, const std::string& component, bool fresh,
                               uint64_t seed) const {
  return open_values(params, component, fresh, seed)();
}

HostArrays ModelFolder::values_at(const ParamTable& params, const std::string& component, const std::string& weights) {
  return reader(params, component, weights)();
}

std::function<HostArrays()> ModelFolder::open_values(const ParamTable& params, const std::string& component, bool fresh,
                                                     uint64_t seed) const {
  if (!fresh) return reader(params, component, path + "/" + component);
  return [&params, component, seed] {
    HostArrays out;
    for (const Param& p : params.params())
      if (p.model == component) out[p.input] = initial_value(p, seed);
    return out;
  };
}

std::string unet_folder(const std::string& name) {
  const std::string folder = local_folder(name);
  return std::filesystem::is_directory(folder + "/unet") ? folder + "/unet" : folder;
}

HostArrays published(const ParamTable& params, const std::string& component, const HostArrays& values) {
  HostArrays out;
  for (const Param& p : params.params())
    if (p.model == component) out.merge(unstacked(p.path, values.at(p.input)));
  return out;
}

void place(const Devices& devices, const Program& program, const HostArrays& values, ArrayMap& out) {
  Span span("to device");
  for (size_t i = 0; i < program.input_names().size(); ++i) {
    const std::string& name = program.input_names()[i];
    auto it = values.find(name);
    if (it != values.end()) out[name] = devices.put(it->second, program.input_sharding(i), name);
  }
}

}  // namespace md
