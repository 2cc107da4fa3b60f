#include "maxdiffusion/train/state.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/finite.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/layer_path.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/checkpoint/checkpoint_reader.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/location.h"
#include "maxdiffusion/train/state_info.h"

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

/// Components whose parameters are all trained: checkpoints store them as the model's own files.
std::vector<std::string> whole_components(const ParamTable& params) {
  std::map<std::string, bool> whole;
  for (const Param& p : params.params()) whole[p.model] = whole.try_emplace(p.model, true).first->second && p.trainable;
  std::vector<std::string> names;
  for (const auto& [name, all] : whole)
    if (all) names.push_back(name);
  return names;
}

HostState beginning(const StepPrograms& programs, NamedShards values, const StepOptions& step) {
  values = initial_state(programs.params(), std::move(values), step);
  for (const std::string& name : programs.state_names())
    if (name == "step" || name.starts_with("updates/")) values[name] = scalar_s32(0);
  values["healthy"] = yes();
  return {.values = std::move(values)};
}

/// "'adam_m/unet/conv_in.weight' holds nan at element 30" for the first number that is not finite; empty: all are.
std::string not_finite(const std::string& name, const HostArray& values) {
  const std::optional<int64_t> at = first_not_finite(values);
  if (!at) return "";
  const HostArray flat = values.reshaped({values.shape().elements()});
  return fmt::format("'{}' holds {} at element {}", name, rows(flat, *at, 1).to_doubles()[0], *at);
}

/// Reads the arrays of parameters for devices of this process.
class StateReader {
 public:
  /// `trained`: StateInfo::trained of the checkpoint.
  StateReader(const Devices& devices, const ParamTable& params, const StepOptions& step, CheckpointReader& from,
              std::vector<std::string> trained)
      : devices_(devices), params_(params), step_(step), from_(from), trained_(std::move(trained)) {}

  /// The arrays of the training state that a run with these slots needs.
  NamedShards arrays(const std::vector<StateSlot>& slots) {
    const auto [parts, names] = wanted(slots);
    return read_all(parts, names);
  }

  /// Reads parameters that the arrays lack from the models' own files, unless these hold averages.
  void add_weights(NamedShards& values) {
    const auto [parts, inputs] = weights([&](const std::string& name) { return values.contains(name); });
    values.merge(read_all(parts, inputs));
  }

  /// Throws as arrays() and add_weights() do for what headers show, and invalid_config naming an array that is missing.
  void check_headers(const std::vector<StateSlot>& slots, const std::set<std::string>& state_names) {
    const std::vector<std::string> found = wanted(slots).second;
    std::set<std::string> have(found.begin(), found.end());
    const std::vector<std::string> of_models =
        weights([&](const std::string& name) { return have.contains(name); }).second;
    have.insert(of_models.begin(), of_models.end());
    for (const std::string& name : state_names) {
      const bool starts_again = name == "healthy" || is_of_optimizer(name) || name.starts_with(state_prefix::kMaster);
      if (starts_again || have.contains(name) || have.contains(state_prefix::kMaster + name)) continue;
      Error e(Code::invalid_config,
              fmt::format("checkpoint {} has no '{}', which this run needs", from_.folder(), name));
      throw e.note(name.starts_with(state_prefix::kAverage)
                       ? "try: ema_decay=0, as in the run that wrote it, or another run_name"
                       : fmt::format("try: the keys of the run that wrote it, or another run_name, with "
                                     "pretrained_model_name_or_path={} to train on from its weights",
                                     from_.folder()));
    }
  }

 private:
  using Wanted = std::pair<CheckpointReader::Parts, std::vector<std::string>>;  // parts, and the names they are read as

  /// What arrays() reads.
  Wanted wanted(const std::vector<StateSlot>& slots) {
    CheckpointReader::Parts parts;
    std::vector<std::string> names;
    for (const auto& [name, array] : from_.arrays())
      if (array.shape.rank() == 0) {
        parts.emplace_back(name, std::vector<Slice>{Slice::all({})});
        names.push_back(name);
      }
    const auto want = [&](const std::string& name, const StateArray& of) {
      const std::optional<std::string> found = from_.with_layers(name, of.shape.dims);
      if (of.shape.rank() == 0 || (!found && !from_.contains(name))) return;
      if (found && *found != name)
        log_info_once("checkpoint {}: scan_layers or blocks_to_swap were others; its layers are stacked as now",
                      from_.folder());
      add(parts, found.value_or(name), of);
      names.push_back(name);
    };
    for (const Param& p : params_.params()) {
      want(p.input, {p.shape, p.axes});
      for (const StateSlot& slot : slots)
        if (const std::optional<StateArray> of = state_array(slot, p, step_)) want(slot.prefix + p.input, *of);
    }
    return {parts, names};
  }

