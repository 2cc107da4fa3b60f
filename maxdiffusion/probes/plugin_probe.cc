#include "maxdiffusion/probes/plugin_probe.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/pjrt/executable.h"
#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/probes/child.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

void print_json(const json& line) {
  fmt::print("{}\n", dump_json(line));
  std::fflush(stdout);
}

/// The lines of a child's output merged to one object; later lines win. "stage" is its last stage.
json lines_of(const std::string& text) {
  json all = json::object();
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (const json line = parse_json_or_discard(text.substr(at, end - at)); line.is_object()) all.update(line);
    at = end + 1;
  }
  return all;
}

json text_of(const pjrt::Option& option) {
  return std::visit([](const auto& value) { return json(fmt::format("{}", value)); }, option);
}

double gib(double bytes) { return bytes / (1 << 30); }

/// A product of matrices of ones; every element of the result must equal their width.
void multiply(const pjrt::Client& client, int device) {
  constexpr int64_t kWidth = 256;
  const std::string type = fmt::format("tensor<{0}x{0}xf32>", kWidth);
  const std::string text = fmt::format(
      "module @probe {{\n  func.func public @main(%x: {0}) -> {0} {{\n"
      "    %y = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : ({0}, {0}) -> {0}\n"
      "    return %y : {0}\n  }}\n}}",
      type);
  const auto program = pjrt::Executable::compile(client, text, {.device_ids = {device}, .flags = {}});
  HostArray ones(Shape{DType::f32, {kWidth, kWidth}});
  for (float& v : ones.mutable_view<float>()) v = 1;
  const pjrt::Buffer x = client.put(device, ones.shape(), ones.data(), {}, ones.owner());
  print_json({{"stage", "a product is computed"}});
  const auto out = program.run({{&x}});
  HostArray result(ones.shape());
  out[0][0].copy_to_host(result.mutable_data(), result.bytes(), 2).wait();
  for (const float v : result.view<float>())
    check(std::abs(v - static_cast<float>(kWidth)) < 1, Code::device, "device {} computes {}; expected {}", device, v,
          kWidth);
}

/// The cure for a damaged or hanging plugin.
std::string other_plugin(const PluginProbe& p) {
  const char* wheel = pjrt::platform_for(p.hardware).wheel;
  return p.plugin.empty() ? fmt::format("pip install --force-reinstall {}", wheel)
                          : fmt::format("no plugin=, to use the one of the wheel {}", wheel);
}

std::string cure_of_hang(const PluginProbe& p) {
  if (p.hardware == "tpu") return "lsof -w /dev/accel* /dev/vfio/*, which names the process that holds the chips";
  if (p.hardware == "gpu") return "nvidia-smi, which shows processes on the GPUs, and whether the driver answers";
  return other_plugin(p);
}

std::string name_of(const PluginProbe& p) { return p.hardware + " plugin"; }

/// "8 × NVIDIA H100 80GB HBM3, 79.2 GiB each".
std::string devices_of(const json& report) {
  std::string text = fmt::format("{} × {}", report.at("devices").get<int64_t>(), report.at("kind").get<std::string>());
  if (report.contains("memory")) text += fmt::format(", {:.1f} GiB each", gib(report.at("memory").get<double>()));
  return text;
}

Findings findings_of(const PluginProbe& p, const std::string& path, const ChildResult& r) {
  const json report = lines_of(r.out);
  const std::string stage = report.value("stage", "the program started");
  Findings out;
  if (report.contains("api")) {
    std::string versions;
    const json attributes = report.value("attributes", json::object());
    for (const auto& [name, value] : attributes.items())
      if (name.find("version") != name.npos) versions += fmt::format(", {} {}", name, value.get<std::string>());
    out.push_back(
        ok(name_of(p), fmt::format("{}: PJRT API {}{}", path, report.at("api").get<std::string>(), versions)));
  }
  if (report.contains("devices"))
    out.push_back(
        ok(p.hardware + " devices", fmt::format("{}; {}; a product is right; {:.1f} s to open and compute",
                                                devices_of(report), report.value("platform_version", ""), r.seconds)));
  if (r.well()) return out;
  if (report.contains("devices")) out.pop_back();
  if (report.contains("error")) {
    const auto code = static_cast<Code>(report.at("code").get<int>());
    const std::string cure = report.value("try", "");
    out.push_back(error(name_of(p), report.at("error"), cure.empty() ? other_plugin(p) : cure, code));
  } else if (r.timed_out) {
    out.push_back(error(name_of(p), fmt::format("{}: {} while {}", path, r.end(), stage), cure_of_hang(p)));
  } else {
    const std::string words = shortened(r.last_words());
    out.push_back(error(name_of(p),
                        fmt::format("{}: it ended its process by {} while {}{}", path, r.end(), stage,
                                    words.empty() ? "" : ": " + words),
                        other_plugin(p)));
  }
  return out;
}

