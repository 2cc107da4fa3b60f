#include "maxdiffusion/families/record_format.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/families/family.h"

namespace md {
namespace {

using Noise = std::function<std::vector<float>(size_t n)>;

/// A sampled and scaled latent, with batch size 1.
HostArray scaled_latent(const FamilySpec& spec, const HostArray& moments, const Noise& noise) {
  return spec.autoencoder->latent_scale.apply(sample_latent(moments, noise));
}

/// Moments as mean and log-variance, unscaled. Source of these formats: MaxDiffusion's feature descriptions.
class SdRecords final : public RecordFormat {
 public:
  std::vector<std::string> columns(const FamilySpec&) const override {
    return {"moments|latents", "clip_embeddings|hidden_states"};
  }
  HostArrays from_records(const FamilySpec& spec, const HostArrays& b) const override {
    const double shift = spec.autoencoder->latent_scale.shift[0], scale = spec.autoencoder->latent_scale.scale[0];
    const HostArray stored = b.at("moments").cast(DType::f32);
    HostArray moments(stored.shape());
    const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
    auto from = stored.view<float>();
    auto v = moments.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<float>(i % (2 * c) < c ? (from[i] - shift) * scale
                                                : std::exp(0.5 * std::clamp(from[i], -30.0f, 20.0f)) * scale);
    return {{"moments", moments}, {"prompt_embeds", b.at("clip_embeddings").cast(DType::f32)}};
  }
  HostArrays to_record(const FamilySpec&, const HostArray& moments, const HostArrays&, const HostArrays& conditioning,
                       const Noise&) const override {
    const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
    auto v = moments.view<float>();
    HostArray q(moments.shape());
    auto to = q.mutable_view<float>();
    for (size_t k = 0; k < v.size(); ++k)
      to[k] = k % (2 * c) < c ? v[k] : static_cast<float>(2 * std::log(std::max<double>(v[k], 1e-30)));
    return {{"moments", q}, {"clip_embeddings", conditioning.at("prompt_embeds")}};
  }
};

/// A scaled latent, channels first, and the tokens of both text encoders.
class SdxlRecords final : public RecordFormat {
 public:
  std::vector<std::string> columns(const FamilySpec&) const override {
    return {"pixel_values", "input_ids", "prompt_embeds", "text_embeds"};
  }
  HostArrays from_records(const FamilySpec&, const HostArrays& b) const override {
    return {{"latents", channels_last(b.at("pixel_values").cast(DType::f32))},
            {"prompt_embeds", b.at("prompt_embeds").cast(DType::f32)},
            {"text_embeds", b.at("text_embeds").cast(DType::f32)}};
  }
  HostArrays to_record(const FamilySpec& spec, const HostArray& moments, const HostArrays& text,
                       const HostArrays& conditioning, const Noise& noise) const override {
    const int64_t length = spec.text_encoders[0].max_tokens;
    HostArray ids(Shape{DType::s32, {std::ssize(spec.text_encoders), length}});
    for (size_t k = 0; k < spec.text_encoders.size(); ++k)
      set_rows(ids, static_cast<int64_t>(k), text.at(spec.text_encoders[k].ids).reshaped({1, length}));
    return {{"pixel_values", without_batch(channels_first(scaled_latent(spec, moments, noise)))},
            {"input_ids", ids},
            {"prompt_embeds", conditioning.at("prompt_embeds")},
            {"text_embeds", conditioning.at("text_embeds")}};
  }
};

/// A packed, scaled latent. text_embeds are T5's, prompt_embeds CLIP's. Positions of the text are zeros, those of the
/// latent's tokens are 0, row, column.
class FluxRecords final : public RecordFormat {
 public:
  std::vector<std::string> columns(const FamilySpec&) const override {
    return {"pixel_values", "text_embeds", "prompt_embeds", "img_ids"};
  }
  HostArrays from_records(const FamilySpec& spec, const HostArrays& records) const override {
    const HostArray tokens = records.at("pixel_values").cast(DType::f32),
                    positions = records.at("img_ids").cast(DType::f32);
    const Dims &d = tokens.dims(), &p = positions.dims();
    const int64_t c = spec.autoencoder->channels, patch = spec.patch;
    check(d.size() == 3 && d[2] == c * patch * patch && p.size() == 3 && p[1] == d[1] && p[2] == 3 && d[1] > 0,
          Code::io, "pixel_values of records are {}, img_ids {}; expected [tokens, {}] and [tokens, 3]",
          to_string(tokens.shape()), to_string(positions.shape()), c * patch * patch);
    // An image's last token has the largest row and column.
    const auto last = positions.view<float>().subspan(static_cast<size_t>(d[1] * 3 - 2), 2);
    const int64_t rows = std::llround(last[0]) + 1, columns = std::llround(last[1]) + 1;
    check(rows > 0 && columns > 0 && rows * columns == d[1], Code::io,
          "img_ids of records end with row {} and column {}, which do not fit {} tokens", last[0], last[1], d[1]);
    const HostArray latents = with_axes(tokens.reshaped({d[0], rows, columns, c, patch, patch}), {0, 1, 4, 2, 5, 3});
    return {{"latents", latents.reshaped({d[0], rows * patch, columns * patch, c})},
            {"prompt_embeds", records.at("text_embeds").cast(DType::f32)},
            {"pooled_projections", records.at("prompt_embeds").cast(DType::f32)}};
  }
  HostArrays to_record(const FamilySpec& spec, const HostArray& moments, const HostArrays&,
                       const HostArrays& conditioning, const Noise& noise) const override {
    const HostArray z = scaled_latent(spec, moments, noise);
    const int64_t c = spec.autoencoder->channels, patch = spec.patch, rows = z.dims()[1] / patch,
                  columns = z.dims()[2] / patch;
    HostArray positions(Shape{DType::f32, {rows * columns, 3}});
    auto to = positions.mutable_view<float>().begin();
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column)
        for (const int64_t v : {int64_t{0}, row, column}) *to++ = static_cast<float>(v);
    const HostArray tokens = with_axes(z.reshaped({rows, patch, columns, patch, c}), {0, 2, 4, 1, 3});
    const HostArray& text = conditioning.at("prompt_embeds");
    return {{"pixel_values", tokens.reshaped({rows * columns, c * patch * patch}).cast(DType::bf16)},
            {"input_ids", zeros_like(HostArray(Shape{DType::bf16, {text.dims()[0], 3}}))},
            {"text_embeds", text},
            {"prompt_embeds", conditioning.at("pooled_projections")},
            {"img_ids", positions}};
  }
};

/// A scaled latent, channels first.
class WanRecords final : public RecordFormat {
 public:
  std::vector<std::string> columns(const FamilySpec&) const override { return {"latents", "encoder_hidden_states"}; }
  HostArrays from_records(const FamilySpec&, const HostArrays& records) const override {
    return {{"latents", channels_last(records.at("latents").cast(DType::f32))},
            {"prompt_embeds", records.at("encoder_hidden_states").cast(DType::f32)}};
  }
  HostArrays to_record(const FamilySpec& spec, const HostArray& moments, const HostArrays&,
                       const HostArrays& conditioning, const Noise& noise) const override {
    return {{"latents", without_batch(channels_first(scaled_latent(spec, moments, noise)))},
            {"encoder_hidden_states", conditioning.at("prompt_embeds")}};
  }
};

}  // namespace

