#include "maxdiffusion/run/trained_model.h"

#include <algorithm>
#include <set>

#include "maxdiffusion/families/learned_embeddings.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/run/lora_files.h"

namespace md {
namespace {

/// Initial values of the LoRA matrices, computed when called.
std::function<NamedShards()> initial_matrices(const ModelComponents& m, const TrainPlan& plan,
                                              const ParamTable& params) {
  check_lora_targets(plan.lora->targets, plan.lora->config, params);
  if (plan.lora->init.empty()) return [&params, seed = plan.run.seed] { return as_shards(initial_lora(params, seed)); };
  const LoraFile file =
      read_lora(plan.lora->init, lora_targets(m.folder(), *m.family()), plan.denoisers[0], plan.lora->missing);
  return [values = as_shards(initial_lora(params, file, plan.lora->config))] { return values; };
}

/// The trained rows as learned embeddings.
LearnedEmbeddings learned(const TrainPlan& plan, const ParamTable& params, const NamedShards& trained) {
  LearnedEmbeddings all;
  for (const Param& p : params.params())
    if (nn::is_added_rows(p))
      all[p.model].push_back({plan.inversion->placeholder_token, trained.at(p.input).whole().cast(DType::f32)});
  return all;
}

}  // namespace

void check_trained_weights(const ModelComponents& m, const TrainPlan& plan) {
  if (plan.lora || plan.inversion) return;
  for (const auto& [name, component] : m.folder().components())
    if (plan.trains(name)) m.check_not_quantized(name);
}

std::function<NamedShards()> initial_values(ModelComponents& m, const TrainPlan& plan, const ParamTable& params) {
  auto base = std::make_shared<const ParamTable>(base_params(params));
  std::set<std::string> components;
  for (const Param& p : base->params()) components.insert(p.model);
  std::vector<std::function<NamedShards()>> parts;
  parts.reserve(components.size() + 1);
  for (const std::string& component : components) parts.push_back(m.open_weights(*base, component));
  if (std::ranges::any_of(params.params(), is_lora)) parts.push_back(initial_matrices(m, plan, params));
  return [parts, base, &params, measures = plan.lora && plan.lora->init.empty()] {
    NamedShards all;
    for (const auto& part : parts) all.merge(part());
    if (measures)
      all.merge(as_shards(initial_magnitudes(params, [&](const std::string& name) { return all.at(name).whole(); })));
    return all;
  };
}

std::optional<StateInfo> check_start(ModelComponents& m, const TrainPlan& plan, const std::string& title) {
  check_trained_weights(m, plan);
  const StepPrograms programs(m.devices(), pointers(plan.tasks), plan.loop.step, title);
  initial_values(m, plan, programs.params());
  return check_resumes(m.devices(), programs, plan.loop.step,
                       {.checkpoint_dir = plan.loop.checkpoint_dir(),
                        .seed = plan.run.seed,
                        .single_replica = plan.loop.keys.enable_single_replica_ckpt_restoring,
                        .before_commit = {},
                        .also_trained = plan.loop.also_trained});
}

void complete_checkpoint(ModelComponents& m, const TrainPlan& plan, CheckpointContent& content,
                         const ParamTable& params, const NamedShards& trained) {
  m.complete(content);
  if (plan.inversion)
    content.write_extra_files = [&m, embeddings = learned(plan, params, trained)](const std::string& to) {
      write_learned_embeddings(to, m.family()->spec(), embeddings);
    };
  if (!plan.lora) return;
  content.write_extra_files =
      [&m, &plan, file = trained_lora(params, as_arrays(trained), plan.lora->config)](const std::string& to) {
        const Family& family = *m.family();
        const char* layout = family.spec().lora.original_names ? "comfyui" : "kohya";
        for (size_t i = 0; i < plan.denoisers.size(); ++i) {
          LoraFile merged = file;  // also has those of the text encoders
          for (const std::string& other : plan.denoisers)
            if (other != plan.denoisers[i]) merged.erase(other);
          const std::string folder = plan.denoisers.size() == 1 ? to : to + "/" + kExpertFolders[i];
          write_peft_lora(folder, merged, lora_names(m.folder(), family));
          write_peft_folders(folder, merged);
          write_lora_layout(fmt::format("{}/lora_{}.safetensors", folder, layout), merged, m.folder(), family, layout,
                            plan.lora->metadata);
        }
      };
}

WeightsOf weights_with(ModelComponents& m, const TrainPlan& plan, const ParamTable& params, const HostArrays& trained) {
  return [&](const ParamTable& p, const std::string& component) {
    const bool changes = plan.trains(component);
    if (changes && plan.inversion) {
      HostArrays values = as_arrays(m.open_weights(nn::without_added_rows(p), component)());
      for (const Param& one : p.params())
        if (one.model == component && nn::is_added_rows(one))
          values[one.input] = trained.at(one.input).cast(one.shape.dtype);
      return values;
    }
    if (changes && !plan.lora) return component_weights(p, component, trained);
    if (changes && has_few_bits(p, component)) {  // LoRA is merged before quantizing
      const ParamTable plain = before_few_bits(p, component);
      HostArrays values = as_arrays(m.open_weights(plain, component)());
      merge_loras({{trained_lora(params, trained, plan.lora->config), 1}}, plain, values);
      return few_bits_values(p, component, values);
    }
    HostArrays values = as_arrays(m.open_weights(p, component)());
    if (changes) merge_loras({{trained_lora(params, trained, plan.lora->config), 1}}, p, values);
    return values;
  };
}

}  // namespace md
