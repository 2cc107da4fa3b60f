// The table of features by family in docs/models.md follows from what families, samplers and guidance declare.
#include <gtest/gtest.h>

#include <cstdlib>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/models/latent_colours.h"
#include "maxdiffusion/pipelines/guidance.h"
#include "maxdiffusion/pipelines/step_cache.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

const std::string kRoot = MD_SOURCE_DIR "/", kGoldens = kRoot + "tests/golden/";

/// A column: folders of the family's models, in which different features are found. "FOLDER+9": with a UNet of so many
/// channels.
struct Column {
  std::string title;
  std::vector<std::string> folders;
  std::string adapters = "sd";  // whose size tests/golden/adapters are of that are added to the first folder
};
const std::vector<Column>& columns() {
  static const std::vector<Column> all = {
      {"Stable Diffusion", {"pipelines/sd", "image_to_image/inpainting"}},
      {"SDXL", {"pipelines/sdxl", "pipelines/sdxl+9", "refiner/refiner"}, "sdxl"},
      {"FLUX.1", {"flux/dev", "image_to_image/flux_fill"}},
      {"FLUX.2", {"flux2/base"}},
      {"Z-Image", {"zimage/base"}},
      {"Qwen-Image", {"qwenimage/base", "qwenimage_edit/edit"}},
      {"Wan", {"wan/t2v", "wan/i2v", "wan/flf2v"}},
  };
  return all;
}

bool has_adapter(const Family& f, const std::string& name) {
  return std::ranges::any_of(f.spec().image_adapters, [&](const auto& a) { return a->name == name; });
}
bool begins(const Family& f) { return f.spec().image_to_image && !f.image_conditioning(); }
bool cache_fits(const Family& f, const StepCacheKeys& keys) {
  try {
    check_step_cache(keys, f.spec(), false);
    return true;
  } catch (const Error&) {
    return false;
  }
}
bool begins_with_image(const Family& f) { return begins(f) && !f.spec().videos(); }
bool is_flow(const ModelFolder& folder) { return is_flow_matching(parse_json(folder.scheduler_config())); }

/// A row: whether one of the family's models has the feature.
struct Feature {
  std::string title;
  bool (*of)(const ModelFolder& folder, const Family& family);
};
const std::vector<Feature>& features() {
  static const std::vector<Feature> all = {
      {"[image to image](sample.md#from-an-image)",
       [](const ModelFolder&, const Family& f) { return begins_with_image(f); }},
      {"[video to video](sample.md#from-an-image)",
       [](const ModelFolder&, const Family& f) { return begins(f) && f.spec().videos(); }},
      {"[inpainting, outpainting](sample.md#inpainting) of any model",
       [](const ModelFolder&, const Family& f) { return begins_with_image(f); }},
      {"models trained to inpaint", [](const ModelFolder&, const Family& f) { return !f.spec().inpainting.empty(); }},
      {"[`hires_scale`](sample.md#enlarged-samples)",
       [](const ModelFolder&, const Family& f) { return begins_with_image(f); }},
      {"[`upscale`](sample.md#enlarged-samples)",
       [](const ModelFolder&, const Family& f) { return !f.spec().videos(); }},
      {"[aesthetic scores](sample.md#refiner): the refiner",
       [](const ModelFolder&, const Family& f) {
         const auto& sizes = f.spec().size_conditioning;
         return !sizes.empty() && sizes[0].shape.dims[0] == 5;
       }},
      {"reference images", [](const ModelFolder&, const Family& f) { return f.reference_images() != nullptr; }},
      {"first frame of a video", [](const ModelFolder&, const Family& f) { return f.required_images() > 0; }},
      {"first and last frame of a video", [](const ModelFolder&, const Family& f) { return f.required_images() > 1; }},
      {"several [ControlNets](sample.md#controlnet)",
       [](const ModelFolder&, const Family& f) { return f.spec().controlnets.size() > 1; }},
      {"[IP-Adapter](sample.md#images-as-prompts)",
       [](const ModelFolder&, const Family& f) { return has_adapter(f, "ip_adapter"); }},
      {"T2I-Adapter", [](const ModelFolder&, const Family& f) { return has_adapter(f, "t2i_adapter"); }},
      {"[learned embeddings](sample.md#learned-embeddings): textual inversion",
       [](const ModelFolder&, const Family& f) {
         return std::ranges::any_of(f.spec().text_encoders,
                                    [](const TextEncoderSpec& e) { return e.embedding_width > 0; });
       }},
      {"[weights in prompts](sample.md#prompts), more than 77 tokens",
       [](const ModelFolder&, const Family& f) { return !f.spec().chunk_widths.empty(); }},
      {"[prompts that change](sample.md#prompts-that-change), `AND`",
       [](const ModelFolder&, const Family& f) { return !f.spec().chunk_widths.empty() && !f.spec().unguided_only; }},
      {"[LoRA](sample.md#lora-tags) by block and by step",
       [](const ModelFolder&, const Family& f) { return !f.spec().lora.targets.empty(); }},
      {"`prompt_2`", [](const ModelFolder&, const Family& f) { return !f.spec().second_text_fields().empty(); }},
      {"[guidance](sample.md#guidance): `cfg`, `apg`",
       [](const ModelFolder&, const Family& f) { return !f.spec().unguided_only; }},
      {"`cfg_zero`", [](const ModelFolder& folder, const Family&) { return is_flow(folder); }},
      {"perturbed attention", [](const ModelFolder&, const Family& f) { return !f.spec().self_attentions.empty(); }},
      {"skip-layer guidance", [](const ModelFolder&, const Family& f) { return f.spec().block_count > 0; }},
      {"FreeU", [](const ModelFolder&, const Family& f) { return f.spec().has_freeu; }},
      {"[previews](sample.md#previews) in true colours",
       [](const ModelFolder& folder, const Family& f) {
         if (!f.spec().videos()) return has_latent_colours(*f.spec().autoencoder);
         // The folder has another space of latents than the published models, which are the class's defaults.
         const ModelClass* vae = find_model_class(folder.components().at("vae").class_name);
         return has_latent_colours(*vae->autoencoder(vae->read(nlohmann::json::object())));
       }},
      {"previews and decoding by a tiny autoencoder",
       [](const ModelFolder&, const Family& f) { return !f.spec().autoencoder->component.empty(); }},
      {"[caches](sample.md#caches-between-steps): `use_first_block_cache`, `use_teacache`, `use_magcache`",
       [](const ModelFolder&, const Family& f) { return cache_fits(f, {.use_first_block_cache = true}); }},
      {"`use_magcache` with ratios that are known",
       [](const ModelFolder&, const Family& f) { return static_cast<bool>(f.spec().magcache_ratios); }},
      {"`use_teacache` with coefficients that are known",
       [](const ModelFolder&, const Family& f) { return static_cast<bool>(f.spec().teacache_coefficients); }},
      {"`use_deepcache`", [](const ModelFolder&, const Family& f) { return cache_fits(f, {.use_deepcache = true}); }},
      {"`use_cfg_cache`, `use_sen_cache`",
       [](const ModelFolder&, const Family& f) { return cache_fits(f, {.use_cfg_cache = true}); }},
  };
  return all;
}

