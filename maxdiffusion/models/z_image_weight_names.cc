#include "maxdiffusion/models/z_image_weight_names.h"

#include <string>
#include <string_view>
#include <vector>

namespace md {
namespace {

struct Respelling {
  std::string_view diffusers, original;
  std::vector<int64_t> part = {0};
  int64_t parts = 1;
};

const std::vector<Respelling>& rows() {
  static const std::vector<Respelling> all = {
      {"all_x_embedder.2-1.", "x_embedder."},          {"all_final_layer.2-1.", "final_layer."},
      {".attention.norm_q.", ".attention.q_norm."},    {".attention.norm_k.", ".attention.k_norm."},
      {".attention.to_out.0.", ".attention.out."},     {".attention.to_q.", ".attention.qkv.", {0}, 3},
      {".attention.to_k.", ".attention.qkv.", {1}, 3}, {".attention.to_v.", ".attention.qkv.", {2}, 3},
  };
  return all;
}

std::vector<WeightAlias> names_of(const std::string& name) {
  WeightAlias original{.name = name};
  for (const Respelling& r : rows())
    if (const size_t at = name.find(r.diffusers); at != std::string::npos) {
      original.name.replace(at, r.diffusers.size(), r.original);
      original.part = r.part, original.parts = r.parts;
    }
  std::vector<WeightAlias> names;
  for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model."}) {
    original.prefix = prefix;
    names.push_back(original);
  }
  return names;
}

}  // namespace

WeightNameMap original_z_image_names(const ZImageTransformerConfig&) {
  WeightNameMap names{.aliases = names_of, .architecture = "lumina2"};
  for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model."})
    names.unneeded.push_back(std::string(prefix) + "norm_final.");
  return names;
}

}  // namespace md