std::vector<std::string> RecordFormat::columns(const FamilySpec& spec) const {
  std::vector<std::string> names = {"moments"};
  for (const Field& f : spec.conditioning) names.push_back(f.name);
  return names;
}

HostArrays RecordFormat::from_records(const FamilySpec& spec, const HostArrays& records) const {
  HostArrays out;
  for (const auto& [name, a] : records) {
    const auto field = std::ranges::find(spec.conditioning, name, &Field::name);
    out[name] = a.cast(field == spec.conditioning.end() ? DType::f32 : field->shape.dtype);
  }
  out.at("moments") = spec.autoencoder->latent_scale.apply_to_moments(out.at("moments"));
  return out;
}

HostArrays RecordFormat::to_record(const FamilySpec&, const HostArray& moments, const HostArrays&,
                                   const HostArrays& conditioning, const Noise&) const {
  HostArrays out = conditioning;
  out["moments"] = moments;
  return out;
}

std::vector<std::string> record_columns(const FamilySpec& spec, int64_t references) {
  std::vector<std::string> names = spec.records->columns(spec);
  for (int64_t i = 0; i < references; ++i) names.push_back(ReferenceImages::field(static_cast<size_t>(i)));
  return names;
}

std::shared_ptr<const RecordFormat> moment_records() { return std::make_shared<RecordFormat>(); }
std::shared_ptr<const RecordFormat> sd_records() { return std::make_shared<SdRecords>(); }
std::shared_ptr<const RecordFormat> sdxl_records() { return std::make_shared<SdxlRecords>(); }
std::shared_ptr<const RecordFormat> flux_records() { return std::make_shared<FluxRecords>(); }
std::shared_ptr<const RecordFormat> wan_records() { return std::make_shared<WanRecords>(); }

}  // namespace md