  /// Whether this is an array or scalar of the optimizer's state.
  bool is_of_optimizer(const std::string& name) const {
    return std::ranges::any_of(state_prefixes(*make_optimizer(step_.optim)),
                               [&](const std::string& prefix) { return name.starts_with(prefix); });
  }

  /// The weights that add_weights() reads if the arrays of the training state are those that `contains` knows.
  Wanted weights(const std::function<bool(const std::string&)>& contains) {
    CheckpointReader::Parts parts;
    std::vector<std::string> inputs;
    for (const std::string& component : whole_components(params_))
      for (const Param& p : params_.params()) {
        if (p.model != component || contains(p.input) || contains(state_prefix::kMaster + p.input) ||
            from_.with_layers(state_prefix::kAverage + p.input, p.shape.dims))
          continue;
        if (opened_.insert(component).second)
          check(from_.add_component(component), Code::io, "read '{}': it has no weights of '{}'", from_.folder(),
                component);
        const std::string name = array_of_weight(component, p.path);
        // Weights that the checkpoint's run did not train are a copy of its model's files, which may have other names.
        const bool copied = !trained_.empty() && std::ranges::count(trained_, component) == 0;
        if (copied && !from_.contains(p.stacked > 0 ? layer_path(name, 0) : name)) continue;
        if (p.stacked > 0) from_.add_stack(name, p.stacked);
        add(parts, name, {p.shape, p.axes});
        inputs.push_back(p.input);
      }
    return {parts, inputs};
  }

  NamedShards read_all(const CheckpointReader::Parts& parts, const std::vector<std::string>& names) {
    from_.fetch(parts);
    NamedShards values;
    for (size_t i = 0; i < parts.size(); ++i) values[names[i]] = read(parts[i].first, parts[i].second);
    return values;
  }

  /// Throws io if a number is not finite.
  ShardedArray read(const std::string& name, const std::vector<Slice>& slices) {
    ShardedArray a = from_.read(name, slices);
    for (Shard& p : a.shards) {
      if (const std::string fault = not_finite(name, p.values); !fault.empty())
        fail(Code::io, "read '{}': {}, from which training cannot resume", from_.folder(), fault);
      // On a CPU, arrays with a sole owner become the device's without a copy.
      if (devices_.platform() == Platform::cpu && !p.values.sole()) p.values = copy_of(p.values);
    }
    from_.let_go_of_files();
    return a;
  }

  void add(CheckpointReader::Parts& parts, const std::string& name, const StateArray& of) const {
    const Shape& found = from_.shape(name);
    check(found.dims == of.shape.dims, Code::invalid_config,
          "checkpoint {}: '{}' is {}; expected {}, as in this run's model; choose another run_name", from_.folder(),
          name, to_string(found), to_string(of.shape));
    parts.emplace_back(name, local_slices(devices_, of.axes, of.shape.dims));
  }

  const Devices& devices_;
  const ParamTable& params_;
  const StepOptions& step_;
  CheckpointReader& from_;
  std::vector<std::string> trained_;
  std::set<std::string> opened_;
};

/// Throws invalid_config if another optimizer wrote the checkpoint's state.
void check_optimizer(const CheckpointReader& reader, const std::string& optimizer) {
  for (const std::string& other : optimizer_names()) {
    OptimConfig config;
    config.optimizer = other;
    for (const std::string& prefix : state_prefixes(*make_optimizer(config)))
      if (const auto a = reader.arrays().lower_bound(prefix);
          other != optimizer && a != reader.arrays().end() && a->first.starts_with(prefix))
        throw Error(Code::invalid_config,
                    fmt::format("optimizer is '{}', but checkpoint {} holds the state of '{}', such as '{}'", optimizer,
                                reader.folder(), other, a->first))
            .note(fmt::format("try: optimizer={}, or another run_name", other));
  }
}

/// A parameter's name with '*' for each number of a layer, so that stacked and single layers have the same name.
std::string without_layer_numbers(const std::string& input) {
  static const std::regex number(R"(\.[0-9]+(?=\.))");
  return std::regex_replace(input, number, ".*");
}

