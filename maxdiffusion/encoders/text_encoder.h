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

/// Weights that the programs read are placed on the devices once, when first needed. A program is compiled on first use
/// for each number of captions at a time, each clip_skip, each size of reference images and, with
/// FamilySpec::text_lengths, each number of tokens. Reference images that the text encoder sees are encoded by a
/// program of their own; images that are given for all captions once, until others are given. Refers to `devices`. Not
/// thread safe.
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
  /// Published name → array, by component: all weights, also those that no program reads; for checkpoints.
  std::map<std::string, HostArrays> weights() const;

  int64_t images_encoded() const { return images_encoded_; }  // so far
  int64_t bytes_on_devices() const;                           // of the weights

 private:
  using Trace = std::function<void(Graph&, const Models&)>;
  struct Compiled {
    Program program;
    ParamTable params;  // those that it reads
  };
  Compiled compiled(const std::string& name, const Trace& trace) const;
  /// The program with this key, compiled if it does not exist; its weights are on the devices.
  const Program& program(const std::vector<int64_t>& key, const std::string& name, const Trace& trace);
  HostArrays run(const HostArrays& text, int64_t clip_skip, int64_t batch);
  /// Field seen_field(i), one row for each list of images.
  HostArray features(const std::vector<std::vector<HostArray>>& images, size_t i, int64_t batch);
  /// The same for one list, kept for the next call.
  const HostArrays& features(const std::vector<HostArray>& images);
  const Devices& devices_;
  std::shared_ptr<const Family> family_;
  int64_t batch_;
  WeightsOf read_;
  ScopeOptions scope_;
  CompileConfig compile_;
  /// Key: clip_skip, captions and sizes of the fields; of image encoders −1, images and sizes of their pixels.
  std::map<std::vector<int64_t>, Compiled> programs_;
  ArrayMap arrays_;
  std::vector<HostArray> seen_images_;  // those of seen_features_, u8 [H, W, 3]
  HostArrays seen_features_;
  int64_t images_encoded_ = 0;
};

}  // namespace md
