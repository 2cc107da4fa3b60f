// Settings in images of other programs, as keys: AUTOMATIC1111's web UI and Forge (the PNG text `parameters`), ComfyUI
// (the PNG text `prompt`, JSON).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace md {

struct ForeignSettings {
  std::map<std::string, std::string> keys;  // key → its value as YAML
  std::vector<std::string> unused;          // "Version: v1.10.1": settings without a key
  std::string prompt_syntax;                // value of that key for models with CLIP's text encoders
  std::string automatic_schedule;           // sigma_schedule for models that are not flow-matching; empty: none
};

/// `text`: the prompt, "Negative prompt: …", and a last line of settings, "Steps: 20, Sampler: Euler a, …". A last line
/// with fewer than three settings belongs to the prompt, as in the web UI.
ForeignSettings settings_of_web_ui(const std::string& text);
/// The same text as names and values, in order, as the web UI's interface gives them: Prompt, Negative prompt, Steps,
/// …; a size W×H is two, Size-1 and Size-2.
std::vector<std::pair<std::string, std::string>> fields_of_web_ui(const std::string& text);
/// `text`: ComfyUI's graph. The settings are those of its first sampling node and the nodes that lead to it. Throws io,
/// naming `image`, if it is no such graph or has no sampling node.
ForeignSettings settings_of_comfyui(const std::string& text, const std::string& image);
/// The settings in a PNG file's texts (keyword → text); none: no other program's. Throws as settings_of_comfyui.
std::optional<ForeignSettings> foreign_settings(const std::map<std::string, std::string>& texts,
                                                const std::string& image);

}  // namespace md