/// Throws invalid_config if the checkpoint holds something trained that this run does not train: the checkpoints of
/// this run would lack it.
void check_nothing_trained_is_dropped(const CheckpointReader& reader, const ParamTable& params, const StateInfo& info,
                                      bool averages, const std::set<std::string>& also_trained) {
  std::set<std::string> components = also_trained, trained;
  for (const Param& p : params.params())
    if (p.trainable) components.insert(p.model), trained.insert(without_layer_numbers(p.input));
  std::set<std::string> prefixes = {state_prefix::kAverage, state_prefix::kMaster};
  for (const std::string& name : optimizer_names()) {
    OptimConfig config;
    config.optimizer = name;
    for (const std::string& prefix : state_prefixes(*make_optimizer(config))) prefixes.insert(prefix);
  }
  const auto refuse = [&](const std::string& what) {
    throw Error(Code::invalid_config,
                fmt::format("checkpoint {} holds '{}', which this run does not train and its checkpoints would lack",
                            reader.folder(), what))
        .note(fmt::format("try: the keys of the run that wrote it (train_lora, train_text_encoder, train_expert, "
                          "train_new_vae, placeholder_token, …); or "
                          "another run_name, with pretrained_model_name_or_path={} to train on from its weights",
                          reader.folder()));
  };
  for (const std::string& component : info.trained)
    if (!components.contains(component)) refuse(component);
  const auto average = reader.arrays().lower_bound(state_prefix::kAverage);
  if (!averages && average != reader.arrays().end() && average->first.starts_with(state_prefix::kAverage))
    throw Error(Code::invalid_config, fmt::format("checkpoint {} holds moving averages, such as '{}', and ema_decay is "
                                                  "0: this run's checkpoints would lack them",
                                                  reader.folder(), average->first))
        .note(fmt::format("try: ema_decay as in the run that wrote it; or another run_name, with "
                          "pretrained_model_name_or_path={} to train on from the averages",
                          reader.folder()));
  for (const auto& [name, array] : reader.arrays()) {
    if (array.shape.rank() == 0 || name.starts_with("weights/")) continue;  // array_of_weight
    std::string input = name;
    for (const std::string& prefix : prefixes)
      if (name.starts_with(prefix)) input = name.substr(prefix.size());
    if (!trained.contains(without_layer_numbers(input))) refuse(name);
  }
}

/// The kinds of arrays of trained parameters that a checkpoint of this run may hold.
std::vector<StateSlot> slots_of_checkpoint(const StepOptions& step) {
  std::vector<StateSlot> slots = state_slots(step);
  slots.push_back({state_prefix::kMaster});
  return slots;
}

/// Throws invalid_config if this run must not continue from the checkpoint, io if state.json is damaged.
StateInfo checked_info(const CheckpointReader& reader, const std::string& folder, const ParamTable& params, int64_t at,
                       const StepOptions& step, const std::set<std::string>& also_trained) {
  StateInfo info = parse_state_info(reader.state_json(), below(folder, kState), at);
  check_optimizer(reader, step.optim.optimizer);
  check_nothing_trained_is_dropped(reader, params, info, step.ema_decay > 0, also_trained);
  return info;
}

/// The contents of one checkpoint: the parts for devices of this process. Throws io if it is damaged.
HostState read_state(const Devices& devices, const ParamTable& params, const StateSource& from, int64_t at,
                     const StepOptions& step) {
  const std::string folder = checkpoint_folder(from.checkpoint_dir, at);
  // With several processes, a local copy would contain files that only others read.
  CheckpointReader reader(folder, processes().alone() ? FromBucket::copies : FromBucket::ranges);
  reader.warn_of_configs();
  const StateInfo info = checked_info(reader, folder, params, at, step, from.also_trained);
  StateReader read(devices, params, step, reader, info.trained);
  NamedShards values = read.arrays(slots_of_checkpoint(step));
  read.add_weights(values);
  if (info.seed != from.seed)
    log_warning("seed is {}, checkpoint {} was made with {}: random numbers differ from here on", from.seed, folder,
                info.seed);
  return {std::move(values), info.step, info.data, info.dataset, reader.bytes_read()};
}

constexpr std::pair<const char*, std::string DataIdentity::*> kHashes[] = {
    {"names", &DataIdentity::names}, {"captions", &DataIdentity::captions}, {"files", &DataIdentity::files}};

