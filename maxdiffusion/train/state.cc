#include "maxdiffusion/train/state.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/finite.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/checkpoint/bucket_checkpoints.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/processes/processes.h"
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
  return std::ranges::any_of(params.params(), [&](const Param& p) {
    return p.model == component && state.contains(state_prefix::kMaster + p.input);
  });
}

HostState beginning(const StepPrograms& programs, NamedPieces values, const StepOptions& step) {
  values = fresh_state(programs.params(), std::move(values), step);
  for (const std::string& name : programs.state_names())
    if (name == "step" || name.starts_with("updates/")) values[name] = scalar_s32(0);
  values["healthy"] = yes();
  return {.values = std::move(values)};
}

/// Zeros for moments that the state lacks; whether there are any.
bool start_moments(const ParamTable& params, NamedPieces& state) {
  bool any = false;
  for (const Param& p : params.params()) {
    const std::string first = state_prefix::kFirstMoment + p.input, second = state_prefix::kSecondMoment + p.input;
    if (!p.trainable || state.contains(first) || !state.contains(p.input)) continue;
    state[first] = state[second] = state.at(p.input).cast(DType::f32).zeros();
    any = true;
  }
  return any;
}

/// "'adam_m/unet/conv_in.weight' holds nan at [3, 0, 1, 1]" for the first number that is not finite; empty: all are.
std::string not_finite(const NamedPieces& arrays) {
  for (const auto& [name, a] : arrays)
    for (const Piece& p : a.pieces) {
      const std::optional<int64_t> at = first_not_finite(p.values);
      if (!at) continue;
      const HostArray flat = p.values.reshaped({p.values.shape().elements()});
      return fmt::format("'{}' holds {} at element {}", name, rows(flat, *at, 1).to_doubles()[0], *at);
    }
  return "";
}

/// The state of one checkpoint. Throws io where it is damaged.
HostState restored(const ParamTable& params, const std::string& checkpoint_dir, int64_t at, uint64_t seed,
                   const StepOptions& step, NamedPieces frozen) {
  const CheckpointContent c = read_training_state(checkpoint_dir, at);
  const std::string folder = checkpoint_folder(checkpoint_dir, at);
  const StateInfo info = parse_state_info(c.state_json, below(folder, "training_state/state.json"), at);
  NamedPieces values = c.state;
  // Parameters are the rounding of their masters, or in the models' own files, unless those hold their averages.
  const ParamTable wide = in_f32(params);
  if (step.ema_decay == 0)
    for (const std::string& component : whole_components(params)) {
      if (has_masters(values, params, component)) continue;
      const std::string path = local_checkpoint(folder, CheckpointPart::component, component) + "/" + component;
      values.merge(as_pieces(open_component(wide, component, SafetensorsReader::open(path), path)()));
    }
  if (const std::string fault = not_finite(values); !fault.empty())
    fail(Code::io, "read '{}': {}, which no training goes on from", folder, fault);
  if (info.seed != seed)
    log_warning("checkpoint {} was made with seed {}, this run has {}: random draws differ from here on", folder,
                info.seed, seed);
  values = restored_state(params, std::move(values), step);
  if (start_moments(params, values))
    log_warning("checkpoint {}/{} has no moments of the optimizer, as save_optimizer=false asks: they start from zero",
                checkpoint_dir, at);
  values.merge(frozen);
  values["healthy"] = yes();
  return {std::move(values), info.step, info.data};
}

/// Replicas have the same bits, or something is broken that no checkpoint should keep.
void check_replicas(const NamedPieces& state, int64_t step) {
  std::string all;
  for (const auto& [name, a] : state) {
    all += name;
    for (const Piece& p : a.pieces)
      all += content_hash({reinterpret_cast<const char*>(p.values.data()), p.values.bytes()});
  }
  const std::vector<std::string> hashes = processes().gather("state", content_hash(all));
  for (size_t i = 1; i < hashes.size(); ++i)
    if (hashes[i] != hashes[0])
      throw Error(Code::device, fmt::format("the state of process {} after step {} is not that of process 0", i, step))
          .note("try: again from the checkpoint before; if it comes again, one of the machines computes wrongly");
}

/// Replicas of whatever is written meet, so that all of them know it whole.
CheckpointProcesses writers(const Devices& devices) {
  if (devices.replicas() == 1) return {};
  return {devices.replica(), devices.replicas(), [] { processes().barrier("checkpoint"); }};
}