/// A function of a library; throws if it is missing.
template <class F>
F* function(void* library, const char* name) {
  auto* f = reinterpret_cast<F*>(::dlsym(library, name));
  check(f != nullptr, Code::device, "it has no {}", name);
  return f;
}

/// Prints facts from CUDA's driver API, whose functions return 0 on success.
void show_cuda() {
  void* cuda = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) return print_json({{"cuda_error", ::dlerror()}});
  print_json({{"stage", "libcuda.so.1 was started"}});
  if (const int status = function<int(unsigned)>(cuda, "cuInit")(0); status != 0)
    return print_json({{"cuda_error", fmt::format("cuInit gives error {}", status)}});
  int version = 0, count = 0;
  function<int(int*)>(cuda, "cuDriverGetVersion")(&version);
  function<int(int*)>(cuda, "cuDeviceGetCount")(&count);
  int reach = 0;
  auto* peer = function<int(int*, int, int)>(cuda, "cuDeviceCanAccessPeer");
  for (int a = 0; a < count; ++a)
    for (int b = 0; b < count; ++b)
      if (int yes = 0; a != b && peer(&yes, a, b) == 0) reach += yes;
  print_json({{"cuda", fmt::format("{}.{}", version / 1000, version % 1000 / 10)}, {"gpus", count}, {"reach", reach}});
}

/// Searches for NCCL where wheels install it, next to the plugin: …/nvidia/nccl/lib.
void show_nccl(const std::string& plugin) {
  std::vector<std::string> places = {"libnccl.so.2"};
  for (fs::path folder = fs::path(plugin).parent_path(); folder.has_relative_path(); folder = folder.parent_path())
    places.push_back((folder / "nvidia/nccl/lib/libnccl.so.2").string());
  for (const std::string& place : places)
    if (void* nccl = ::dlopen(place.c_str(), RTLD_NOW)) {
      int version = 0;
      function<int(int*)>(nccl, "ncclGetVersion")(&version);
      return print_json({{"nccl", fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100)}});
    }
}

}  // namespace

void show_plugin(const std::string& hardware, const std::string& path) try {
  print_json({{"stage", "the library was loaded"}});
  const auto plugin = pjrt::Plugin::load(path);
  json attributes = json::object();
  for (const auto& [name, value] : plugin->attributes()) attributes[name] = text_of(value);
  print_json({{"stage", "its devices were opened"},
              {"api", fmt::format("{}.{}", plugin->api_major(), plugin->api_minor())},
              {"attributes", attributes}});
  const auto client = pjrt::Client::open(hardware, {}, path);
  int64_t local_devices = 0;
  const pjrt::Device* first = nullptr;
  for (const pjrt::Device& d : client->devices())
    if (d.addressable && local_devices++ == 0) first = &d;
  check(first != nullptr, Code::device, "plugin '{}' shows no device", path);
  json devices = {{"stage", "a product was compiled"},
                  {"devices", local_devices},
                  {"kind", first->kind},
                  {"platform_version", shortened(client->platform_version(), 80)}};
  if (const auto memory = client->memory(first->id); memory && memory->limit) devices["memory"] = *memory->limit;
  print_json(devices);
  for (const pjrt::Device& d : client->devices())
    if (d.addressable) multiply(*client, d.id);
} catch (const Error& e) {
  const Finding f = from_error("", e);
  print_json({{"error", f.found}, {"try", f.cure}, {"code", static_cast<int>(f.code)}});
  throw;
}

void show_gpu_driver(const std::string& plugin) {
  show_cuda();
  print_json({{"stage", "NCCL was loaded"}});
  show_nccl(plugin);
}