/// state.json: everything in a checkpoint besides arrays.
json info_of(int64_t step, const Position& p, uint64_t seed, const DataIdentity& dataset) {
  json info = {{"maxdiffusion_version", version()},
               {"step", step},
               {"epoch", p.epoch},
               {"index", p.index},
               {"seed", seed},
               {"shard", p.shard},
               {"offset", p.offset},
               {"taken", p.consumed},
               {"dataset", json::object()}};
  if (dataset.samples >= 0) info["dataset"]["samples"] = dataset.samples;
  for (const auto& [name, member] : kHashes)
    if (!(dataset.*member).empty()) info["dataset"][name] = dataset.*member;
  return info;
}

/// Broadcasts what process 0 has read to all replicas, which hold the same parts; overwrites their values.
void share(HostState& state) {
  Processes& all = processes();
  json info = info_of(state.step, state.data, 0, state.dataset);
  for (const auto& [name, a] : state.values) {
    json& array = info["arrays"][name] = {
        {"dtype", static_cast<int>(a.shape.dtype)}, {"dims", a.shape.dims}, {"pieces", json::array()}};
    for (const Shard& p : a.shards) array["pieces"].push_back({p.slice.start, p.slice.size});
  }
  info = parse_json(all.from_coordinator("restored state", info.dump()));
  if (!all.is_coordinator()) {
    state.step = info.at("step");
    state.data = {info.at("epoch"), info.at("index"), info.at("shard"), info.at("offset"), info.at("taken")};
    state.dataset.samples = info.at("dataset").value("samples", int64_t{-1});
    for (const auto& [name, member] : kHashes) state.dataset.*member = info.at("dataset").value(name, "");
    for (const auto& [name, array] : info.at("arrays").items()) {
      ShardedArray& a = state.values[name];
      a.shape = {static_cast<DType>(array.at("dtype").get<int>()), array.at("dims").get<Dims>()};
      for (const json& p : array.at("pieces")) {
        const Slice slice{p.at(0).get<Dims>(), p.at(1).get<Dims>()};
        a.shards.push_back({slice, HostArray(Shape{a.shape.dtype, slice.size})});
      }
    }
  }
  for (auto& [name, a] : state.values)
    for (Shard& p : a.shards)  // process 0 only reads its own bytes
      all.broadcast({const_cast<std::byte*>(p.values.data()), p.values.bytes()});
}

/// Warns of arrays of the optimizer's state that were not `found` in a checkpoint: they have their first values.
void warn_of_missing_moments(const std::string& checkpoint, const std::set<std::string>& found,
                             const NamedShards& values, const StepOptions& step) {
  const std::vector<std::string> prefixes = state_prefixes(*make_optimizer(step.optim));
  int64_t all = 0;
  std::vector<std::string> missing;
  for (const auto& [name, a] : values) {
    if (std::ranges::none_of(prefixes, [&, &array = name](const std::string& p) { return array.starts_with(p); }))
      continue;
    ++all;
    if (!found.contains(name)) missing.push_back(name);
  }
  if (missing.empty()) return;
  if (std::ssize(missing) == all)
    log_warning(
        "checkpoint {} has no moments of the optimizer: they start again; checkpoints of save_optimizer=false and of "
        "optimizers without moments have none",
        checkpoint);
  else
    log_warning("checkpoint {} lacks {} of the {} arrays of the optimizer's state, such as '{}': they start again",
                checkpoint, missing.size(), all, missing.front());
}

/// The state of this run's step from a checkpoint's contents and the frozen values that it lacks.
HostState restored(const ParamTable& params, HostState read, const StepOptions& step, const std::string& checkpoint_dir,
                   NamedShards frozen) {
  NamedShards& values = read.values;
  values = restored_state(params, std::move(values), step);
  std::set<std::string> found;
  for (const auto& [name, a] : values) found.insert(name);
  add_scalars(params, step, values);
  add_slots(params, optimizer_slots(step.optim), step, values);
  warn_of_missing_moments(checkpoint_folder(checkpoint_dir, read.step), found, values, step);
  values.merge(frozen);
  values["healthy"] = yes();
  return read;
}

/// Throws device unless all replicas have the same bits: a checkpoint must not keep a broken state.
void check_replicas(const NamedShards& state, int64_t step) {
  std::string all;
  for (const auto& [name, a] : state) {
    all += name;
    for (const Shard& p : a.shards) {
      const HostArray values = p.get();
      all += content_hash({reinterpret_cast<const char*>(values.data()), values.bytes()});
    }
  }
  const std::vector<std::string> hashes = processes().gather("state", content_hash(all));
  for (size_t i = 1; i < hashes.size(); ++i)
    if (hashes[i] != hashes[0])
      throw Error(Code::device,
                  fmt::format("the state of process {} after step {} differs from the state of process 0", i, step))
          .note(
              "try: again from the checkpoint before; if this error comes back, one of the machines computes wrongly");
}

