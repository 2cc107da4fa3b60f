// Graph → text → executable, through the cache; and the error message if compilation fails.
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <set>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/runtime/executable_cache.h"
#include "maxdiffusion/runtime/executable_key.h"
#include "maxdiffusion/runtime/memory.h"
#include "maxdiffusion/runtime/program_impl.h"

namespace md {

Program compile_text(const Devices& devices, const Graph& graph, const CompileConfig& config, const std::string& name,
                     const std::string& text, CompileReport report);

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Letters, digits and underscores: MLIR symbols and file names.
std::string symbol(const std::string& name) {
  std::string s;
  for (char c : name) s += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return s.empty() || std::isdigit(static_cast<unsigned char>(s[0])) ? "p" + s : s;
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

/// Flags of the config, then of its flag set, then of the platform. `text`: the graph's StableHLO.
std::map<std::string, std::string> flags_of(const CompileConfig& config, const pjrt::PlatformDef& platform,
                                            const Graph& graph, const std::string& text) {
  std::map<std::string, std::string> flags = parse_flags(config.xla_flags);
  for (const pjrt::FlagSet& set : platform.flag_sets)
    if (set.name == config.libtpu_flags) flags.insert(set.flags.begin(), set.flags.end());
  if (config.minimize_memory) flags.insert(platform.lean_flags.begin(), platform.lean_flags.end());
  for (const pjrt::CallFlag& of : platform.call_flags)
    if (text.find(of.call) != text.npos && flags.emplace(of.flag, of.value).second)
      log_info_once("{}={} for a program that calls {}: {}", of.flag, of.value, of.call, of.consequence);
  flags.insert(platform.compile_flags.begin(), platform.compile_flags.end());
  if (std::ranges::any_of(graph.inputs(), &GraphInput::in_host_memory))
    flags.insert(platform.host_flags.begin(), platform.host_flags.end());
  return flags;
}

const std::string& cache_folder(const CompileConfig& config) {
  return config.aot_cache_dir.empty() ? config.jax_cache_dir : config.aot_cache_dir;
}

/// The first lines of a compiler's error have the reason; the rest is often the whole program.
std::string first_lines(const std::string& text) {
  std::string out;
  std::istringstream lines(text);
  std::string line;
  for (int i = 0; i < 12 && std::getline(lines, line); ++i)
    out += (i ? "\n" : "") + (line.size() > 500 ? line.substr(0, 500) + " …" : line);
  return out;
}

std::string print(const Graph& graph, const Mesh& mesh, const std::string& name, CompileReport& report) {
  const int64_t graph_devices = graph.options().devices();
  check(graph_devices == mesh.devices(), Code::invalid_graph,
        "compile '{}': the graph was opened for {} devices, the mesh has {}", name, graph_devices, mesh.devices());
  const auto start = Clock::now();
  std::string text = to_stablehlo(graph, symbol(name));
  report.emit_seconds = seconds_since(start);
  report.program_bytes = static_cast<int64_t>(text.size());
  return text;
}

/// Removes a flag from `flags` that an older compiler does not know, if it is the platform's; flags of the config are
/// an error.
bool remove_unknown_flag(const Error& e, const CompileConfig& config, std::map<std::string, std::string>& flags) {
  constexpr std::string_view kSaid = "No such compile option: '";
  const std::string& text = e.message();
  const size_t at = text.find(kSaid);
  if (at == text.npos) return false;
  const std::string name = text.substr(at + kSaid.size(), text.find('\'', at + kSaid.size()) - at - kSaid.size());
  if (parse_flags(config.xla_flags).contains(name)) return false;
  return flags.erase(name) > 0;
}

[[noreturn]] void refuse(const Error& e, const std::string& name, const std::string& text) {
  const Code code = e.code() == Code::out_of_memory ? e.code() : Code::invalid_graph;
  Error out(code, fmt::format("compile '{}': {}", name, first_lines(e.message())));
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

/// Sends missing cache entries of process 0 to the others, which may not share a file system. Either all load what
/// process 0 has compiled or, if that cannot be cached, each compiles.
void share(const ExecutableCache& cache, const std::set<std::string>& entries, const std::string& topic) {
  constexpr size_t kTogether = size_t{1} << 20;  // small messages, so that heartbeats can be sent between them
  Processes& all = processes();
  std::istringstream names(all.from_coordinator(topic, fmt::format("{}", fmt::join(entries, "\n"))));
  for (std::string name; std::getline(names, name);) {
    const bool cached = cache.get(name).has_value();
    const std::vector<std::string> found = all.gather(topic, cached ? "here" : "");
    if (found[0].empty() || std::ranges::count(found, "") == 0) continue;
    std::string bytes = all.is_coordinator() ? cache.get(name).value_or("") : "", got;
    const size_t size = std::stoull(all.from_coordinator(topic, std::to_string(bytes.size())));
    for (size_t at = 0; at < size; at += kTogether)
      got += all.from_coordinator(topic, all.is_coordinator() ? bytes.substr(at, kTogether) : "");
    if (!cached) cache.keep(name, got);
  }
}

}  // namespace

void on_coordinator_first(const Devices& devices, const CompileConfig& config, const std::string& topic,
                          const std::function<void(const CompileConfig&)>& compiles) {
  if ((devices.replicas() == 1 && !devices.joint()) || cache_folder(config) == "off") return compiles(config);
  std::mutex mutex;
  std::set<std::string> used;
  CompileConfig with_uses = config;
  with_uses.uses = [&](const std::string& entry) {
    const std::lock_guard lock(mutex);
    used.insert(entry);
  };
  if (processes().is_coordinator()) compiles(with_uses);
  share(ExecutableCache(cache_folder(config)), used, topic);
  if (!processes().is_coordinator()) compiles(with_uses);
}

Program compile(const Devices& devices, const Graph& graph, const CompileConfig& config, const std::string& name) {
  CompileReport report;
  const std::string text = print(graph, devices.mesh(), name, report);
  return compile_text(devices, graph, config, name, text, report);
}

std::shared_ptr<const Program> ProgramCache::compile(const Devices& devices, const Graph& graph,
                                                     const CompileConfig& config, const std::string& name) {
  CompileReport report;
  const std::string text = print(graph, devices.mesh(), name, report);
  std::string key = text;
  for (const GraphInput& in : graph.inputs()) key += "\n" + in.name;
  for (const GraphOutput& out : graph.outputs()) key += "\n" + out.name;
  key = content_hash(key);
  if (const auto found = std::ranges::find(programs_, key, [](const auto& p) { return p.first; });
      found != programs_.end()) {
    programs_.splice(programs_.begin(), programs_, found);
  } else {
    auto program = std::make_shared<const Program>(compile_text(devices, graph, config, name, text, report));
    programs_.emplace_front(std::move(key), std::move(program));
    if (programs_.size() > most_) programs_.pop_back();
  }
  return programs_.front().second;
}

/// `text`: StableHLO of the graph.
Program compile_text(const Devices& devices, const Graph& graph, const CompileConfig& config, const std::string& name,
                     const std::string& text, CompileReport report) {
  Span span("compile");
  auto start = Clock::now();
  const pjrt::Client& client = devices.client();
  pjrt::CompileOptions options{.device_ids = devices.mesh().device_ids(),
                               .flags = flags_of(config, client.platform(), graph, text)};
  report.flags = options.flags;
  // Only one process compiles: it must not wait for the others to autotune kernels.
  if (devices.joint() && client.platform().hardware == std::string_view("gpu"))
    options.flags.emplace("xla_gpu_shard_autotuning", "False");
  const ExecutableCache cache(cache_folder(config));
  const bool cached = !cache.path("").empty();
  std::string key;
  if (cached)
    key = executable_key(
        text, options,
        {client.platform(), client.platform_version(), cache.hash_of_file(client.plugin().path()), client.devices()});

  std::optional<pjrt::Executable> executable;
  if (cached && config.uses) config.uses(key);
  if (cached) {
    start = Clock::now();
    if (std::optional<std::string> bytes = cache.get(key)) {
      try {
        executable = pjrt::Executable::load(client, *bytes);
        report.from_cache = true;
        report.load_seconds = seconds_since(start);
      } catch (const Error& e) {
        log_warning("executable cache: '{}' cannot be loaded and is compiled again: {}", cache.path(key), e.message());
      }
    }
  }
  if (!executable) {
    start = Clock::now();
    while (!executable) {
      try {
        executable = pjrt::Executable::compile(client, text, options);
      } catch (const Error& e) {
        if (!remove_unknown_flag(e, config, options.flags)) refuse(e, name, text);
      }
    }
    report.compile_seconds = seconds_since(start);
    if (cached) {
      try {
        cache.put(key, executable->compiled().serialize());
      } catch (const Error& e) {  // not every plugin supports this
        log_warning("executable cache: '{}' is not saved: {}", name, e.message());
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
    impl->inputs.push_back({in.value.shape(), sharding_of(in), in.alias.has_value()});
  }
  for (const GraphOutput& out : graph.outputs()) {
    impl->output_names.push_back(out.name);
    impl->outputs.push_back({out.value.shape(), Sharding{out.sharding, out.order}});
  }
  for (int id : impl->executable.device_ids())
    for (size_t k = 0; k < devices.local().size(); ++k)
      if (devices.mesh().device_ids()[static_cast<size_t>(devices.local()[k])] == id) impl->shard.push_back(k);
  check(impl->shard.size() == devices.local().size(), Code::device,
        "compile '{}': the program runs on {} devices of this process, the mesh has {}", name, impl->shard.size(),
        devices.local().size());
  Program program(std::move(impl));
  // Return the compiler's freed small blocks before the program allocates large ones.
  constexpr int64_t kLarge = int64_t{1} << 26;
  if (const auto plan = program.memory(); plan && plan->temporary >= kLarge) return_freed_memory();
  return program;
}

namespace {

void describe(const pjrt::Compiled& compiled, const Mesh& mesh, AheadOfTime& out) {
  out.memory = memory_plan(compiled);
  out.flops = compiled.flops();
  out.bytes_accessed = compiled.bytes_accessed();
  out.estimated_seconds = compiled.estimated_seconds();
  if (auto found = compiled.operations()) {
    out.collectives = sum_collectives(found->collectives, mesh);
    out.custom_calls = std::move(found->custom_calls);
    out.turned = std::move(found->turned);
    out.host_copies = std::move(found->host_copies);
    out.products = std::move(found->products);
    out.instructions = found->instructions;
    out.type_changes = found->type_changes;
    out.cycles = found->cycles;
    out.kernel_flops = found->kernel_flops;
  }
}

}  // namespace

AheadOfTime compile_ahead(const Devices& devices, const Graph& graph, const CompileConfig& config,
                          const std::string& name) {
  const Program program = compile(devices, graph, config, name);
  AheadOfTime out;
  out.report = program.report();
  describe(program.compiled(), devices.mesh(), out);
  return out;
}

AheadOfTime compile_ahead(const pjrt::Topology& topology, const Mesh& mesh, const Graph& graph,
                          const CompileConfig& config, const std::string& name) {
  AheadOfTime out;
  const std::string text = print(graph, mesh, name, out.report);
  const pjrt::CompileOptions options{.device_ids = mesh.device_ids(),
                                     .flags = flags_of(config, topology.platform(), graph, text)};
  out.report.flags = options.flags;
  const auto start = Clock::now();
  try {
    const pjrt::Compiled compiled = topology.compile(text, options);
    out.report.compile_seconds = seconds_since(start);
    describe(compiled, mesh, out);
    if (!config.aot_cache_dir.empty()) {
      const ExecutableCache cache(config.aot_cache_dir);
      const std::string key = executable_key(text, options,
                                             {topology.platform(), topology.platform_version(),
                                              cache.hash_of_file(topology.plugin().path()), topology.devices()});
      cache.put(key, compiled.serialize());  // logs a warning on failure
      if (exists(cache.path(key))) out.cache_file = cache.path(key);
    }
  } catch (const Error& e) {
    refuse(e, name, text);
  }
  return out;
}

}  // namespace md