Findings probe_plugin(const PluginProbe& p) {
  const pjrt::PlatformDef& platform = pjrt::platform_for(p.hardware);
  const char* assumed = std::getenv("MAXDIFFUSION_ASSUME_DEVICES");
  const std::string absent = platform.absent && !(assumed && *assumed) ? platform.absent(p.root) : "";
  std::string path = p.plugin;
  if (path.empty()) try {
      path = pjrt::Plugin::find(p.hardware);
    } catch (const Error& e) {
      if (!p.required && !absent.empty()) return {ok(name_of(p), absent + "; and no plugin is installed for one")};
      return {from_error(name_of(p), e)};
    }
  // Without a device some plugins wait for minutes; a plugin that the config names may be for other devices.
  if (!absent.empty() && p.plugin.empty()) {
    if (!p.required) return {ok(name_of(p), fmt::format("{}; '{}' is not opened", absent, path))};
    const bool gpu = p.hardware == "gpu";
    return {error(p.hardware + " devices", absent,
                  gpu ? "nvidia-smi, which comes with the driver; or hardware=cpu" : "hardware=cpu")};
  }
  return findings_of(p, path,
                     run_child({this_program(), "doctor", "probe=plugin", p.hardware, path}, {.seconds = p.seconds}));
}

std::string driver_version(const std::string& text) {
  static const std::regex version(R"(NVRM version:.*?\s(\d+\.\d+(\.\d+)?)\s)");
  std::smatch m;
  return std::regex_search(text, m, version) ? m[1].str() : "";
}

int wanted_driver(const std::string& plugin) {
  if (plugin.find("cuda13") != plugin.npos) return 580;
  if (plugin.find("cuda12") != plugin.npos) return 525;
  return 0;
}

Finding check_driver(const std::string& version, const std::string& plugin) {
  const int required = wanted_driver(plugin);
  if (version.empty())
    return warning("gpu driver", "/proc/driver/nvidia/version does not say its version", "nvidia-smi");
  if (std::stoi(version) < required)
    return error("gpu driver", fmt::format("{}; the plugin '{}' needs {} or newer", version, plugin, required),
                 fmt::format("apt-get install nvidia-driver-{}, or this system's driver of that version", required));
  return ok("gpu driver", required > 0 ? fmt::format("{}; {} or newer is needed", version, required) : version);
}

Findings probe_gpu_driver(const PluginProbe& p) {
  if (!pjrt::kGpuPlatform.absent(p.root).empty()) return {};
  std::string plugin = p.plugin;
  if (plugin.empty()) try {
      plugin = pjrt::Plugin::find("gpu");
    } catch (const Error&) {
      plugin.clear();  // probe_plugin reports this
    }
  Findings out;
  std::ifstream file(p.root + "/proc/driver/nvidia/version");
  out.push_back(check_driver(driver_version({std::istreambuf_iterator<char>(file), {}}), plugin));
  const ChildResult r = run_child({this_program(), "doctor", "probe=gpu_driver", plugin}, {.seconds = p.seconds});
  const json report = lines_of(r.out);
  if (!r.well())
    out.push_back(error(
        "cuda", fmt::format("{} while {}: {}", r.end(), report.value("stage", "it started"), shortened(r.last_words())),
        "nvidia-smi, which shows whether the driver answers"));
  if (report.contains("cuda_error"))
    out.push_back(error("cuda", report.at("cuda_error"),
                        "nvidia-smi; in a container: docker run --gpus all …, which shows it the driver"));
  if (!report.contains("cuda")) return out;
  const int64_t gpus = report.at("gpus"), reach = report.at("reach"), pairs = gpus * (gpus - 1);
  out.push_back(ok("cuda", fmt::format("the driver supports CUDA up to {}; {}", report.at("cuda").get<std::string>(),
                                       counted(gpus, "GPU"))));
  if (gpus < 2) return out;
  out.push_back(reach == pairs ? ok("peer access", "every GPU reaches the memory of every other")
                               : warning("peer access",
                                         fmt::format("{} of {} pairs of GPUs reach each other's memory", reach, pairs),
                                         "nvidia-smi topo -p2p r, which shows the pairs"));
  out.push_back(report.contains("nccl") ? ok("nccl", report.at("nccl"))
                                        : warning("nccl", "no libnccl.so.2 was found", "pip install nvidia-nccl-cu13"));
  return out;
}

}  // namespace md