/// The processes that write checkpoints together.
CheckpointProcesses writers() {
  Processes& all = processes();
  if (all.alone()) return {};
  return {.process = all.rank(),
          .processes = all.count(),
          .gather = [&all](const std::string& mine) { return all.gather_at_coordinator("checkpoint", mine); },
          .put = [&all](const std::string& key, const std::string& value) { all.put(key, value); },
          .get = [&all](const std::string& key) { return all.get(key); }};
}

/// The error about a checkpoint whose files are there but which this process may not read: it is not damaged, so it is
/// neither renamed nor passed over. None: it may.
std::optional<Error> unreadable(const std::string& folder) {
  std::optional<Error> e = is_remote(folder) ? std::nullopt : unreadable_in(folder);
  if (e) e->note("this checkpoint may be whole: it stays where it is, and no older one is used in its place");
  return e;
}

/// The state of the newest checkpoint that no process finds damaged. Newer ones are renamed as damaged. Throws io for
/// one that a process may not read.
/// `by_coordinator`: only process 0 reads.
HostState newest_restored(const std::vector<int64_t>& saved, const std::string& checkpoint_dir, bool by_coordinator,
                          const std::function<HostState(int64_t at)>& restore) {
  Processes& all = processes();
  std::vector<Error> faults;  // of the newest checkpoints
  for (auto at = saved.rbegin(); at != saved.rend(); ++at) {
    HostState state;
    std::optional<Error> fault, refusal;
    const auto attempt = [&] {
      try {
        state = restore(*at);
      } catch (const Error& e) {
        if (e.code() == Code::io) refusal = unreadable(checkpoint_folder(checkpoint_dir, *at));
        if (!refusal) (e.code() == Code::io ? fault : refusal) = e;
      }
    };
    if (all.is_coordinator() || !by_coordinator) attempt();
    throw_together(all, fmt::format("refused {}", *at), refusal);
    // The fault that another process has found, if this one found none.
    for (const std::string& found : all.gather(fmt::format("restored {}", *at), fault ? fault->what() : ""))
      if (!found.empty() && !fault) fault = Error(Code::io, found);
    if (fault) {
      faults.push_back(*fault);
      continue;
    }
    for (size_t i = 0; all.is_coordinator() && i < faults.size(); ++i)
      log_warning("damaged checkpoint: {}\n  it is '{}' now", faults[i].what(),
                  quarantine(checkpoint_dir, saved[saved.size() - 1 - i]));
    if (!faults.empty() && all.is_coordinator())
      log_warning("training resumes from the checkpoint before: {}", checkpoint_folder(checkpoint_dir, *at));
    return state;
  }
  for (size_t i = 1; i < faults.size(); ++i) faults[0].note("nor the checkpoint before: " + faults[i].message());
  faults[0].note(fmt::format("no checkpoint in '{}' can be resumed", checkpoint_dir));
  throw faults[0].note("try: another run_name, or move that folder away to start from step 0");
}

/// Starts copying the arrays' shards to the host without stopping the device; the result waits for them.
std::function<NamedShards()> fetch_all(const Devices& devices, const std::map<std::string, const Array*>& arrays) {
  auto pending = std::make_shared<std::map<std::string, PendingShards>>();
  for (const auto& [name, a] : arrays) (*pending)[name] = fetch_shards(devices, *a);
  return [pending] {
    NamedShards v;
    for (auto& [name, p] : *pending) v[name] = p.wait();
    return v;
  };
}

int64_t bytes_of(const NamedShards& shards) {
  int64_t bytes = 0;
  for (const auto& [name, a] : shards)
    for (const Shard& p : a.shards) bytes += Shape{a.shape.dtype, p.slice.size}.bytes();
  return bytes;
}

}  // namespace

