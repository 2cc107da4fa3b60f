// Times video models and Flux's transformer: video_bench encode|decode|denoise CONFIG.json SIZE FRAMES [options]
//   --chunk N   latent frames at a time (1); 0: all of them at once
//   --dtype T   weights and activations of the denoiser: f32, bf16 (f32)
//   --reps N    timed runs after the first (2)
// The model is an AutoencoderKLWan, or a WanTransformer3DModel or FluxTransformer2DModel that runs once on one latent.
// Weights are random. SIZE is in pixels: "256" for a square or "832x480"; Flux has one frame. Prints one JSON line.
// bench/video.py runs it next to diffusers and makes the table.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "tests/families/video_family.h"

namespace md {
namespace {

HostArray counted(const Shape& shape) {
  HostArray a(shape);
  if (shape.dtype == DType::u8)
    for (size_t i = 0; i < a.bytes(); ++i) a.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i * 37 % 251);
  else
    for (size_t i = 0; float& v : a.mutable_view<float>()) v = static_cast<float>(i++ * 37 % 251) / 125 - 1;
  return a;
}

struct Bench {
  MediaSize size;
  int64_t chunk = 1;
  DType dtype = DType::f32;
  int reps = 2;
};

/// Parses SIZE into width and height.
MediaSize parse_size(const std::string& text, int64_t frames) {
  const size_t x = text.find('x');
  const int64_t width = std::stoll(text);
  return {x == text.npos ? width : std::stoll(text.substr(x + 1)), width, frames};
}

std::pair<double, double> used() {  // CPU seconds, peak memory in MiB
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6; };
  return {seconds(u.ru_utime) + seconds(u.ru_stime), static_cast<double>(u.ru_maxrss) / 1024};
}

/// Runs `f` once to warm up, then times it `--reps` times.
void print_times(const std::string& what, const Bench& b, const std::function<void()>& f) {
  using Clock = std::chrono::steady_clock;
  const double before = used().second;
  std::vector<double> wall, processor;
  for (int i = 0; i <= b.reps; ++i) {
    const auto from = Clock::now();
    const double cpu = used().first;
    f();
    wall.push_back(std::chrono::duration<double>(Clock::now() - from).count());
    processor.push_back(used().first - cpu);
  }
  const double first = wall.front();
  auto middle = [](std::vector<double> v) {
    if (v.size() > 1) v.erase(v.begin());
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  std::cout << nlohmann::json{{"program", "maxdiffusion.cpp"}, {"what", what},
                              {"height", b.size.height},       {"width", b.size.width},
                              {"frames", b.size.frames},       {"chunk", b.chunk},
                              {"dtype", to_string(b.dtype)},   {"first_s", first},
                              {"seconds", middle(wall)},       {"processor_s", middle(processor)},
                              {"before_mib", before},          {"peak_mib", used().second}}
                   .dump()
            << std::endl;
}

const CompileConfig kCompile{.jax_cache_dir = "off", .xla_flags = {}};

void autoencode(const std::string& what, const nlohmann::json& config, const Bench& b) {
  const auto family = std::make_shared<const VideoFamily>(config);
  const bool encode = what == "encode";
  Dims dims = encode ? family->spec().autoencoder->pixel_dims(b.size) : family->latent_dims(b.size);
  dims.insert(dims.begin(), 1);
  const HostArray input = counted({encode ? DType::u8 : DType::f32, dims});
  const Devices devices = Devices::open();
  MediaAutoencoder coder(devices, family->spec().autoencoder, family->random_weights(), 1, {}, kCompile, {},
                         {.encode = b.chunk, .decode = b.chunk});
  print_times(what, b, [&] { encode ? coder.encode(input) : coder.decode(input); });
}

/// Adds an input to the graph and sets its value.
using Inputs = std::function<Tensor(const std::string& name, const Dims& dims)>;
constexpr int64_t kDown = 8, kText = 512;  // pixels per latent cell; tokens of the text

Tensor wan(const Scope& s, const nlohmann::json& text, const Bench& b, const Inputs& input) {
  const auto config = WanTransformerConfig::from_json(text);
  constexpr int64_t kFrames = 4;  // per latent cell
  const Dims sample = {1, 1 + (b.size.frames - 1) / kFrames, b.size.height / kDown, b.size.width / kDown,
                       config.in_channels};
  return wan_transformer(s, config,
                         {.sample = input("sample", sample),
                          .timestep = input("timestep", {1}),
                          .text = input("text", {1, kText, config.text_dim})});
}

Tensor flux(const Scope& s, const nlohmann::json& text, const Bench& b, const Inputs& input) {
  const auto config = FluxTransformerConfig::from_json(text);
  check(b.size.frames == 1, Code::invalid_config, "video_bench: images have 1 frame, not {}", b.size.frames);
  const int64_t rows = b.size.height / (2 * kDown), columns = b.size.width / (2 * kDown);
  return flux_transformer(s, config,
                          {.sample = input("sample", {1, rows * columns, config.in_channels}),
                           .rows = rows,
                           .columns = columns,
                           .timestep = input("timestep", {1}),
                           .text = input("text", {1, kText, config.joint_attention_dim}),
                           .pooled = input("pooled", {1, config.pooled_projection_dim}),
                           .guidance = config.guidance_embeds ? input("guidance", {1}) : Tensor()});
}

/// Runs the denoiser once on one latent, as a sampling step without guidance does.
void denoise(const nlohmann::json& text, const Bench& b) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options(&devices.rules()));
  ParamTable params;
  ScopeOptions scope;
  scope.weights = scope.activations = b.dtype;
  HostArrays arrays;
  const Inputs input = [&](const std::string& name, const Dims& dims) {
    const Shape shape{DType::f32, dims};
    arrays[name] = counted(shape);
    return g.input(name, shape);
  };
  const Scope s = Scope(g, params, "transformer", scope).frozen();
  const bool images = text.value("_class_name", "") == "FluxTransformer2DModel";
  g.output("sample", images ? flux(s, text, b, input) : wan(s, text, b, input));
  CompileConfig minimize_memory = kCompile;
  minimize_memory.minimize_memory = true;
  const Program program = compile(devices, g, minimize_memory, "denoise");
  ArrayMap inputs, none;
  for (const Param& p : params.params()) place(devices, program, HostArrays{{p.input, initial_value(p, 0)}}, inputs);
  place(devices, program, arrays, inputs);
  print_times("denoise", b, [&] { devices.get(program.run(none, inputs).at("sample")); });
}

int run(const std::vector<std::string>& args) {
  check(args.size() >= 4 && (args[0] == "encode" || args[0] == "decode" || args[0] == "denoise"), Code::invalid_config,
        "usage: video_bench encode|decode|denoise CONFIG.json SIZE FRAMES [--chunk N] [--dtype T] [--reps N]");
  Bench b{.size = parse_size(args[2], std::stoll(args[3]))};
  for (size_t i = 4; i + 1 < args.size(); i += 2) {
    if (args[i] == "--chunk")
      b.chunk = std::stoll(args[i + 1]);
    else if (args[i] == "--dtype")
      b.dtype = parse_dtype(args[i + 1]);
    else if (args[i] == "--reps")
      b.reps = std::stoi(args[i + 1]);
    else
      fail(Code::invalid_config, "video_bench: unknown option {}", args[i]);
  }
  const auto config = parse_json(read_file(args[1]));
  if (args[0] == "denoise")
    denoise(config, b);
  else
    autoencode(args[0], config, b);
  return 0;
}

}  // namespace
}  // namespace md

int main(int argc, char** argv) {
  try {
    return md::run({argv + 1, argv + argc});
  } catch (const md::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
