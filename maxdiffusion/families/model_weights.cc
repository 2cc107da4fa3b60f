#include "maxdiffusion/families/model_weights.h"

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/hub_cache.h"
#include "maxdiffusion/checkpoint/weights.h"

namespace md {
namespace {

/// What `unet_checkpoint` names: the component's folder of a model folder, or that folder itself.
std::string component_folder(const std::string& name, const std::string& component) {
  const std::string folder = local_folder(name);
  return std::filesystem::is_directory(folder + "/" + component) ? folder + "/" + component : folder;
}

bool random_by_key(const Family& family, const ModelKeys& keys, const std::string& component) {
  if (component == family.denoiser()) return keys.train_new_unet;
  if (component == family.autoencoder()) return keys.train_new_vae;
  return std::ranges::count(family.text_encoders(), component) > 0 && keys.random_text_encoder;
}

/// Files that replace the denoiser's weights; empty: none.
std::string replacement(const Family& family, const ModelKeys& keys) {
  if (!keys.lightning_repo.empty()) return local_folder(keys.lightning_repo) + "/" + keys.lightning_ckpt;
  return keys.unet_checkpoint.empty() ? "" : component_folder(keys.unet_checkpoint, family.denoiser());
}

bool has_weights(const std::string& folder) {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(folder, error))
    if (file.path().extension() == ".safetensors") return true;
  return false;
}

}  // namespace

ModelWeights ModelWeights::for_training(const ModelFolder& folder, const Family& family, const ModelKeys& keys,
                                        uint64_t seed) {
  ModelWeights w;
  w.seed_ = seed;
  for (const auto& [name, component] : folder.components())
    if (!random_by_key(family, keys, name)) w.locations_[name] = component.weights;
  const auto denoiser = w.locations_.find(family.denoiser());
  if (const std::string files = replacement(family, keys); !files.empty() && denoiser != w.locations_.end())
    denoiser->second = files;
  return w;
}

ModelWeights ModelWeights::for_sampling(const ModelFolder& folder, const Family& family, const ModelKeys& keys,
                                        uint64_t seed) {
  ModelWeights w;
  w.seed_ = seed;
  for (const auto& [name, component] : folder.components())
    if (!random_by_key(family, keys, name) || has_weights(component.weights)) w.locations_[name] = component.weights;
  if (const std::string files = replacement(family, keys); !files.empty()) w.locations_[family.denoiser()] = files;
  return w;
}

std::string ModelWeights::location(const std::string& component) const {
  const auto found = locations_.find(component);
  return given_.contains(component) || found == locations_.end() ? "" : found->second;
}

std::function<NamedPieces()> ModelWeights::open(const ParamTable& params, const std::string& component) const {
  if (const auto given = given_.find(component); given != given_.end())
    return [&params, component, &values = given->second] { return as_pieces(of_component(params, component, values)); };
  if (const std::string files = location(component); !files.empty())
    return [read = open_component(params, component, files)] { return as_pieces(read()); };
  return [&params, component, slices = slices_, seed = seed_] {
    NamedPieces out;
    for (const Param& p : params.params()) {
      if (p.model != component) continue;
      std::vector<Piece> pieces;
      for (const Slice& slice : slices(p)) pieces.push_back({slice, initial_value(p, seed, slice)});
      out[p.input] = {p.shape, std::move(pieces)};
    }
    return out;
  };
}

HostArrays of_component(const ParamTable& params, const std::string& component, const HostArrays& all) {
  HostArrays v;
  for (const Param& p : params.params())
    if (p.model == component) v[p.input] = all.at(p.input).cast(p.shape.dtype);
  return v;
}

std::function<HostArrays()> open_component(const ParamTable& params, const std::string& component,
                                           const std::string& weights) {
  std::vector<const Param*> own;
  std::vector<WantedWeight> wanted;
  for (const Param& p : params.params())
    if (p.model == component) {
      own.push_back(&p);
      wanted.push_back({p.path, p.shape});
    }
  if (own.empty()) return [] { return HostArrays(); };
  return [own, read = open_weights(weights, wanted)] {
    HostArrays out, found = read();
    for (const Param* p : own) out[p->input] = found.at(p->path);
    return out;
  };
}

NamedPieces published(const ParamTable& params, const std::string& component, const NamedPieces& values) {
  NamedPieces out;
  for (const Param& p : params.params())
    if (p.model == component) out.merge(unstacked(p.path, values.at(p.input)));
  return out;
}

}  // namespace md
