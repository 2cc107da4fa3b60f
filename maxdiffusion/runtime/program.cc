// Graph → executable (through the cache) → run.
#include <cctype>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/pjrt/executable.h"
#include "maxdiffusion/runtime/executable_cache.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct Program::Impl {
  struct Port {
    Shape shape;
    Sharding sharding;
    bool aliased = false;  // of inputs: given to an output
  };
  Devices devices;
  std::string name;
  std::vector<std::string> input_names, output_names;
  std::vector<Port> inputs, outputs;
  pjrt::Executable executable;
  std::vector<size_t> shard;  // of the k-th device of the executable
  CompileReport report;
};

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Letters, digits and underscores: MLIR symbols and file names.
std::string symbol(const std::string& name) {
  std::string s;
  for (char c : name) s += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return s.empty() || std::isdigit(static_cast<unsigned char>(s[0])) ? "p" + s : s;
}

/// Dims that are split, without the whole ones at the end, so that equal shardings compare equal.
bool same_sharding(const Sharding& a, const Sharding& b) {
  const size_t n = std::max(a.dims.size(), b.dims.size());
  for (size_t i = 0; i < n; ++i) {
    const bool in_a = i < a.dims.size() && !a.dims[i].empty(), in_b = i < b.dims.size() && !b.dims[i].empty();
    if (in_a != in_b || (in_a && a.dims[i] != b.dims[i])) return false;
  }
  return true;
}

/// What code compiled for this machine depends on; executables for the CPU must not travel to another.
std::string machine(const pjrt::Client& client) {
  std::string s = client.platform_name() + " " + client.platform_version() + " " + client.devices().front().kind;
  if (client.platform_name() != "cpu") return s;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();)
    if (line.starts_with("model name") || line.starts_with("flags") || line.starts_with("Features")) s += line;
  return s;
}

std::map<std::string, std::string> parse_flags(const std::string& text) {
  std::map<std::string, std::string> flags;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    check(word.starts_with("--") && equals != word.npos && equals > 2, Code::invalid_config,
          "xla_flags: '{}' is not of the form --name=value", word);
    flags[word.substr(2, equals - 2)] = word.substr(equals + 1);
  }
  return flags;
}

/// The compiler's first lines are the reason; the rest is often the whole program.
std::string first_lines(const std::string& text) {
  std::string out;
  std::istringstream lines(text);
  std::string line;
  for (int i = 0; i < 12 && std::getline(lines, line); ++i)
    out += (i ? "\n" : "") + (line.size() > 500 ? line.substr(0, 500) + " …" : line);
  return out;
}

[[noreturn]] void refuse(const Error& e, const std::string& name, const std::string& text) {
  if (e.code() == Code::out_of_memory) {
    Error with_name(e.code(), fmt::format("compile '{}': {}", name, first_lines(e.message())));
    throw with_name;
  }
  Error out(Code::invalid_graph, fmt::format("compile '{}': {}", name, first_lines(e.message())));
  std::error_code ignored;
  const std::string path =
      fmt::format("{}/maxdiffusion-{}-{}.mlir", std::filesystem::temp_directory_path(ignored).string(), symbol(name),
                  content_hash(text).substr(0, 8));
  try {
    write_file_atomic(path, text);
    out.note(fmt::format("the program is in {}", path));
  } catch (const Error& write) {
    out.note(fmt::format("the program could not be saved: {}", write.message()));
  }
  throw out;
}

}  // namespace

Program compile(const Devices& devices, const Graph& graph, const CompileConfig& config, const std::string& name) {
  using Clock = std::chrono::steady_clock;
  CompileReport report;
  auto start = Clock::now();
  const std::string text = to_stablehlo(graph, symbol(name));
  report.emit_seconds = seconds_since(start);
  report.program_bytes = static_cast<int64_t>(text.size());

  int64_t wanted = 1;
  for (const auto& axis : graph.options().mesh_axes) wanted *= axis.second;
  check(wanted == devices.mesh().devices(), Code::invalid_graph,
        "compile '{}': the graph was opened for {} devices, the mesh has {}", name, wanted, devices.mesh().devices());
  const pjrt::Client& client = devices.client();
  pjrt::CompileOptions options{.device_ids = devices.mesh().device_ids(), .flags = parse_flags(config.xla_flags)};
  const ExecutableCache cache(config.jax_cache_dir);
  const bool cached = !cache.path("").empty();
  const std::string key = cached ? content_hash(text + '\0' + options.serialize() + '\0' +
                                                client.plugin().fingerprint() + '\0' + machine(client))
                                 : "";

  std::optional<pjrt::Executable> executable;
  if (cached) {
    start = Clock::now();
    if (std::optional<std::string> bytes = cache.get(key)) {
      try {
        executable = pjrt::Executable::load(client, *bytes);
        report.from_cache = true;
        report.load_seconds = seconds_since(start);
      } catch (const Error& e) {
        log_warning("executable cache: '{}' does not load and is compiled again: {}", cache.path(key), e.message());
      }
    }
  }
  if (!executable) {
    start = Clock::now();
    try {
      executable = pjrt::Executable::compile(client, text, options);
    } catch (const Error& e) {
      refuse(e, name, text);
    }
    report.compile_seconds = seconds_since(start);
    if (cached) {
      try {
        cache.put(key, executable->compiled().serialize());
      } catch (const Error& e) {  // not every plugin can
        log_warning("executable cache: '{}' is not kept: {}", name, e.message());
      }
    }
  }

  auto impl = std::make_unique<Program::Impl>(Program::Impl{.devices = devices,
                                                            .name = name,
                                                            .input_names = {},
                                                            .output_names = {},
                                                            .inputs = {},
                                                            .outputs = {},
                                                            .executable = std::move(*executable),
                                                            .shard = {},
                                                            .report = report});
  for (const GraphInput& in : graph.inputs()) {
    impl->input_names.push_back(in.name);
    impl->inputs.push_back({in.value.shape(), Sharding{in.sharding}, in.alias.has_value()});
  }
  for (const GraphOutput& out : graph.outputs()) {
    impl->output_names.push_back(out.name);
    impl->outputs.push_back({out.value.shape(), Sharding{out.sharding}});
  }
  for (int id : impl->executable.device_ids())
    for (size_t k = 0; k < devices.local().size(); ++k)
      if (devices.mesh().device_ids()[static_cast<size_t>(devices.local()[k])] == id) impl->shard.push_back(k);
  check(impl->shard.size() == devices.local().size(), Code::device,
        "compile '{}': the program runs on {} devices of this process, the mesh has {}", name, impl->shard.size(),
        devices.local().size());
  return Program(std::move(impl));
}

