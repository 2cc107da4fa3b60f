// `serve`: models behind HTTP. Each word that is not a key names a model, as for `generate`.
#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/model_words.h"
#include "maxdiffusion/commands/plan_generate.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/server/server.h"

namespace md {
namespace {

bool is_key(const std::string& word) { return word.starts_with('-') || word.find('=') != word.npos; }

/// "models/sdxl/" → "sdxl"; "runs/mine" → "mine"; "stabilityai/sdxl-turbo" → "sdxl-turbo"; "v1.safetensors" → "v1".
std::string name_of(const std::string& word) {
  std::filesystem::path path(word);
  if (path.filename().empty()) path = path.parent_path();
  return path.extension() == ".safetensors" || path.extension() == ".yml" || path.extension() == ".gguf"
             ? path.stem().string()
             : path.filename().string();
}

ServedModel served(const std::string& word, const Words& keys) {
  const bool config = word.ends_with(".yml") || std::filesystem::exists(std::filesystem::path(word) / "config.yml");
  Words words = keys;
  if (config) words.insert(words.begin(), config_file(word));
  const GenerateRequest request =
      serve_request(config ? config_of("serve", words) : config_of_keys(words_of_model(word, keys)));
  const GeneratePlan plan = plan_generate(request);
  return {name_of(word), plan.model, plan.pipeline, plan.items.at(0).sampling.request, request.lora_dir, request.rules};
}

void serve_models(const Words& words) {
  ServeKeys keys;
  const Words rest = take_keys(words, keys);
  const auto first_key = std::ranges::find_if(rest, is_key);
  const Words models(rest.begin(), first_key), of_runs(first_key, rest.end());
  if (!keys.runs.empty())
    check(std::filesystem::is_directory(keys.runs), Code::io,
          "runs '{}' is not a folder; expected one with the folders of training runs, on this machine", keys.runs);
  if (models.empty() && keys.runs.empty())
    throw Error(Code::invalid_config,
                "serve: the model is missing; expected a folder, a file, a run or a config, or runs=FOLDER")
        .note(fmt::format("try: {} serve MODEL_FOLDER port=7860", program_name()));
  if (models.empty() && !of_runs.empty())
    throw Error(Code::invalid_config,
                fmt::format("{} is given without a model; expected a model, or keys of the server",
                            of_runs.front().substr(0, of_runs.front().find('='))));
  std::vector<ServedModel> all;
  for (const std::string& word : models) all.push_back(served(word, of_runs));
  serve(std::move(all), keys);
}

void print_serve_keys(const KeyPrinter& print) {
  print_command_keys<ServeKeys>(print);
  print_config_keys(print, {"devices", "model", "LoRA", "samples"});
}

}  // namespace

Command serve_command() {
  return {"serve", "MODEL… [port=7860] [key=value …]",
          "serve models over HTTP: OpenAI's images API, AUTOMATIC1111's, and a page of its own", serve_models,
          print_serve_keys};
}

}  // namespace md
