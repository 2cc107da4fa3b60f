// Captions to conditioning on the devices: a family's text encoders, compiled with their weights.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/encoders/encoder_keys.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

/// Weights are read and placed on the devices once, when first needed; each number of captions at a time, each
/// clip_skip and, with FamilySpec::text_lengths, each of its numbers of tokens is a program, compiled on first use.
/// Refers to `devices`. Not thread safe.
class TextEncoder {
 public:
  /// For `batch` captions at a time. `scope`, `keys`: see text_encoder_options.
  TextEncoder(const Devices& devices, std::shared_ptr<const Family> family, int64_t batch, WeightsOf weights,
              const ScopeOptions& scope, const CompileConfig& compile, const EncoderKeys& keys = {});
  /// FamilySpec::conditioning of every caption, axis 0 = captions. `seconds`: texts of FamilySpec::second_text_fields,
  /// as many as captions; empty: the captions. `clip_skip`: see Family::encode_text. `batch`: captions at a time, a
  /// multiple of the devices; 0: the constructor's.
  HostArrays encode(const std::vector<std::string>& captions, const std::vector<std::string>& seconds = {},
                    int64_t clip_skip = 0, int64_t batch = 0);
  /// Published name → array, by component: for checkpoints.
  const std::map<std::string, HostArrays>& weights();

 private:
  /// For texts of `length` tokens; 0: those of the fields.
  const Program& program(int64_t clip_skip, int64_t batch, int64_t length = 0);
  const Devices& devices_;
  std::shared_ptr<const Family> family_;
  int64_t batch_;
  WeightsOf read_;
  ScopeOptions scope_;
  CompileConfig compile_;
  std::map<std::array<int64_t, 3>, Program> programs_;  // by clip_skip, captions and tokens
  ArrayMap arrays_;
  std::map<std::string, HostArrays> weights_;
};

}  // namespace md