Program::Program(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Program::Program(Program&&) noexcept = default;
Program::~Program() = default;

const std::vector<std::string>& Program::input_names() const { return impl_->input_names; }
const std::vector<std::string>& Program::output_names() const { return impl_->output_names; }
const Shape& Program::input_shape(size_t i) const { return impl_->inputs.at(i).shape; }
const Sharding& Program::input_sharding(size_t i) const { return impl_->inputs.at(i).sharding; }
const Sharding& Program::output_sharding(size_t i) const { return impl_->outputs.at(i).sharding; }
const CompileReport& Program::report() const { return impl_->report; }

std::optional<MemoryPlan> Program::memory() const {
  std::optional<pjrt::MemoryStats> m = impl_->executable.compiled().memory();
  if (!m) return {};
  return MemoryPlan{.arguments = m->arguments,
                    .outputs = m->outputs,
                    .aliased = m->aliased,
                    .temporary = m->temporary,
                    .code = m->code};
}

std::optional<double> Program::flops() const { return impl_->executable.compiled().flops(); }

std::vector<Array> Program::run(const std::vector<Array*>& inputs) const {
  const Impl& p = *impl_;
  check(inputs.size() == p.inputs.size(), Code::device, "run '{}': {} inputs given, the program takes {}", p.name,
        inputs.size(), p.inputs.size());
  std::vector<std::vector<const pjrt::Buffer*>> buffers(p.shard.size());
  for (auto& b : buffers) b.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Array* a = inputs[i];
    check(a && *a, Code::device, "run '{}': input '{}' is empty (donated to a program, or never filled)", p.name,
          p.input_names[i]);
    check(a->shape() == p.inputs[i].shape, Code::device, "run '{}': input '{}' is {}, the program takes {}", p.name,
          p.input_names[i], to_string(a->shape()), to_string(p.inputs[i].shape));
    check(a->shards().size() == p.shard.size() &&
              (p.shard.size() == 1 || same_sharding(a->sharding(), p.inputs[i].sharding)),
          Code::device, "run '{}': input '{}' is split over devices in another way than the program takes it", p.name,
          p.input_names[i]);
    for (size_t d = 0; d < p.shard.size(); ++d) buffers[d].push_back(&a->shards()[p.shard[d]]);
  }
  std::vector<std::vector<pjrt::Buffer>> results = p.executable.run(buffers);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (p.inputs[i].aliased) *inputs[i] = Array();
  std::vector<Array> out;
  out.reserve(p.outputs.size());
  for (size_t o = 0; o < p.outputs.size(); ++o) {
    std::vector<pjrt::Buffer> shards(p.shard.size());
    for (size_t d = 0; d < p.shard.size(); ++d) shards[p.shard[d]] = std::move(results[d][o]);
    out.emplace_back(p.outputs[o].shape, p.outputs[o].sharding, std::move(shards));
  }
  return out;
}

ArrayMap Program::run(ArrayMap& donated, const ArrayMap& kept) const {
  const Impl& p = *impl_;
  std::vector<Array*> inputs;
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const std::string& name = p.input_names[i];
    if (auto it = donated.find(name); it != donated.end()) {
      inputs.push_back(&it->second);
      continue;
    }
    auto it = kept.find(name);
    check(it != kept.end(), Code::device, "run '{}': input '{}' is not given", p.name, name);
    check(!p.inputs[i].aliased, Code::device,
          "run '{}': input '{}' gives its memory to an output, so it must be among the donated arrays", p.name, name);
    inputs.push_back(const_cast<Array*>(&it->second));  // not aliased, so run() leaves it alone
  }
  std::vector<Array> results = run(inputs);
  for (size_t i = 0; i < p.inputs.size(); ++i)
    if (p.inputs[i].aliased) donated.erase(p.input_names[i]);
  ArrayMap out;
  for (size_t o = 0; o < results.size(); ++o) out[p.output_names[o]] = std::move(results[o]);
  return out;
}

std::vector<HostArray> evaluate(const Devices& devices, const Graph& graph, const std::vector<HostArray>& inputs) {
  const Program program = compile(devices, graph, CompileConfig{.jax_cache_dir = "off", .xla_flags = ""}, "evaluate");
  check(inputs.size() == graph.inputs().size(), Code::device, "evaluate: {} inputs given, the graph has {}",
        inputs.size(), graph.inputs().size());
  std::vector<Array> arrays;
  for (size_t i = 0; i < inputs.size(); ++i)
    arrays.push_back(devices.put(inputs[i], program.input_sharding(i), program.input_names()[i]));
  std::vector<Array*> pointers;
  for (Array& a : arrays) pointers.push_back(&a);
  std::vector<HostArray> out;
  for (const Array& a : program.run(pointers)) out.push_back(devices.get(a));
  return out;
}

}  // namespace md
