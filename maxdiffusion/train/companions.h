// The models around the one that is trained: they encode its data, draw its samples, and make its checkpoints whole
// model folders.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "maxdiffusion/tasks/encode.h"
#include "maxdiffusion/tasks/run_config.h"
#include "maxdiffusion/train/loop.h"

namespace md {

/// Those values whose parameter is of this component.
HostArrays of_component(const ParamTable& params, const std::string& component, const HostArrays& all);

/// Each is loaded when it is first needed. Refers to what it is made from. Not thread safe.
class Companions {
 public:
  Companions(const RunConfig& c, const Devices& devices, const ModelFolder& folder)
      : config_(c), devices_(devices), folder_(folder), seed_(static_cast<uint64_t>(c.run.seed)) {}

  /// Weights before this run's training of them; those of an autoencoder that this run has trained, though.
  WeightsOf weights();
  /// The same in two, as ModelFolder::open_values.
  std::function<HostArrays()> open(const ParamTable& params, const std::string& component);
  void set_vae(HostArrays values) { vae_ = std::move(values); }
  const HostArrays& vae();
  /// Of the programs that encode.
  int64_t batch() const { return 32 * devices_.mesh().devices(); }
  TextEncoder& text();
  PictureCoder& coder();
  /// Everything that the content of a checkpoint lacks to be a whole model folder. Weights that came from files are
  /// linked, not written.
  void complete(CheckpointContent& content);

 private:
  bool fresh(const std::string& component) const;  // of random weights
  const RunConfig& config_;
  const Devices& devices_;
  const ModelFolder& folder_;
  uint64_t seed_;
  HostArrays vae_;
  std::unique_ptr<TextEncoder> text_;
  std::unique_ptr<PictureCoder> coder_;
};

}  // namespace md
