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

/// Weights are read and placed on the devices once, when first needed. A program is compiled on first use for each
/// number of captions at a time, each clip_skip, each size of reference images and, with FamilySpec::text_lengths, each
/// number of tokens. Refers to `devices`. Not thread safe.
class TextEncoder {
 public:
  /// `batch`: captions encoded at a time. `scope`, `keys`: see text_encoder_options.
  TextEncoder(const Devices& devices, std::shared_ptr<const Family> family, int64_t batch, WeightsOf weights,
              const ScopeOptions& scope, const CompileConfig& compile, const EncoderKeys& keys = {});
  /// FamilySpec::conditioning of every caption, axis 0 = captions. `seconds`: one text per caption for
  /// FamilySpec::second_text_fields; empty: the captions. `clip_skip`: see Family::encode_text. `batch`: captions at a
  /// time, a multiple of the number of devices; 0: the constructor's. `images`: the reference images of each caption,
  /// u8 [H, W, 3], or one list for all captions; every list has images of the same sizes.
  HostArrays encode(const std::vector<std::string>& captions, const std::vector<std::string>& seconds = {},
                    int64_t clip_skip = 0, int64_t batch = 0, const std::vector<std::vector<HostArray>>& images = {});
  /// Like encode, from token ids: FamilySpec::text_fields() by name, axis 0 = texts. For families without text_lengths.
  HostArrays encode_tokens(const HostArrays& ids, int64_t clip_skip = 0, int64_t batch = 0);
  /// Drops the weights; the next use reads them again for the same programs. Call it after the LoRA added to them has
  /// changed.
  void forget_weights();
  /// Published name → array, by component; used for checkpoints.
  const std::map<std::string, HostArrays>& weights();

 private:
  HostArrays run(const HostArrays& text, int64_t clip_skip, int64_t batch);
  struct Compiled {
    Program program;
    ParamTable params;
  };
  /// The program for texts with these fields; also places its weights on the devices.
  const Program& program(const std::vector<Field>& text, int64_t clip_skip, int64_t batch);
  const Devices& devices_;
  std::shared_ptr<const Family> family_;
  int64_t batch_;
  WeightsOf read_;
  ScopeOptions scope_;
  CompileConfig compile_;
  std::map<std::vector<int64_t>, Compiled> programs_;  // key: clip_skip, captions and sizes of the fields
  ArrayMap arrays_;
  std::map<std::string, HostArrays> weights_;
};

}  // namespace md
