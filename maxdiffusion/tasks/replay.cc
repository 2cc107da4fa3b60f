#include "maxdiffusion/tasks/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

/// A field of the batch and its tensor in the file.
struct ExpectedTensor {
  std::string field, tensor;
  int64_t rank;
  DType type = DType::f32;
  bool channels_first = false, sigmas = false;
};

class Recorded final : public Dataset {
 public:
  Recorded(SafetensorsReader file, std::string path, std::vector<ExpectedTensor> tensors,
           std::shared_ptr<const NoiseProcess> process, int64_t steps, int64_t batch)
      : file_(std::move(file)),
        path_(std::move(path)),
        tensors_(std::move(tensors)),
        process_(std::move(process)),
        steps_(steps),
        batch_(batch) {}

  Batch next() override {
    const int64_t step = at_.index / batch_;
    check(step < steps_, Code::io,
          "replay_batches '{}' holds {} steps; step {} is needed: set max_train_steps to at most their number", path_,
          steps_, step);
    Batch b;
    for (const ExpectedTensor& w : tensors_) {
      const HostArray a = file_.tensors().at(fmt::format("step{}.{}", step, w.tensor)).cast(w.type);
      b[w.field] = w.sigmas ? process_->timesteps_from_sigmas(a) : w.channels_first ? channels_last(a) : a;
    }
    at_.index += batch_;
    return b;
  }
  Position position() const override { return at_; }
  bool seek(Position p) override {
    at_ = p;
    return true;
  }
  int64_t size() const override { return steps_ * batch_; }

 private:
  SafetensorsReader file_;
  std::string path_;
  std::vector<ExpectedTensor> tensors_;
  std::shared_ptr<const NoiseProcess> process_;
  int64_t steps_, batch_;
  Position at_;
};

}  // namespace

Replay open_replay(const std::string& path, const Family& family, std::shared_ptr<const NoiseProcess> process) {
  SafetensorsReader file = SafetensorsReader::open(path);
  Replay r;
  while (file.tensors().contains(fmt::format("step{}.latents", r.steps))) ++r.steps;
  check(r.steps > 0, Code::io, "replay_batches '{}' has no tensor 'step0.latents'", path);
  const Dims latents = file.tensors().at("step0.latents").dims();
  const int64_t rank = static_cast<int64_t>(latents.size());
  std::vector<ExpectedTensor> tensors = {{"latents", "latents", rank, DType::f32, true},
                                         {"noise", "noise", rank, DType::f32, true},
                                         {"timesteps", "timesteps", 1, process->timestep_dtype()}};
  if (file.tensors().contains("step0.sigmas"))
    tensors.back() = {.field = "timesteps", .tensor = "sigmas", .rank = 1, .sigmas = true};
  r.latent = Dims(latents.begin() + 2, latents.end());
  r.latent.push_back(latents[1]);
  for (const auto& fields : {family.spec().conditioning, family.spec().size_conditioning})
    for (const Field& f : fields)
      tensors.push_back(
          {f.name, f.name == "prompt_embeds" ? "encoder_hidden_states" : f.name, f.shape.rank() + 1, f.shape.dtype});
  if (family.required_images() > 0)
    for (const Field& f : family.image_conditioning()->fields(family.spec().autoencoder->media_size(r.latent)))
      tensors.push_back({f.name, f.name, f.shape.rank() + 1, DType::f32, f.shape.rank() == rank - 1});
  if (const ReferenceImages* references = family.reference_images())
    for (;; ++r.references) {
      const std::string field = ReferenceImages::field(static_cast<size_t>(r.references));
      if (r.references >= references->min_images && !file.tensors().contains("step0." + field)) break;
      tensors.push_back({field, field, rank, DType::f32, true});
    }
  for (int64_t i = 0; i < r.steps; ++i)
    for (const ExpectedTensor& w : tensors) {
      auto it = file.tensors().find(fmt::format("step{}.{}", i, w.tensor));
      check(it != file.tensors().end(), Code::io, "replay_batches '{}' has no tensor 'step{}.{}'", path, i, w.tensor);
      const Shape &s = it->second.shape(), &first = file.tensors().at(fmt::format("step0.{}", w.tensor)).shape();
      check(s.rank() == w.rank && s.dims == first.dims && s.dims[0] == latents[0] &&
                (w.field != "noise" || s.dims == latents),
            Code::io, "replay_batches '{}': 'step{}.{}' is {}; latents of step 0 are [{}], expected {} as in step 0",
            path, i, w.tensor, to_string(s), fmt::join(latents, ","), to_string(first));
    }
  r.batch_size = latents[0];
  const auto prompts = file.tensors().find("step0.encoder_hidden_states");
  if (prompts != file.tensors().end()) r.text_length = prompts->second.dims()[1];
  r.data =
      std::make_unique<Recorded>(std::move(file), path, std::move(tensors), std::move(process), r.steps, r.batch_size);
  return r;
}

}  // namespace md
