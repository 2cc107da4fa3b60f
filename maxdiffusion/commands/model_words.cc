#include "maxdiffusion/commands/model_words.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/settings/requests.h"

namespace md {
namespace fs = std::filesystem;

bool names_model(const std::string& word) {
  if (fs::is_directory(word))
    return fs::exists(fs::path(word) / "model_index.json") && !fs::exists(fs::path(word) / "config.yml");
  if (word.starts_with("hf://") || word.ends_with(".safetensors") || word.ends_with(".gguf")) return true;
  const bool is_key = word.starts_with('-') || word.find('=') != word.npos;
  const size_t slash = word.find('/');
  return !is_key && slash != word.npos && slash == word.rfind('/') && !fs::exists(word) &&
         !fs::exists(word.substr(0, slash)) && !word.ends_with(".yml") && !word.ends_with(".yaml") &&
         !word.ends_with(".png");
}

Words words_of_model(const std::string& model, const Words& keys) {
  Words words = {"pretrained_model_name_or_path=" + model};
  const auto with_keys = [&] {
    Words all = words;
    all.insert(all.end(), keys.begin(), keys.end());
    return all;
  };
  const RunSearch search = run_search(config_of_keys(with_keys()));
  const std::shared_ptr<const Family> family =
      make_family(described_folder(model_on_this_machine(model), search.model));
  const FamilySpec& spec = family->spec();
  const SampleDefaults& d = spec.sample_defaults;
  const auto is_set = [&](const char* key) { return search.on_command_line.contains(key); };
  std::vector<std::string> settings;
  const auto set = [&](const std::string& key, const auto& value) {
    words.push_back(fmt::format("{}={}", key, value));
    settings.push_back(words.back());
  };
  // `resolution` is the size of samples without an image, whose size they would have.
  const bool begins_with_media = is_set("image") && !family->image_conditioning();
  if (!is_set("resolution") && !(is_set("height") && is_set("width"))) {
    if (d.height == d.width) {
      set("resolution", d.height);
    } else if (!begins_with_media) {
      if (!is_set("height")) set("height", d.height);
      if (!is_set("width")) set("width", d.width);
    }
  }
  if (!is_set("num_inference_steps")) set("num_inference_steps", d.num_inference_steps);
  const char* guidance = spec.true_guidance && !spec.embedded_guidance ? "true_cfg_scale" : "guidance_scale";
  if (!spec.unguided_only && !is_set(guidance) && !is_set("do_classifier_free_guidance"))
    set(guidance, d.guidance_scale);
  if (!settings.empty()) log_info("model defaults: {}", fmt::join(settings, " "));
  return with_keys();
}

}  // namespace md