StateInfo parse_state_info(const std::string& text, const std::string& file, int64_t step) {
  const json j = parse_json_or_discard(text);
  check(j.is_object(), Code::io, "read '{}': {}; expected a JSON object", file,
        j.is_discarded() ? "not JSON" : j.type_name());
  auto number_in = [&](const json& object, const char* name, std::optional<int64_t> otherwise) {
    const auto found = object.find(name);
    if (found == object.end() && otherwise) return *otherwise;
    check(found != object.end(), Code::io, "read '{}': it has no '{}'", file, name);
    check(found->is_number_unsigned() && found->get<uint64_t>() <= std::numeric_limits<int64_t>::max(), Code::io,
          "read '{}': '{}' is {}; expected a whole number of 0 or more", file, name, found->dump());
    return found->get<int64_t>();
  };
  auto number = [&](const char* name, std::optional<int64_t> otherwise = {}) { return number_in(j, name, otherwise); };
  StateInfo s;
  s.step = number("step");
  check(s.step == step, Code::io, "read '{}': 'step' is {}; expected {}, as its folder is named", file, s.step, step);
  s.data = {number("epoch"), number("index"), number("shard", 0), number("offset", 0), number("taken", 0)};
  const json dataset = j.value("dataset", json::object());
  check(dataset.is_object(), Code::io, "read '{}': 'dataset' is {}; expected an object", file, dataset.dump());
  s.dataset.samples = number_in(dataset, "samples", -1);
  for (const auto& [name, member] : kHashes) {
    const json hash = dataset.value(name, json(""));
    check(hash.is_string(), Code::io, "read '{}': '{}' of 'dataset' is {}; expected a hash", file, name, hash.dump());
    s.dataset.*member = hash;
  }
  const auto seed = j.find("seed");
  check(seed != j.end() && seed->is_number_integer(), Code::io, "read '{}': 'seed' is {}; expected a whole number",
        file, seed == j.end() ? "missing" : seed->dump());
  s.seed = seed->get<uint64_t>();
  for (const json& component : j.value("trained", json::array())) {
    check(component.is_string(), Code::io, "read '{}': 'trained' holds {}; expected names of components", file,
          component.dump());
    s.trained.push_back(component);
  }
  return s;
}

std::string TrainState::saved_name(const std::string& input) const {
  const std::string average = state_prefix::kAverage + input;
  return arrays.contains(average) ? average : input;
}

Array* TrainState::saved_value(const std::string& input) {
  const auto a = arrays.find(saved_name(input));
  return a != arrays.end() ? &a->second : &read_only.at(input);
}

std::function<HostState()> open_state(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                                      const StateSource& from, const InitialValues& initial) {
  Processes& all = processes();
  if (is_remote(from.checkpoint_dir) && !all.alone())
    flush_pending_uploads(from.checkpoint_dir, writers(), from.before_commit);
  // Only process 0 lists checkpoints and renames damaged ones.
  const json found = all.is_coordinator() ? json(checkpoint_folders(from.checkpoint_dir)) : json();
  const auto saved = parse_json(all.from_coordinator("checkpoints", found.dump())).get<std::vector<int64_t>>();
  const ParamTable& params = programs.params();
  if (saved.empty()) {
    auto wide = std::make_shared<const ParamTable>(in_f32(params));
    return [&programs, step, wide, make = initial(*wide)] { return beginning(programs, make(), step); };
  }
  if (from.single_replica && devices.replicas() == 1)
    log_warning(
        "enable_single_replica_ckpt_restoring is ignored: each process reads the part of the state that its devices "
        "hold");
  auto frozen = std::make_shared<const ParamTable>(frozen_part(params));
  return [&devices, &params, step, from, saved, frozen, make = initial(*frozen)] {
    NamedShards others = make();
    const bool by_coordinator = from.single_replica && devices.replicas() > 1;
    HostState read = newest_restored(saved, from.checkpoint_dir, by_coordinator,
                                     [&](int64_t at) { return read_state(devices, params, from, at, step); });
    if (by_coordinator) share(read);
    return restored(params, std::move(read), step, from.checkpoint_dir, std::move(others));
  };
}