/// The state of the newest checkpoint that is not damaged. Those after it are set aside.
HostState newest_restored(const std::vector<int64_t>& saved, const std::string& checkpoint_dir,
                          const std::function<HostState(int64_t at)>& restore) {
  std::vector<Error> faults;  // of the newest ones
  for (auto at = saved.rbegin(); at != saved.rend(); ++at) {
    try {
      HostState state = restore(*at);
      for (size_t i = 0; i < faults.size(); ++i)
        log_warning("damaged checkpoint: {}\n  it is '{}' now", faults[i].what(),
                    set_aside(checkpoint_dir, saved[saved.size() - 1 - i]));
      if (!faults.empty())
        log_warning("training goes on from the checkpoint before: {}", checkpoint_folder(checkpoint_dir, *at));
      return state;
    } catch (const Error& e) {
      if (e.code() != Code::io) throw;
      faults.push_back(e);
    }
  }
  for (size_t i = 1; i < faults.size(); ++i) faults[0].note("nor can the one before: " + faults[i].message());
  faults[0].note(fmt::format("no checkpoint in '{}' can be gone on from", checkpoint_dir));
  throw faults[0].note("try: another run_name, or move that folder away to start anew");
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

StateInfo parse_state_info(const std::string& text, const std::string& file, int64_t step) {
  const json j = parse_json_or_discard(text);
  check(j.is_object(), Code::io, "read '{}': {}; expected a JSON object", file,
        j.is_discarded() ? "not JSON" : j.type_name());
  auto number = [&](const char* name, std::optional<int64_t> otherwise = {}) {
    const auto found = j.find(name);
    if (found == j.end() && otherwise) return *otherwise;
    check(found != j.end(), Code::io, "read '{}': it has no '{}'", file, name);
    check(found->is_number_unsigned() && found->get<uint64_t>() <= std::numeric_limits<int64_t>::max(), Code::io,
          "read '{}': '{}' is {}; expected a whole number of 0 or more", file, name, found->dump());
    return found->get<int64_t>();
  };
  StateInfo s;
  s.step = number("step");
  check(s.step == step, Code::io, "read '{}': 'step' is {}; expected {}, as its folder is named", file, s.step, step);
  s.data = {number("epoch"), number("index"), number("shard", 0), number("offset", 0), number("taken", 0)};
  const auto seed = j.find("seed");
  check(seed != j.end() && seed->is_number_integer(), Code::io, "read '{}': 'seed' is {}; expected a whole number",
        file, seed == j.end() ? "missing" : seed->dump());
  s.seed = seed->get<uint64_t>();
  return s;
}

Array* TrainState::saved_value(const std::string& input) {
  for (const std::string& key : {state_prefix::kAverage + input, input})
    if (auto a = arrays.find(key); a != arrays.end()) return &a->second;
  return &kept.at(input);
}

std::function<HostState()> open_state(const StepPrograms& programs, const StepOptions& step,
                                      const std::string& checkpoint_dir, uint64_t seed, const InitialValues& initial) {
  // One process looks, and sets aside what is damaged; the others read what it has read.
  Processes& all = processes();
  std::vector<int64_t> saved = checkpoint_folders(checkpoint_dir);
  if (all.largest("checkpoints of " + checkpoint_dir, all.leads() && !saved.empty()) == 0) saved.clear();
  const ParamTable& params = programs.params();
  if (saved.empty()) {
    auto wide = std::make_shared<const ParamTable>(in_f32(params));
    return [&programs, step, wide, make = initial(*wide)] { return beginning(programs, make(), step); };
  }
  auto frozen = std::make_shared<const ParamTable>(frozen_part(params));
  return [&params, step, checkpoint_dir, seed, saved, frozen, make = initial(*frozen)] {
    const NamedPieces others = make();
    const auto restore = [&](int64_t at) { return restored(params, checkpoint_dir, at, seed, step, others); };
    HostState newest;
    if (processes().leads()) newest = newest_restored(saved, checkpoint_dir, restore);
    const int64_t at = processes().largest("restored from " + checkpoint_dir, newest.step);
    return processes().leads() ? std::move(newest) : restore(at);
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
                       CompleteCheckpoint complete, std::function<void()> before_commit)
    : devices_(devices),
      programs_(programs),
      averaged_(step.ema_decay > 0),
      moments_(moments),
      checkpoint_dir_(std::move(checkpoint_dir)),
      seed_(seed),
      complete_(std::move(complete)),
      writer_(checkpoint_dir_, static_cast<int>(keep), writers(devices), std::move(before_commit)) {}

void StateSaver::save(const TrainState& state, int64_t at, Position position) {
  const json info = {{"maxdiffusion_version", version()},
                     {"step", at},
                     {"epoch", position.epoch},
                     {"index", position.index},
                     {"seed", seed_},
                     {"shard", position.shard},
                     {"offset", position.offset},
                     {"taken", position.taken}};
  writer_.save(at, [values = fetch_all(devices_, state.arrays, Which::owned, moments_), info, at, this] {
    const ParamTable& params = programs_.params();
    CheckpointContent c;
    c.state = values();
    if (devices_.replicas() > 1) check_replicas(c.state, at);
    if (devices_.replica() > 0) return CheckpointContent();  // the first writes what all have
    if (const std::string fault = not_finite(c.state); !fault.empty())
      throw Error(Code::device, fmt::format("the state after step {} is not saved: {}", at, fault))
          .note("try: a smaller learning_rate, more warm-up steps, a smaller max_grad_norm");
    const NamedPieces trained = model_values(params, c.state);
    for (const std::string& component : whole_components(params)) {
      c.weights[component] = published(params, component, trained);
      for (const Param& p : params.params())  // what the model's file or the master says already
        if (p.model == component && (!averaged_ || c.state.contains(state_prefix::kMaster + p.input)))
          c.state.erase(p.input);
    }
    c.state_json = info.dump(2);
    if (complete_) complete_(c, params, trained);
    return c;
  });
}

}  // namespace md
