#include "maxdiffusion/tasks/replay.h"

#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/tasks/encode.h"

namespace md {
namespace {

class Recorded final : public Dataset {
 public:
  Recorded(SafetensorsReader file, std::string path, bool micro, int64_t steps, int64_t batch)
      : file_(std::move(file)), path_(std::move(path)), micro_(micro), steps_(steps), batch_(batch) {}

  Batch next() override {
    const int64_t step = at_.index / batch_;
    check(step < steps_, Code::io, "replay_batches '{}' holds {} steps; step {} is asked for", path_, steps_, step);
    auto read = [&](const char* name) { return file_.tensors().at(fmt::format("step{}.{}", step, name)); };
    Batch b = {{"latents", nchw_to_nhwc(read("latents").cast(DType::f32))},
               {"noise", nchw_to_nhwc(read("noise").cast(DType::f32))},
               {"timesteps", read("timesteps").cast(DType::s32)},
               {"prompt_embeds", read("encoder_hidden_states").cast(DType::f32)}};
    if (micro_) {
      b["text_embeds"] = read("text_embeds").cast(DType::f32);
      b["time_ids"] = read("time_ids").cast(DType::f32);
    }
    at_.index += batch_;
    return b;
  }
  Position position() const override { return at_; }
  void seek(Position p) override { at_ = p; }
  int64_t size() const override { return steps_ * batch_; }

 private:
  SafetensorsReader file_;
  std::string path_;
  bool micro_;
  int64_t steps_, batch_;
  Position at_;
};

}  // namespace

Replay open_replay(const std::string& path, bool micro) {
  SafetensorsReader file = SafetensorsReader::open(path);
  Replay r;
  while (file.tensors().contains(fmt::format("step{}.latents", r.steps))) ++r.steps;
  check(r.steps > 0, Code::io, "replay_batches '{}' has no tensor 'step0.latents'", path);
  std::vector<std::pair<const char*, int64_t>> wanted = {
      {"latents", 4}, {"noise", 4}, {"timesteps", 1}, {"encoder_hidden_states", 3}};
  if (micro) wanted.insert(wanted.end(), {{"text_embeds", 2}, {"time_ids", 2}});
  const Dims latents = file.tensors().at("step0.latents").dims();
  for (int64_t i = 0; i < r.steps; ++i)
    for (const auto& [name, rank] : wanted) {
      auto it = file.tensors().find(fmt::format("step{}.{}", i, name));
      check(it != file.tensors().end(), Code::io, "replay_batches '{}' has no tensor 'step{}.{}'", path, i, name);
      const Shape &s = it->second.shape(), &first = file.tensors().at(fmt::format("step0.{}", name)).shape();
      check(s.rank() == rank && s.dims == first.dims && s.dims[0] == latents[0] &&
                (std::string_view(name) != "noise" || s.dims == latents),
            Code::io, "replay_batches '{}': 'step{}.{}' is {}; latents of step 0 are [{}], its like of step 0 is {}",
            path, i, name, to_string(s), fmt::join(latents, ","), to_string(first));
    }
  r.batch_size = latents[0], r.latent_height = latents[2], r.latent_width = latents[3];
  r.text_length = file.tensors().at("step0.encoder_hidden_states").dims()[1];
  r.data = std::make_unique<Recorded>(std::move(file), path, micro, r.steps, r.batch_size);
  return r;
}

}  // namespace md