std::optional<StateInfo> check_resumes(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                                       const StateSource& from) {
  Processes& all = processes();
  const json found = all.is_coordinator() ? json(checkpoint_folders(from.checkpoint_dir)) : json();
  const auto saved = parse_json(all.from_coordinator("checkpoints to check", found.dump())).get<std::vector<int64_t>>();
  std::optional<StateInfo> info;
  std::optional<Error> refusal, damage;
  for (auto at = saved.rbegin(); at != saved.rend(); ++at) {
    damage.reset();
    const std::string folder = checkpoint_folder(from.checkpoint_dir, *at);
    try {
      if (from.single_replica && devices.replicas() > 1 && !all.is_coordinator()) break;
      CheckpointReader reader(folder, all.alone() ? FromBucket::copies : FromBucket::ranges);
      info = checked_info(reader, folder, programs.params(), *at, step, from.also_trained);
      StateReader(devices, programs.params(), step, reader, info->trained)
          .check_headers(slots_of_checkpoint(step), programs.state_names());
      break;
    } catch (const Error& e) {
      if (e.code() == Code::io) refusal = unreadable(folder);
      if (!refusal) (e.code() == Code::io ? damage : refusal) = e;
      if (refusal) break;
    }
  }
  if (damage) {
    damage->note(fmt::format("no checkpoint in '{}' can be resumed", from.checkpoint_dir));
    damage->note("try: another run_name, or move that folder away to start from step 0");
  }
  throw_together(all, "checked checkpoints", refusal ? refusal : damage);
  return info;
}

void resume_data(Dataset& data, const DataIdentity& now, const Position& at, const DataIdentity& then,
                 const std::string& checkpoint) {
  const std::string change = change_between(then, now);
  // A place in a file of many records says nothing about another file.
  const bool in_file = at.shard > 0 || at.offset > 0 || at.consumed > 0;
  const bool exists = !change.empty() && in_file ? data.seek(next_epoch(at)), false : data.seek(at);
  if (change.empty() && exists) return;
  const Position from = data.position();
  const std::string place = fmt::format(
      "{} of epoch {}", from.index > 0 ? fmt::format("position {}", from.index) : "the beginning", from.epoch);
  if (change.empty())
    log_warning("the data has no position {} of epoch {}, at which checkpoint {} was saved; training continues at {}",
                at.index, at.epoch, checkpoint, place);
  else
    log_warning("the data has changed since checkpoint {}: {}; training continues at {}", checkpoint, change, place);
}

TrainState place_state(const Devices& devices, const StepPrograms& programs, HostState host,
                       const std::string& checkpoint_dir) {
  TrainState state;
  state.step = host.step;
  state.data = host.data;
  for (size_t i = 0; i < programs.count(); ++i) {
    NamedShards program_values;
    for (const std::string& name : programs.program(i).input_names())
      if (auto value = host.values.extract(name)) program_values.insert(std::move(value));
    place(devices, programs.program(i), std::move(program_values), state.arrays);
  }
  for (const Param& p : programs.params().params())
    if (!p.trainable)
      if (auto a = state.arrays.extract(p.input)) state.read_only.insert(std::move(a));
  for (const std::string& name : programs.state_names())
    check(state.arrays.contains(name), Code::io,
          "checkpoint {}/{} has no '{}': another kind of run wrote it; choose another run_name", checkpoint_dir,
          state.step, name);
  return state;
}

HostArrays trained_values(const Devices& devices, const StepPrograms& programs, const TrainState& state) {
  if (devices.joint()) return {};
  NamedShards values;
  for (const Param& p : programs.params().params())
    if (const std::string name = state.saved_name(p.input); p.trainable)
      values[name] = shards_in_place(devices, state.arrays.at(name), Which::local);
  return as_arrays(model_values(programs.params(), values));
}

HostArrays last_trained_values(const Devices& devices, const StepPrograms& programs, TrainState state) {
  struct LastState {
    Devices devices;  // must outlive the arrays
    TrainState state;
  };
  const auto last = std::make_shared<LastState>(LastState{devices, {}});
  for (const Param& p : programs.params().params())
    if (const std::string name = state.saved_name(p.input); p.trainable)
      last->state.arrays[name] = std::move(state.arrays.at(name));
  HostArrays values = trained_values(last->devices, programs, last->state);
  for (auto& [name, a] : values)
    a = HostArray(a.shape(), std::make_shared<std::pair<std::shared_ptr<const void>, HostArray>>(last, a), a.data());
  return values;
}

CheckpointContent state_content(const ParamTable& params, NamedShards state, bool averaged,
                                const CompleteCheckpoint& complete) {
  CheckpointContent c;
  c.state = std::move(state);
  const NamedShards trained = model_values(params, c.state);
  for (const std::string& component : whole_components(params)) {
    c.weights[component] = published(params, component, trained);
    for (const Param& p : params.params())  // values that the model's file or the master also has
      if (p.model == component && (!averaged || c.state.contains(state_prefix::kMaster + p.input)))
        c.state.erase(p.input);
  }
  if (complete) complete(c, params, trained);
  return c;
}

