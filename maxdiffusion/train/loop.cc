#include "maxdiffusion/train/loop.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <future>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/tasks/model_folder.h"

namespace md {
namespace {

using nlohmann::json;

/// Everything that goes from step to step, and where the data stood before the batch of `step`.
struct State {
  ArrayMap arrays;
  int64_t step = 0;
  Position data;
};

HostArray zeros(const Shape& shape) {
  HostArray a(shape);
  std::fill_n(a.mutable_data(), a.bytes(), std::byte{0});
  return a;
}

HostArray yes() {
  const uint8_t value = 1;
  return HostArray::of<uint8_t>({DType::pred, {}}, {&value, 1});
}

/// The state before the first step of this process, in host memory, and the frozen parameters.
struct Start {
  HostArrays values;
  int64_t step = 0;
  Position data;
};

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

Start fresh(const ParamTable& params, HostArrays values) {
  for (const Param& p : params.params()) {
    if (!p.trainable) continue;
    values["adam_m/" + p.input] = values["adam_v/" + p.input] = zeros(p.shape);
    values["ema/" + p.input] = values.at(p.input);
  }
  values["step"] = scalar_s32(0);
  values["healthy"] = yes();
  return {.values = std::move(values)};
}

Start restored(const ParamTable& params, int64_t step, const LoopOptions& o, HostArrays frozen) {
  const CheckpointContent c = read_training_state(o.checkpoint_dir, step);
  const json info = json::parse(c.state_json);
  if (info.at("seed") != o.seed)
    log_warning("checkpoint {}/{} was made with seed {}, this run has {}: random draws differ from here on",
                o.checkpoint_dir, step, info.at("seed").dump(), o.seed);
  HostArrays values = as_arrays(c.state);
  // Parameters are in the models' own files, unless those hold their averages.
  ModelFolder folder;
  folder.path = checkpoint_folder(o.checkpoint_dir, step);
  if (o.step.ema_decay == 0)
    for (const std::string& component : whole_components(params))
      values.merge(folder.values(params, component, false, 0));
  values.merge(frozen);
  values["healthy"] = yes();
  const Position data{info.at("epoch"), info.at("index"), info.value("shard", int64_t{0}),
                      info.value("offset", int64_t{0}), info.value("taken", int64_t{0})};
  return {std::move(values), info.at("step"), data};
}

/// The state's arrays, copied to the host without stopping the device: starts now, waits when called.
std::function<HostArrays()> fetch_all(const Devices& devices, const ArrayMap& arrays) {
  auto pending = std::make_shared<std::map<std::string, PendingArray>>();
  for (const auto& [name, a] : arrays) (*pending)[name] = fetch(devices, a);
  return [pending] {
    HostArrays v;
    for (auto& [name, p] : *pending) v[name] = p.wait();
    return v;
  };
}

/// The trained values that are sampled and saved as the model: the averages where they are kept.
HostArrays model_values(const ParamTable& params, const HostArrays& state) {
  HostArrays v;
  for (const Param& p : params.params()) {
    if (!p.trainable) continue;
    auto average = state.find("ema/" + p.input);
    v[p.input] = average != state.end() ? average->second : state.at(p.input);
  }
  return v;
}

/// The one of several programs that a batch is for.
size_t chosen(const std::vector<StepGraph>& graphs, const Batch& batch) {
  if (graphs.size() == 1) return 0;
  for (size_t i = 0; i < graphs.size(); ++i)
    if (std::ranges::all_of(graphs[i].fields, [&](const BatchField& f) {
          const auto a = batch.find(f.name);
          return !f.batched || (a != batch.end() && a->second.shape() == f.shape);
        }))
      return i;
  std::string shapes;
  for (const auto& [name, a] : batch) shapes += fmt::format(" {} {}", name, to_string(a.shape()));
  fail(Code::internal, "no program of {} takes this batch:{}", graphs.size(), shapes);
}

/// How every array of the program's input lies on the mesh, one line each.
void log_shardings(const Devices& devices, const Program& program, const ParamTable& params) {
  for (size_t i = 0; i < program.input_names().size(); ++i) {
    const std::string& name = program.input_names()[i];
    const Shape& shape = program.input_shape(i);
    const Param* p = params.find(name);
    const auto& split = program.input_sharding(i).dims;
    std::string axes;
    for (size_t d = 0; d < shape.dims.size(); ++d)
      axes += fmt::format("{}{}→{}", d ? ", " : "", p && d < p->axes.size() && !p->axes[d].empty() ? p->axes[d] : "-",
                          d < split.size() && !split[d].empty() ? fmt::format("{}", fmt::join(split[d], "×")) : "-");
    const Slice piece = shard_of(devices.mesh(), program.input_sharding(i), shape.dims, 0, name);
    log_info("sharding: {} {} [{}], {} on each device", name, to_string(shape), axes,
             to_string(Shape{shape.dtype, piece.size}));
  }
}

}  // namespace

LoopOptions loop_options(const RunConfig& c, const std::string& folder, const std::string& title) {
  LoopOptions o;
  o.title = title;
  o.folder = folder;
  o.checkpoint_dir = folder + "/checkpoints";
  o.step.optim = c.optim;
  o.step.scope = scope_options(c.model);
  o.seed = static_cast<uint64_t>(c.run.seed);
  o.checkpoint_every = c.run.checkpoint_every;
  o.checkpoints_to_keep = c.run.checkpoints_to_keep;
  o.prefetch_depth = c.data.prefetch_depth;
  o.reuse_example_batch = c.data.reuse_example_batch;
  o.log_sharding = c.run.log_sharding;
  o.metrics = c.metrics;
  o.profile = c.profile;
  o.compile = c.compile;
  o.run_name = c.run.run_name;
  const char* libtpu = std::getenv("LIBTPU_INIT_ARGS");  // read by the plugin itself
  o.texts = {{"config", "```yaml\n" + c.to_yaml() + "```"}, {"libtpu_init_args", libtpu ? libtpu : ""}};
  return o;
}

double scaled_rate(const OptimConfig& optim, double rate, int64_t samples) {
  return optim.scale_lr ? rate * static_cast<double>(samples) : rate;
}

Trained train_loop(const Devices& devices, const std::vector<const Task*>& tasks, std::unique_ptr<Dataset> data,
                   const LoopOptions& o, const LoopCallbacks& callbacks) {
  std::vector<StepGraph> graphs;  // parameters and state are the same in all
  std::vector<std::string> titles;
  for (const Task* t : tasks) {
    graphs.push_back(trace_step(*t, devices.graph_options(&devices.rules()), o.step));
    titles.push_back(o.title + (t->variant().empty() ? "" : " " + t->variant()));
  }
  StepGraph& step = graphs.front();
  auto device_flops = [&](size_t i) { return graphs[i].flops / static_cast<double>(devices.mesh().devices()); };
  log_info("{}: {} parameters in {} arrays, {:.4f} TFLOP per step and device, mesh {}", titles[0], step.params.count(),
           step.params.params().size(), device_flops(0) / 1e12, devices.mesh().describe());
  for (size_t i = 1; i < graphs.size(); ++i)
    log_info("{}: {:.4f} TFLOP per step and device", titles[i], device_flops(i) / 1e12);
  const std::vector<int64_t> saved = list_checkpoints(o.checkpoint_dir);
  const ParamTable frozen = frozen_part(step.params);
  const auto initial = callbacks.initial(saved.empty() ? step.params : frozen);
  auto start = std::async(std::launch::async, [&] {  // while the program is compiled
    return saved.empty() ? fresh(step.params, initial()) : restored(step.params, saved.back(), o, initial());
  });
  std::vector<Program> programs;
  for (size_t i = 0; i < graphs.size(); ++i) {
    programs.push_back(compile(devices, *graphs[i].graph, o.compile, "train_" + tasks[i]->model()));
    const CompileReport& report = programs[i].report();
    log_info("{}: program {} in {:.1f} s", titles[i], report.from_cache ? "loaded from the cache" : "compiled",
             report.compile_seconds + report.load_seconds);
    if (auto plan = programs[i].memory()) log_info("{}: {}", titles[i], to_string(*plan));
  }
  const Program& program = programs.front();
  if (o.log_sharding) log_shardings(devices, program, step.params);

  State state;
  ArrayMap kept;  // what every step reads and none changes
  {
    const Start host = start.get();
    state.step = host.step;
    state.data = host.data;
    place(devices, program, host.values, state.arrays);
    for (const Param& p : frozen.params())
      if (auto a = state.arrays.extract(p.input)) kept.insert(std::move(a));
  }
  std::set<std::string> is_state;
  for (const GraphOutput& out : step.graph->outputs())
    if (step.graph->input_index(out.name) >= 0) is_state.insert(out.name);
  for (const std::string& name : is_state)
    check(state.arrays.contains(name), Code::io,
          "checkpoint {}/{} has no '{}': it was made by another kind of run; choose another run_name", o.checkpoint_dir,
          state.step, name);
  if (!saved.empty()) log_info("{}: continues from {}/{}", o.title, o.checkpoint_dir, saved.back());
  const int64_t first = state.step, last = o.step.optim.max_train_steps;

  data->seek(state.data);
  data = prefetch(std::move(data), static_cast<int>(o.prefetch_depth));
  HostArrays fixed = callbacks.constants;
  fixed["key"] = key_of_seed(o.seed);
  place(devices, program, fixed, kept);

  // Saves the state as it is now; the copy runs beside the steps that follow.
  CheckpointWriter writer(o.checkpoint_dir, static_cast<int>(o.checkpoints_to_keep));
  auto save = [&](int64_t at, Position position) {
    auto values = fetch_all(devices, state.arrays);
    json info = {{"step", at},
                 {"epoch", position.epoch},
                 {"index", position.index},
                 {"seed", o.seed},
                 {"shard", position.shard},
                 {"offset", position.offset},
                 {"taken", position.taken}};
    writer.save(at, [values, info, &step, &callbacks, &o] {
      CheckpointContent c;
      const HostArrays state = values();
      c.state = as_pieces(state);
      const HostArrays trained = model_values(step.params, state);
      for (const std::string& component : whole_components(step.params)) {
        c.weights[component] = as_pieces(published(step.params, component, trained));
        if (o.step.ema_decay == 0)  // the model's file holds them already
          for (const Param& p : step.params.params())
            if (p.model == component) c.state.erase(p.input);
      }
      c.state_json = info.dump(2);
      if (callbacks.complete) callbacks.complete(c, step.params, trained);
      return c;
    });
  };

  Recorder recorder({.folder = o.folder,
                     .run_name = o.run_name,
                     .title = o.title,
                     .total_steps = last,
                     .start_step = first,
                     .device_flops = device_flops(0),
                     .device_peak_flops = devices.client().peak_flops(o.step.scope.activations),
                     .config = o.metrics,
                     .texts = o.texts});
  ProfileWindow profile(devices, o.profile, o.folder + "/tensorboard", first);
  int64_t samples = 1;  // of one step
  for (const BatchField& f : step.fields)
    if (f.batched) samples = f.shape.dims[0];
  std::deque<Position> positions;  // before the batches of steps whose loss is not read yet
  int64_t dispatched = first;      // the step that positions.back() belongs to
  Batch batch;
  try {
    for (; state.step < last; ++state.step) {
      dispatched = state.step;
      positions.push_back(state.data);
      if (positions.size() > 3) positions.pop_front();
      profile.before(state.step);
      size_t which = 0;
      ArrayMap out = [&] {
        Span span("train", state.step);
        if (batch.empty() || !o.reuse_example_batch) {
          Span wait("wait for data");
          batch = data->next();
        }
        which = chosen(graphs, batch);
        ArrayMap feed;
        place(devices, programs[which], batch, feed);
        for (auto& [name, a] : feed) kept[name] = std::move(a);
        return programs[which].run(state.arrays, kept);
      }();
      ArrayMap metrics;
      for (auto& [name, a] : out) (is_state.contains(name) ? state.arrays : metrics)[name] = std::move(a);
      state.data = data->position();
      const int64_t done = state.step + 1;
      if (graphs.size() > 1) recorder.set_device_flops(device_flops(which));
      recorder.push(done, devices, metrics);
      if (profile.ends(done)) {
        recorder.read_pending();
        profile.finish(done);
        recorder.restart_clock();
      }
      if (callbacks.evaluate && o.eval_every > 0 && done % o.eval_every == 0)
        recorder.read_pending([&] {
          return callbacks.evaluate(done, [&](const std::string& name) {
            for (const std::string& key : {"ema/" + name, name})
              if (auto a = state.arrays.find(key); a != state.arrays.end()) return &a->second;
            return &kept.at(name);
          });
        });
      if (o.checkpoint_every > 0 && done * samples / o.checkpoint_every > state.step * samples / o.checkpoint_every &&
          done < last) {
        recorder.flush();
        save(done, state.data);
      }
      if (callbacks.sample && o.sample_every > 0 && done % o.sample_every == 0 && done < last) {
        recorder.flush();
        callbacks.sample(done, step.params, model_values(step.params, fetch_all(devices, state.arrays)()));
        recorder.restart_clock();
      }
    }
    recorder.flush();
    profile.finish(last);
  } catch (Error& e) {
    // The device froze the state before the bad step; its own clock says which.
    if (state.arrays.contains("step") && state.arrays.contains("healthy") &&
        devices.get(state.arrays.at("healthy")).view<uint8_t>()[0] == 0) {
      const int64_t good = devices.get(state.arrays.at("step")).view<int32_t>()[0];
      const size_t back = static_cast<size_t>(dispatched - good);
      if (back < positions.size() && good > first) {
        save(good, positions[positions.size() - 1 - back]);
        writer.finish();
        e.note(fmt::format("the state before step {} is saved in {}/{}", good, o.checkpoint_dir, good));
      }
      e.note("try: a smaller learning_rate, max_grad_norm=1, or activations_dtype=float32");
    }
    throw;
  }
  if (o.save_final_checkpoint && last > first) save(last, state.data);
  writer.finish();
  recorder.finish();
  Trained t{std::move(step.params), {}, last};
  HostArrays all = fetch_all(devices, state.arrays)();
  t.values = model_values(t.params, all);
  return t;
}

}  // namespace md
