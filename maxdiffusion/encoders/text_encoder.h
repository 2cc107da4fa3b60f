// Captions to conditioning on the devices: a family's text encoders, compiled with their weights.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/encoders/encoder_keys.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

/// Refers to `devices`. Not thread safe.
class TextEncoder {
 public:
  /// Compiled for `batch` captions at a time. `clip_skip`: see Family::encode_text. `scope`, `keys`: see
  /// text_encoder_options.
  TextEncoder(const Devices& devices, std::shared_ptr<const Family> family, int64_t batch, const WeightsOf& weights,
              const ScopeOptions& scope, const CompileConfig& compile, int64_t clip_skip = 0,
              const EncoderKeys& keys = {});
  /// FamilySpec::conditioning of every caption, axis 0 = captions. `all_layers`: clip_skip is not applied.
  /// `seconds`: texts of FamilySpec::second_text_fields, as many as captions; empty: the captions.
  HostArrays encode(const std::vector<std::string>& captions, bool all_layers = false,
                    const std::vector<std::string>& seconds = {});
  /// Published name → array, by component: for checkpoints.
  const std::map<std::string, HostArrays>& weights() const { return weights_; }

 private:
  void build(Graph& g, ParamTable& params, int64_t clip_skip) const;
  const Program& program(int64_t clip_skip);
  const Devices& devices_;
  std::shared_ptr<const Family> family_;
  int64_t batch_, clip_skip_;
  ScopeOptions scope_;
  CompileConfig compile_;
  std::map<int64_t, Program> programs_;  // by clip_skip
  ArrayMap arrays_;
  std::map<std::string, HostArrays> weights_;
};

}  // namespace md
