#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/image.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/records/tfrecord_writer.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/train/encoded.h"
#include "maxdiffusion/train/train.h"
#include "maxdiffusion/train/training_data.h"

namespace md {
namespace {

/// The TFRecord features of one picture: `q` [h, w, 2C] (mean, standard deviation), row i of its caption's.
Batch reference_record(const ModelFolder& folder, HostArray q, const TextEmbeddings& text,
                       const std::vector<HostArray>& ids, int64_t i, const HostRng& rng, int64_t number) {
  const HostArray prompt = without_batch(rows(text.prompt_embeds, i, 1));
  const size_t c = static_cast<size_t>(q.dims().back()) / 2;
  auto v = q.mutable_view<float>();
  if (!text.text_embeds) {
    for (size_t k = 0; k < v.size(); ++k)
      if (k % (2 * c) >= c) v[k] = static_cast<float>(2 * std::log(std::max<double>(v[k], 1e-30)));
    return {{"moments", q}, {"clip_embeddings", prompt}};
  }
  HostArray z = means(q);
  auto to = z.mutable_view<float>();
  std::vector<float> noise(to.size());
  rng.fill(HostRng::Distribution::normal, 1, static_cast<uint64_t>(number) * to.size(), noise);
  for (size_t k = 0; k < to.size(); ++k) {
    const double deviation = v[k / c * 2 * c + c + k % c];
    const double drawn = to[k] + deviation * noise[k];
    to[k] = static_cast<float>((drawn - folder.vae.shift_factor) * folder.vae.scaling_factor);
  }
  HostArray both(Shape{DType::s32, {static_cast<int64_t>(ids.size()), ids[0].dims()[1]}});
  for (size_t k = 0; k < ids.size(); ++k) set_rows(both, static_cast<int64_t>(k), rows(ids[k], i, 1));
  Dims batched = z.dims();
  batched.insert(batched.begin(), 1);
  return {{"pixel_values", without_batch(nhwc_to_nchw(z.reshaped(batched)))},
          {"input_ids", both},
          {"prompt_embeds", prompt},
          {"text_embeds", without_batch(rows(text.text_embeds, i, 1))}};
}

}  // namespace

int64_t prepare_tfrecords(const RunConfig& c) {
  check(!c.data.tfrecords_dir.empty(), Code::invalid_config, "prepare_tfrecords: tfrecords_dir is empty");
  check(c.data.no_records_per_shard > 0, Code::invalid_config, "no_records_per_shard is {}; expected at least 1",
        c.data.no_records_per_shard);
  check(!c.model.train_new_vae, Code::invalid_config,
        "prepare_tfrecords with train_new_vae: the autoencoder must be there before");
  check_plain_pictures(c, "prepare_tfrecords");
  if (!c.data.extracted_files_dir.empty())
    log_warning("extracted_files_dir has no effect: .tar files are read where they lie");
  DataKeys keys = c.data;
  if (!keys.data_files_pattern.empty())
    keys.hf_train_files = std::exchange(keys.data_files_pattern, ""), keys.dataset_type.clear();
  const auto source = open_source(source_config(keys));
  TfrecordShards shards(keys.tfrecords_dir, keys.no_records_per_shard);
  if (!c.loss.cache_latents_text_encoder_outputs) {
    check(!keys.random_flip, Code::invalid_config,
          "prepare_tfrecords with cache_latents_text_encoder_outputs=false writes pictures as they are stored; "
          "random_flip belongs to the training then");
    RecordStream stream(source, {.shuffle = false});
    for (auto n = stream.next(); n.epoch == 0; n = stream.next()) {
      const Record r = n.read();
      if (!r.fault.empty()) {
        log_warning("skipped {}", r.fault);
        continue;
      }
      shards.add({{keys.image_column, r.pixels ? encode_png(r.pixels) : std::string(r.picture.bytes)},
                  {keys.caption_column, r.caption}});
    }
    shards.close();
    return shards.count();
  }
  const Devices devices = open_devices(c);
  ModelFolder folder =
      ModelFolder::open(c.model.pretrained_model_name_or_path, c.model.clip_bpe_file, c.model.revision);
  Companions companions(c, devices, folder);
  const HostRng rng(static_cast<uint64_t>(c.run.seed), "prepared posterior");
  const int64_t length = folder.text_encoder.max_position_embeddings;
  const ImageConfig images{
      .resolution = keys.resolution, .center_crop = keys.center_crop, .random_crop = keys.random_crop};
  each_group(source, images, companions.batch(), [&](LoadedImages&& part) {
    const int64_t n = part.pixels.dims()[0], copies = keys.random_flip ? 2 : 1;
    const HostArray moments = companions.coder().encode(with_mirrored(part.pixels, 0, n * copies));
    const TextEmbeddings text = companions.text().encode(part.captions);
    std::vector<HostArray> ids = {token_ids(*folder.tokenizer, part.captions, length)};
    if (folder.tokenizer_2) ids.push_back(token_ids(*folder.tokenizer_2, part.captions, length));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t copy = 0; copy < copies; ++copy) {
        HostArray q = without_batch(rows(moments, copy * n + i, 1));
        shards.add(reference_record(folder, std::move(q), text, ids, i, rng, shards.count()));
      }
    }
  });
  shards.close();
  return shards.count();
}

}  // namespace md
