#include "maxdiffusion/train/state.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/families/model_weights.h"

namespace md {
namespace {

using nlohmann::json;

HostArray yes() {
  const uint8_t value = 1;
  return HostArray::of<uint8_t>({DType::pred, {}}, {&value, 1});
}

ParamTable frozen_part(const ParamTable& params) {
  ParamTable out;
  for (const Param& p : params.params())
    if (!p.trainable) out.add(p);
  return out;
}

/// Components whose every parameter is trained: a checkpoint holds them as the model's own file.
std::vector<std::string> whole_components(const ParamTable& params) {
  std::map<std::string, bool> whole;
  for (const Param& p : params.params()) whole[p.model] = whole.try_emplace(p.model, true).first->second && p.trainable;
  std::vector<std::string> names;
  for (const auto& [name, all] : whole)
    if (all) names.push_back(name);
  return names;
}

bool has_masters(const NamedPieces& state, const ParamTable& params, const std::string& component) {
  return std::ranges::any_of(
      params.params(), [&](const Param& p) { return p.model == component && state.contains("master/" + p.input); });
}

HostState beginning(const StepPrograms& programs, NamedPieces values, const StepOptions& step) {
  values = fresh_state(programs.params(), std::move(values), step);
  for (const std::string& name : programs.state_names())
    if (name == "step" || name.starts_with("updates/")) values[name] = scalar_s32(0);
  values["healthy"] = yes();
  return {.values = std::move(values)};
}

bool is_moment(const std::string& name) { return name.starts_with("adam_m/") || name.starts_with("adam_v/"); }

/// Zeros for moments that the state lacks; whether there are any.
bool start_moments(const ParamTable& params, NamedPieces& state) {
  bool any = false;
  for (const Param& p : params.params()) {
    if (!p.trainable || state.contains("adam_m/" + p.input) || !state.contains(p.input)) continue;
    state["adam_m/" + p.input] = state["adam_v/" + p.input] = state.at(p.input).cast(DType::f32).zeros();
    any = true;
  }
  return any;
}

HostState restored(const ParamTable& params, const std::string& checkpoint_dir, int64_t at, uint64_t seed,
                   const StepOptions& step, NamedPieces frozen) {
  const CheckpointContent c = read_training_state(checkpoint_dir, at);
  const json info = json::parse(c.state_json);
  if (info.at("seed") != seed)
    log_warning("checkpoint {}/{} was made with seed {}, this run has {}: random draws differ from here on",
                checkpoint_dir, at, info.at("seed").dump(), seed);
  NamedPieces values = c.state;
  // Parameters are the rounding of their masters, or in the models' own files, unless those hold their averages.
  const ParamTable wide = in_f32(params);
  if (step.ema_decay == 0)
    for (const std::string& component : whole_components(params))
      if (!has_masters(values, params, component))
        values.merge(
            as_pieces(open_component(wide, component, checkpoint_folder(checkpoint_dir, at) + "/" + component)()));
  values = restored_state(params, std::move(values), step);
  if (start_moments(params, values))
    log_warning("checkpoint {}/{} has no moments of the optimizer, as save_optimizer=false asks: they start from zero",
                checkpoint_dir, at);
  values.merge(frozen);
  values["healthy"] = yes();
  const Position data{info.at("epoch"), info.at("index"), info.value("shard", int64_t{0}),
                      info.value("offset", int64_t{0}), info.value("taken", int64_t{0})};
  return {std::move(values), info.at("step"), data};
}

/// The arrays' pieces, copied to the host without stopping the device: starts now, waits when called.
std::function<NamedPieces()> fetch_all(const Devices& devices, const ArrayMap& arrays, Which which,
                                       bool moments = true) {
  auto pending = std::make_shared<std::map<std::string, PendingPieces>>();
  for (const auto& [name, a] : arrays)
    if (moments || !is_moment(name)) (*pending)[name] = fetch_pieces(devices, a, which);
  return [pending] {
    NamedPieces v;
    for (auto& [name, p] : *pending) v[name] = p.wait();
    return v;
  };
}

}  // namespace

Array* TrainState::saved_value(const std::string& input) {
  for (const std::string& key : {"ema/" + input, input})
    if (auto a = arrays.find(key); a != arrays.end()) return &a->second;
  return &kept.at(input);
}

std::function<HostState()> open_state(const StepPrograms& programs, const StepOptions& step,
                                      const std::string& checkpoint_dir, uint64_t seed, const InitialValues& initial) {
  const std::vector<int64_t> saved = list_checkpoints(checkpoint_dir);
  const ParamTable& params = programs.params();
  if (saved.empty()) {
    auto wide = std::make_shared<const ParamTable>(in_f32(params));
    return [&programs, step, wide, make = initial(*wide)] { return beginning(programs, make(), step); };
  }
  auto frozen = std::make_shared<const ParamTable>(frozen_part(params));
  return [&params, step, checkpoint_dir, seed, at = saved.back(), frozen, make = initial(*frozen)] {
    return restored(params, checkpoint_dir, at, seed, step, make());
  };
}

TrainState place_state(const Devices& devices, const StepPrograms& programs, const HostState& host,
                       const std::string& checkpoint_dir) {
  TrainState state;
  state.step = host.step;
  state.data = host.data;
  for (size_t i = 0; i < programs.count(); ++i) {
    NamedPieces left;
    for (const auto& [name, value] : host.values)
      if (!state.arrays.contains(name)) left[name] = value;
    place(devices, programs.program(i), left, state.arrays);
  }
  for (const Param& p : programs.params().params())
    if (!p.trainable)
      if (auto a = state.arrays.extract(p.input)) state.kept.insert(std::move(a));
  for (const std::string& name : programs.state_names())
    check(state.arrays.contains(name), Code::io,
          "checkpoint {}/{} has no '{}': it was made by another kind of run; choose another run_name", checkpoint_dir,
          state.step, name);
  return state;
}

HostArrays trained_values(const Devices& devices, const StepPrograms& programs, const TrainState& state) {
  return as_arrays(model_values(programs.params(), fetch_all(devices, state.arrays, Which::local)()));
}

StateSaver::StateSaver(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                       std::string checkpoint_dir, int64_t keep, bool moments, uint64_t seed,
                       CompleteCheckpoint complete)
    : devices_(devices),
      programs_(programs),
      averaged_(step.ema_decay > 0),
      moments_(moments),
      checkpoint_dir_(std::move(checkpoint_dir)),
      seed_(seed),
      complete_(std::move(complete)),
      writer_(checkpoint_dir_, static_cast<int>(keep)) {}

void StateSaver::save(const TrainState& state, int64_t at, Position position) {
  const json info = {{"maxdiffusion_version", version()},
                     {"step", at},
                     {"epoch", position.epoch},
                     {"index", position.index},
                     {"seed", seed_},
                     {"shard", position.shard},
                     {"offset", position.offset},
                     {"taken", position.taken}};
  writer_.save(at, [values = fetch_all(devices_, state.arrays, Which::owned, moments_), info, this] {
    const ParamTable& params = programs_.params();
    CheckpointContent c;
    c.state = values();
    const NamedPieces trained = model_values(params, c.state);
    for (const std::string& component : whole_components(params)) {
      c.weights[component] = published(params, component, trained);
      for (const Param& p : params.params())  // what the model's file or the master says already
        if (p.model == component && (!averaged_ || c.state.contains("master/" + p.input))) c.state.erase(p.input);
    }
    c.state_json = info.dump(2);
    if (complete_) complete_(c, params, trained);
    return c;
  });
}

}  // namespace md
