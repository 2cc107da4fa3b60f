// A video autoencoder, timed: video_bench encode|decode CONFIG.json SIZE FRAMES [options]
//   --chunk N   latent frames at a time (1); 0: all of them at once
//   --reps N    timed runs after the first (2)
// The model is an AutoencoderKLWan of random weights; videos are SIZE × SIZE pixels. Prints one JSON line.
// bench/video.py runs it beside diffusers and makes the table.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
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

int run(const std::vector<std::string>& args) {
  check(args.size() >= 4 && (args[0] == "encode" || args[0] == "decode"), Code::invalid_config,
        "usage: video_bench encode|decode CONFIG.json SIZE FRAMES [--chunk N] [--reps N]");
  int64_t chunk = 1;
  int reps = 2;
  for (size_t i = 4; i + 1 < args.size(); i += 2) {
    if (args[i] == "--chunk")
      chunk = std::stoll(args[i + 1]);
    else if (args[i] == "--reps")
      reps = std::stoi(args[i + 1]);
    else
      fail(Code::invalid_config, "video_bench: unknown option {}", args[i]);
  }
  const bool encode = args[0] == "encode";
  const auto family = std::make_shared<const VideoFamily>(nlohmann::json::parse(read_file(args[1])));
  const MediaSize size{std::stoll(args[2]), std::stoll(args[2]), std::stoll(args[3])};
  Dims dims = encode ? family->pixel_dims(size) : family->latent_dims(size);
  dims.insert(dims.begin(), 1);
  const HostArray input = counted({encode ? DType::u8 : DType::f32, dims});

  const Devices devices = Devices::open();
  MediaAutoencoder coder(devices, family, family->random_weights(), 1, {}, {.jax_cache_dir = "off", .xla_flags = {}},
                         {}, {.encode = chunk, .decode = chunk});
  using Clock = std::chrono::steady_clock;
  auto used = [] {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    auto seconds = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
    };
    return std::pair{seconds(u.ru_utime) + seconds(u.ru_stime), static_cast<double>(u.ru_maxrss) / 1024};
  };
  const double before = used().second;
  std::vector<double> wall, processor;
  for (int i = 0; i <= reps; ++i) {
    const auto from = Clock::now();
    const double cpu = used().first;
    encode ? coder.encode(input) : coder.decode(input);
    wall.push_back(std::chrono::duration<double>(Clock::now() - from).count());
    processor.push_back(used().first - cpu);
  }
  const double first = wall.front();
  auto middle = [](std::vector<double> v) {
    v.erase(v.begin());
    std::sort(v.begin(), v.end());
    return v.empty() ? 0 : v[v.size() / 2];
  };
  std::cout << nlohmann::json{{"program", "maxdiffusion.cpp"},
                              {"what", args[0]},
                              {"size", size.height},
                              {"frames", size.frames},
                              {"chunk", chunk},
                              {"first_s", first},
                              {"seconds", middle(wall)},
                              {"processor_s", middle(processor)},
                              {"before_mib", before},
                              {"peak_mib", used().second}}
                   .dump()
            << std::endl;
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