/// The samplers by their words for a model.
std::string samplers_of(bool flow) {
  int64_t n = 0;
  for (const SamplerClass& s : sampler_classes())
    n += s.models == SamplerClass::noise_or_flow || (s.models == SamplerClass::flow) == flow ? 1 : 0;
  return std::to_string(n);
}

std::string table() {
  std::string head = "| |", line = "| --- |", samplers = "| [samplers](sample.md#samplers), classes |";
  std::vector<std::string> rows;
  for (const Feature& f : features()) rows.push_back("| " + f.title + " |");
  for (const Column& c : columns()) {
    head += " " + c.title + " |", line += " --- |";
    std::vector<ModelFolder> folders;
    std::vector<std::shared_ptr<const Family>> families;
    for (const std::string& folder : c.folders) {
      const size_t plus = folder.find('+');
      folders.push_back(ModelFolder::open(kGoldens + folder.substr(0, plus)));
      if (plus != folder.npos) {
        nlohmann::json config = parse_json(folders.back().files().at("unet/config.json"));
        config["in_channels"] = std::stoi(folder.substr(plus));
        folders.back().set_config("unet", config.dump());
      }
      if (folder.starts_with("flux2/")) folders.back().set_option("text_encoder_out_layers", {1, 2, 3});  // it has four
      families.push_back(make_family(folders.back()));
    }
    const std::string adapters = kGoldens + "adapters/" + c.adapters;
    ModelKeys keys;
    if (c.folders[0].starts_with("flux2/")) keys.text_encoder_out_layers = {1, 2, 3};
    const OpenedModel added =
        open_model(kGoldens + c.folders[0], keys,
                   {.purpose = Purpose::sampling,
                    .controlnets = {2, kGoldens + "pipelines/controlnet" + (c.adapters == "sdxl" ? "_sdxl" : "")},
                    .adapters = {.ip_adapter = adapters + "_ip", .t2i_adapter = adapters + "_t2i"}});
    folders.push_back(added.folder), families.push_back(added.family);
    samplers += " " + samplers_of(is_flow(folders[0])) + " |";
    for (size_t i = 0; i < rows.size(); ++i) {
      bool any = false;
      for (size_t k = 0; k < folders.size(); ++k) any = any || features()[i].of(folders[k], *families[k]);
      rows[i] += any ? " yes |" : " – |";
    }
  }
  std::string out = head + "\n" + line + "\n" + samplers + "\n";
  for (const std::string& row : rows) out += row + "\n";
  return out;
}

TEST(Features, OfFamiliesAreTheTableInTheManual) {
  const std::string path = kRoot + "docs/models.md", begin = "## Features of families\n", made = table();
  const std::string page = read_file(path);
  const size_t at = page.find(begin);
  ASSERT_NE(at, page.npos);
  const size_t from = page.find("| |", at), end = std::min(page.find("\n\n", from), page.size() - 1) + 1;
  ASSERT_NE(from, page.npos);
  if (std::getenv("MD_UPDATE_DOCS")) write_file_atomic(path, page.substr(0, from) + made + page.substr(end));
  EXPECT_TRUE(read_file(path).find(made) != page.npos) << "MD_UPDATE_DOCS=1 writes it:\n" << made;
}

}  // namespace
}  // namespace md
