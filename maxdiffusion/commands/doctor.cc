// `doctor`: reports the state of this machine and what prevents a run. Probes that may hang or abort run in child
// processes: this program with the arguments of kProbes.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/exit_status.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/base/this_machine.h"
#include "maxdiffusion/base/user_cache.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/probes/child.h"
#include "maxdiffusion/probes/host_probe.h"
#include "maxdiffusion/probes/plugin_probe.h"
#include "maxdiffusion/processes/launch.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/processes/rendezvous.h"

namespace md {
namespace {

struct DoctorKeys {
  bool json = false;
  double probe_seconds = 60, plan_seconds = 600;
  template <class V>
  void visit(V&& v) {
    v("json", json, "print JSON");
    v("probe_seconds", probe_seconds, "seconds that a plugin, a driver or a disk may take to answer",
      at_least(above(0)));
    v("plan_seconds", plan_seconds, "with a config: seconds that planning its step may take", at_least(above(0)));
  }
};

/// Runs the probe of a child process; returns whether the words name one.
bool probe(const Words& words) {
  const auto word = [&](size_t i) { return i < words.size() ? words[i] : std::string(); };
  const std::map<std::string, std::function<void()>> probes = {
      {"probe=plugin", [&] { show_plugin(word(1), word(2)); }},
      {"probe=gpu_driver", [&] { show_gpu_driver(word(1)); }},
      {"probe=processor", [] { show_processor(); }},
      {"probe=folder", [&] { show_folder(word(1)); }},
      {"probe=mpi", [] { show_mpi(); }},
  };
  const auto it = probes.find(word(0));
  if (it == probes.end()) return false;
  it->second();
  return true;
}

/// Prefixes of environment variables that make a process part of an MPI job; children start without them.
const std::vector<std::string> kOfLaunchers = {"PMI_", "PMIX_", "OMPI_", "HYDI_", "MPI_"};

struct DoctorArguments {
  DoctorKeys keys;
  std::string config;  // a file; empty: none
  Words words;         // overrides of its keys
};

DoctorArguments parse_arguments(const Words& words) {
  DoctorArguments a;
  a.words = take_keys(words, a.keys);
  if (!a.words.empty() && !a.words[0].starts_with('-') && a.words[0].find('=') == std::string::npos) {
    a.config = a.words[0];
    a.words.erase(a.words.begin());
  }
  return a;
}

ChildResult run_self(Words words, double seconds) {
  words.insert(words.begin(), this_program());
  return run_child(words, {.seconds = seconds, .without = kOfLaunchers});
}

/// The error that a child has printed, "error: …" and its notes.
Error error_of(const ChildResult& r, const std::string& what) {
  const size_t at = r.err.rfind("error: ");
  if (r.well() || at == r.err.npos) return {Code::device, fmt::format("{}: {}", what, r.end())};
  std::vector<std::string> lines;
  for (size_t from = at + 7; from < r.err.size();) {
    const size_t end = std::min(r.err.find('\n', from), r.err.size());
    lines.push_back(r.err.substr(from, end - from));
    from = end + 1;
  }
  Code code = Code::device;
  for (const Code c : {Code::invalid_config, Code::invalid_graph, Code::io, Code::out_of_memory, Code::internal})
    if (r.status == exit_status(c)) code = c;
  Error e(code, lines[0]);
  for (size_t i = 1; i < lines.size(); ++i)
    e.note(lines[i].substr(std::min(lines[i].find_first_not_of(' '), lines[i].size())));
  return e;
}

/// The value of a key in the output of `inspect config`, with defaults.
std::string key(const std::string& yaml, const std::string& name) {
  const std::regex line("(?:^|\n)" + name + ": *\"?([^\"\n]*)\"?");
  std::smatch m;
  return std::regex_search(yaml, m, line) ? m[1].str() : "";
}

/// Runs `plan` for the config: cost of a step.
Findings probe_plan(const DoctorArguments& options) {
  Words words = {"plan", options.config};
  words.insert(words.end(), options.words.begin(), options.words.end());
  const ChildResult r = run_self(words, options.keys.plan_seconds);
  if (r.timed_out)
    return {warning("plan", fmt::format("{}: not known after {:.0f} s of compiling", options.config, r.seconds),
                    fmt::format("doctor {} plan_seconds={:.0f}", options.config, 4 * options.keys.plan_seconds))};
  if (!r.well()) return {from_error("plan", error_of(r, "plan " + options.config), "check " + options.config)};
  static const std::regex together("(?:^|\n)together ([^\n]*)");
  Findings out;
  for (std::sregex_iterator i(r.out.begin(), r.out.end(), together), end; i != end; ++i)
    out.push_back(ok("plan", fmt::format("{}: a step takes {} of each device", options.config, (*i)[1].str())));
  if (out.empty()) out.push_back(ok("plan", options.config + ": its step compiles"));
  return out;
}

/// With several processes: differences of their hosts' clocks, and findings of processes other than 0.
Findings join(const Findings& config_findings) {
  nlohmann::json mine = nlohmann::json::array();
  for (const Finding& f : config_findings)
    if (f.status != Finding::Status::ok) mine.push_back(to_json(f));
  Processes& all = processes();
  all.barrier("doctor");
  const double now = seconds_since_1970();
  const std::vector<std::string> clocks = all.gather("clocks", fmt::format("{:.6f}", now)),
                                 hosts = all.gather("hosts of doctor", host_name()),
                                 found = all.gather("findings", dump_json(mine));
  Findings out;
  if (!all.is_coordinator()) return out;
  double least = 0, most = 0;
  for (const std::string& clock : clocks) {
    least = std::min(least, std::stod(clock) - now);
    most = std::max(most, std::stod(clock) - now);
  }
  const std::string apart = fmt::format("the clocks of {} processes are {:.3f} s apart", clocks.size(), most - least);
  out.push_back(most - least > 2 ? warning("clocks", apart, "timedatectl set-ntp true, on every host")
                                 : ok("clocks", apart));
  for (size_t i = 1; i < found.size(); ++i)
    for (const auto& f : parse_json(found[i])) {
      const std::string name = fmt::format("{} of {} ({})", f.value("name", ""), i, hosts[i]);
      out.push_back(f.value("status", "") == "error" ? error(name, f.value("found", ""), f.value("try", ""))
                                                     : warning(name, f.value("found", ""), f.value("try", "")));
    }
  return out;
}

void doctor(const Words& words) {
  if (probe(words)) {
    std::fflush(nullptr);
    std::_Exit(0);  // without destructors, because an opened plugin may fail at exit
  }
  const DoctorArguments options = parse_arguments(words);
  const DoctorKeys& k = options.keys;
  const Launch launch = launch_of_environment();
  const bool several = launch.count > 1;
  Findings all;
  const auto add = [&](const char* name, const std::function<Findings()>& find) {
    Findings found;
    try {
      found = find();
    } catch (const Error& e) {
      found = {from_error(name, e)};
    } catch (const std::exception& e) {
      found = {error(name, e.what(), "", Code::internal)};
    }
    for (Finding& f : found) {
      if (!k.json && launch.rank == 0) fmt::print("{}\n", describe(f));
      all.push_back(std::move(f));
    }
    std::fflush(stdout);
  };

  add("system", probe_system);
  add("processor", probe_processor);
  add("memory", probe_memory);
  add("limits", probe_limits);
  std::string yaml;
  bool readable = true;
  add("config", [&]() -> Findings {
    const TemporaryFolder folder;
    const std::string empty = folder / "empty.yml";
    write_file_atomic(empty, "{}\n");
    Words inspect = {"inspect", "config", options.config.empty() ? empty : options.config};
    inspect.insert(inspect.end(), options.words.begin(), options.words.end());
    const ChildResult r = run_self(inspect, k.probe_seconds);
    readable = r.well();
    if (!readable) return {from_error("config", error_of(r, options.config), "inspect keys, which prints every key")};
    yaml = r.out;
    if (options.config.empty()) return {};
    return {ok("config", options.config)};
  });
  const std::string hardware = key(yaml, "hardware"), plugin = key(yaml, "plugin");
  for (const char* kind : {"cpu", "gpu", "tpu"}) {
    const bool chosen = hardware == kind;
    if (!options.config.empty() && !chosen) continue;
    const PluginProbe p{kind, chosen ? plugin : "", chosen, k.probe_seconds, ""};
    add(kind, [&] { return probe_plugin(p); });
    if (std::string_view(kind) == "gpu") add(kind, [&] { return probe_gpu_driver(p); });
  }
  add("output_dir", [&] {
    return probe_folder({"outputs", key(yaml, "output_dir"), "output_dir", int64_t{1} << 30, k.probe_seconds});
  });
  add("cache", [&]() -> Findings {
    const std::string named = key(yaml, "jax_cache_dir"), folder = named.empty() ? user_cache_folder() : named;
    if (folder == "off") return {};
    if (folder.empty())
      return {warning("program cache", "neither HOME nor XDG_CACHE_HOME is set; every run compiles again",
                      "jax_cache_dir=FOLDER")};
    return probe_folder({"program cache", folder, "jax_cache_dir", int64_t{100} << 20, k.probe_seconds});
  });
  add("hub", [&] { return probe_hub(k.probe_seconds); });
  add("mpi", [&] { return probe_mpi(k.probe_seconds); });
  add("hosts", probe_hosts);
  if (!several) add("clocks", []() -> Findings { return {ok("clocks", "not compared: this is one process")}; });
  if (!options.config.empty() && readable) add("plan", [&] { return probe_plan(options); });
  if (several)
    add("processes", [&] {
      join_processes();
      return join(all);
    });

  int64_t errors = 0;
  Code first = Code::device;
  nlohmann::json lines = nlohmann::json::array();
  for (const Finding& f : all) {
    if (f.status == Finding::Status::error && errors++ == 0) first = f.code;
    lines.push_back(to_json(f));
  }
  if (k.json && processes().is_coordinator())
    fmt::print("{}\n", dump_json({{"version", version()}, {"errors", errors}, {"findings", lines}}, 2));
  std::fflush(stdout);
  if (errors > 0)
    throw Error(first, fmt::format("doctor: {} found; the first of them is the exit status", counted(errors, "error")));
}

}  // namespace

Command doctor_command() {
  return {"doctor",
          "[CONFIG] [--json] [key=value …]",
          "look at processor, memory, disks, plugins, devices and drivers, and say what is wrong and what mends it",
          doctor,
          [](const KeyPrinter& print) { print_command_keys<DoctorKeys>(print); },
          true};
}

}  // namespace md