StateSaver::StateSaver(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                       std::string checkpoint_dir, int64_t keep, bool moments, uint64_t seed,
                       CompleteCheckpoint complete, std::function<void()> before_commit, DataIdentity dataset,
                       std::set<std::string> also_trained)
    : devices_(devices),
      programs_(programs),
      averaged_(step.ema_decay > 0),
      left_out_(moments ? std::vector<std::string>() : state_prefixes(*make_optimizer(step.optim))),
      checkpoint_dir_(std::move(checkpoint_dir)),
      seed_(seed),
      dataset_(std::move(dataset)),
      also_trained_(std::move(also_trained)),
      complete_(std::move(complete)),
      writer_(checkpoint_dir_, static_cast<int>(keep), writers(), std::move(before_commit)) {
  if (devices.platform() != Platform::cpu) return;
  for (size_t i = 0; i < programs.count(); ++i)
    if (const auto plan = programs.program(i).memory())
      step_bytes_ = std::max(step_bytes_, plan->temporary * std::ssize(devices.local()));
}

std::map<std::string, const Array*> StateSaver::saved(const TrainState& state) const {
  std::map<std::string, const Array*> arrays;
  for (const auto& [name, a] : state.arrays)
    if (std::ranges::none_of(left_out_,
                             [&array = name](const std::string& prefix) { return array.starts_with(prefix); }))
      arrays[name] = &a;
  return arrays;
}

void StateSaver::warn_if_short_of_space(const TrainState& state) const {
  int64_t all = 0, largest = 0;
  for (const auto& [name, a] : saved(state)) all += a->shape().bytes(), largest = std::max(largest, a->shape().bytes());
  const int64_t needed = step_bytes_ + largest, free = free_memory();
  if (free < needed)
    log_warning(
        "checkpoint: writing one takes up to {} of host memory in addition to the step's {}, and {} are free; a "
        "smaller "
        "per_device_batch_size leaves more",
        bytes_text(largest), bytes_text(step_bytes_), bytes_text(free));
  std::error_code ec;
  const std::string dir = local_cache_path(checkpoint_dir_);
  std::filesystem::path existing = std::filesystem::absolute(dir);
  while (!exists(existing) && existing.has_relative_path()) existing = existing.parent_path();
  const auto space = std::filesystem::space(existing, ec);
  if (!ec && space.available < static_cast<uint64_t>(all))
    log_warning("checkpoint: it takes {}, and '{}' has {} free", bytes_text(all), dir,
                bytes_text(static_cast<int64_t>(space.available)));
}

void StateSaver::save(const TrainState& state, int64_t at, Position position) {
  writer_.wait();
  const auto arrays = saved(state);
  NamedShards in_place;
  for (const auto& [name, a] : arrays) in_place[name] = shards_in_place(devices_, *a);
  const int64_t bytes = bytes_of(in_place), needed = bytes + bytes / 20 + step_bytes_, free = free_memory();
  const bool copied = free >= needed;
  if (!copied && !std::exchange(pauses_training_, true))
    log_info(
        "checkpoints pause training while they are written: a copy of the state takes {} of host memory in addition to "
        "the step's {}, and {} are free",
        bytes_text(bytes), bytes_text(step_bytes_), bytes_text(free));
  std::function<NamedShards()> values = [in_place] { return in_place; };
  if (copied) values = fetch_all(devices_, arrays);
  json info = info_of(at, position, seed_, dataset_);
  std::set<std::string> trained = also_trained_;
  for (const Param& p : programs_.params().params())
    if (p.trainable) trained.insert(p.model);
  info["trained"] = trained;
  writer_.save(at, [values = std::move(values), info = std::move(info), at, this] {
    NamedShards state = values();
    if (devices_.replicas() > 1) check_replicas(state, at);
    if (devices_.replica() > 0) return CheckpointContent();  // replica 0 writes the common state
    CheckpointContent c = state_content(programs_.params(), std::move(state), averaged_,
                                        processes().is_coordinator() ? complete_ : CompleteCheckpoint());
    c.state_json = info.dump(2);
    c.inspect = [at](const std::string& name, const HostArray& values) {
      if (const std::string fault = not_finite(name, values); !fault.empty())
        throw Error(Code::device, fmt::format("the state after step {} is not saved: {}", at, fault))
            .note("try: a smaller learning_rate, more warm-up steps, a smaller max_grad_norm");
    };
    return c;
  });
  if (!copied) writer_.wait();  // the next step reuses the arrays' memory
}

}  // namespace md
