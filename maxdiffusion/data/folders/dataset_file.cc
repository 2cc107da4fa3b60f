#include "maxdiffusion/data/folders/dataset_file.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/folders/dataset_text.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using ValueKind = DatasetValue::Kind;
constexpr double kAny = std::numeric_limits<double>::infinity();

/// The path relative to the working folder, as the file's trainer reads it, or else relative to the file's folder.
std::string resolved(const std::string& path, const std::string& file) {
  std::error_code ec;
  if (path.empty() || is_remote(path) || fs::path(path).is_absolute() || fs::exists(path, ec)) return path;
  const std::string next_to_file = (fs::path(file).parent_path() / path).string();
  return fs::exists(next_to_file, ec) ? next_to_file : path;
}

/// The list of tables called `key`.
const std::vector<DatasetValue>& tables_of(const DatasetValue& table, const std::string& key, const std::string& file) {
  const DatasetValue* list = table.find(key);
  check(list && list->kind == ValueKind::list && !list->items.empty(), Code::invalid_config,
        "{}:{}: {} {}; expected a list", file, list ? list->line : table.line, key,
        list ? "is " + list->shown() : "is missing");
  for (const DatasetValue& item : list->items)
    check(item.kind == ValueKind::table, Code::invalid_config, "{}:{}: {} holds {}; expected tables", file, item.line,
          key, item.shown());
  return list->items;
}

std::string with_dot(const std::string& ending) {
  return ending.empty() || ending.starts_with('.') ? ending : "." + ending;
}

/// Allows buckets of every shape from 1:4 to 4:1.
void allow_all_shapes(FolderImages& images) {
  const int64_t step = images.bucket_reso_steps;
  const auto side =
      static_cast<int64_t>(std::sqrt(static_cast<double>(images.size.width) * static_cast<double>(images.size.height)));
  images.min_bucket_reso = std::max(step, side / 2 / step * step);
  images.max_bucket_reso = std::max(step, (2 * side + step - 1) / step * step);
}

/// Reads the size keys that kohya's and musubi's files share.
void read_sizes(DatasetReader& r, FolderImages& images) {
  if (const auto size = r.size("resolution")) images.size = {size->second, size->first};
  images.enable_bucket = r.flag("enable_bucket", images.enable_bucket);
  images.bucket_no_upscale = r.flag("bucket_no_upscale", images.bucket_no_upscale);
  images.bucket_reso_steps = r.whole("bucket_reso_steps", images.bucket_reso_steps, 1);
  images.min_bucket_reso = r.whole("min_bucket_reso", images.min_bucket_reso, 1);
  images.max_bucket_reso = r.whole("max_bucket_reso", images.max_bucket_reso, 1);
}
void read_batch_size(DatasetReader& r, DatasetFile& out) {
  if (const int64_t n = r.whole("batch_size", 0, 1); n > 0) out.batch_sizes.push_back(n);
}

// ---- kohya's sd-scripts

const char* const kCached = "cache_latents_text_encoder_outputs sets what is cached";
const char* const kUnsupported = "not supported";

void read_kohya_captions(DatasetReader& r, CaptionRules& c) {
  c.shuffle = r.flag("shuffle_caption", false);
  c.keep_tokens = r.whole("keep_tokens", 0, 0);
  c.separator = r.text("caption_separator", ",");
  c.keep_separator = r.text("keep_tokens_separator");
  c.secondary_separator = r.text("secondary_separator");
  c.prefix = r.text("caption_prefix");
  c.suffix = r.text("caption_suffix");
  c.wildcards = r.flag("enable_wildcard", false);
  c.lines = c.wildcards ? CaptionRules::Lines::any : CaptionRules::Lines::first;
  c.dropout = r.number("caption_dropout_rate", 0, 0, 1);
  c.tag_dropout = r.number("caption_tag_dropout_rate", 0, 0, 1);
}

void read_kohya(const DatasetValue& all, const std::string& file, DatasetFile& out, const FolderImages& usual) {
  static const DatasetValue kNone{.kind = ValueKind::table};
  const DatasetValue* general = all.find("general");
  if (!general) general = &kNone;
  const std::set<std::string> of_datasets = {"batch_size",      "bucket_no_upscale",     "bucket_reso_steps",
                                             "enable_bucket",   "max_bucket_reso",       "min_bucket_reso",
                                             "resolution",      "skip_image_resolution", "network_multiplier",
                                             "validation_seed", "validation_split"};
  const std::set<std::string> of_subsets = {"image_dir", "class_tokens", "is_reg", "metadata_file",
                                            "conditioning_data_dir"};
  // Checks every level before it is read, so that a misplaced key is reported with its line.
  const auto check_level = [&](const DatasetValue& level, bool datasets, bool subsets) {
    for (const auto& [key, value] : level.members) {
      check(datasets || !of_datasets.contains(key), Code::invalid_config,
            "{}:{}: {} is a key of [general] and [[datasets]]; found it in [[datasets.subsets]]", file, value.line,
            key);
      check(subsets || !of_subsets.contains(key), Code::invalid_config,
            "{}:{}: {} is a key of [[datasets.subsets]]; found it in a table around them", file, value.line, key);
    }
  };
  check_level(*general, true, false);
  int64_t group = 0;
  for (const DatasetValue& dataset : tables_of(all, "datasets", file)) {
    check_level(dataset, true, false);
    std::set<std::string> seen;
    for (const DatasetValue& subset : tables_of(dataset, "subsets", file)) {
      check_level(subset, false, true);
      DatasetReader r(file, {&subset, &dataset, general});
      DataFolder f{.where = r.where("image_dir"), .group = group, .images = usual};
      r.value("subsets");
      read_sizes(r, f.images);
      if (const auto skip = r.size("skip_image_resolution")) f.images.least_area = skip->first * skip->second + 1;
      f.folder = resolved(r.text("image_dir"), file);
      f.metadata = resolved(r.text("metadata_file"), file);
      check(!f.folder.empty(), Code::invalid_config, "{}: image_dir is missing; expected the folder of the images",
            r.where());
      f.repeats = r.whole("num_repeats", 1, 1);
      f.regularization = r.flag("is_reg", false);
      f.masks = resolved(r.text("conditioning_data_dir"), file);
      f.images.random_flip = r.flag("flip_aug", f.images.random_flip);
      f.images.random_crop = r.flag("random_crop", f.images.random_crop);
      f.images.alpha_mask = r.flag("alpha_mask", f.images.alpha_mask);
      f.caption_extensions = {".caption", ".txt"};
      if (const std::string e = r.text("caption_extension"); !e.empty()) f.caption_extensions = {with_dot(e)};
      if (r.value("class_tokens")) f.missing_caption = r.text("class_tokens");
      if (!f.metadata.empty()) f.missing_caption = "";
      read_kohya_captions(r, f.captions);
      r.refuse("color_aug", "colours are not changed");
      r.refuse("face_crop_aug_range", "crops do not follow faces");
      r.refuse("caption_dropout_every_n_epochs", "captions are dropped by probability (caption_dropout_rate)");
      r.refuse("token_warmup_step", kUnsupported);
      r.refuse("custom_attributes", kUnsupported);
      r.refuse("validation_split", "held-out images come from eval_data_dir");
      r.refuse("network_multiplier", kUnsupported, "1");
      r.ignore({"token_warmup_min", "validation_seed"}, "it belongs to a key that is not given");
      r.ignore({"cache_info"}, "sizes are read each time");
      r.ignore({"resize_interpolation"}, "images are resized bilinearly, with antialiasing");
      if (&subset == &dataset.find("subsets")->items[0]) read_batch_size(r, out);
      r.value("batch_size");
      r.finish();
      const std::string name = f.metadata.empty() ? f.folder : f.metadata;
      if (!seen.insert(name).second) {
        log_warning("{}: '{}' is in this dataset already, and is left out", f.where, name);
        continue;
      }
      out.folders.push_back(std::move(f));
    }
    ++group;
  }
  for (const auto& [key, value] : all.members)
    check(key == "general" || key == "datasets", Code::invalid_config,
          "{}:{}: unknown key '{}'; expected [general] and [[datasets]]", file, value.line, key);
}

// ---- kohya's folder names

void read_kohya_folders(const std::string& root, bool regularization, DatasetFile& out, const FolderImages& usual) {
  std::vector<fs::path> folders;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(root, ec))
    if (entry.is_directory() && !entry.path().filename().string().starts_with('.')) folders.push_back(entry.path());
  check(!ec, Code::io, "dataset_config: '{}': {}", root, ec.message());
  std::ranges::sort(folders);
  const size_t before = out.folders.size();
  for (const fs::path& path : folders) {
    const std::string name = path.filename().string();
    const size_t digits = name.find_first_not_of("0123456789");
    if (digits == 0 || digits == name.npos || name[digits] != '_' || digits > 9) {
      log_warning("'{}' is left out: its name does not begin with repeats, as in 10_name", path.string());
      continue;
    }
    DataFolder f{.where = path.string(), .folder = path.string(), .images = usual};
    f.repeats = std::stoll(name.substr(0, digits));
    check(f.repeats > 0, Code::invalid_config, "'{}': 0 repeats; expected 1 or more", path.string());
    f.caption_extensions = {".caption", ".txt"};
    f.missing_caption = name.substr(digits + 1);
    f.captions.lines = CaptionRules::Lines::first;
    f.regularization = regularization;
    out.folders.push_back(std::move(f));
  }
  if (out.folders.size() == before)
    throw Error(Code::invalid_config,
                fmt::format("dataset_config: '{}' holds no folder whose name begins with repeats, as in 10_name", root))
        .note("try: train_data_dir for a folder of images");
}

// ---- musubi-tuner

constexpr int64_t kFramesOfLatent = 4;  // of Wan's autoencoder, after the first frame

/// The folder of clips once for each sample that musubi-tuner takes of a clip. Source: its docs/dataset_config.md.
std::vector<DataFolder> extracted(DatasetReader& r, DataFolder clips) {
  const std::string how = r.word("frame_extraction", "head", {"head", "uniform", "full"});
  const std::vector<int64_t> frames = r.wholes("target_frames");
  std::set<int64_t> lengths;
  for (const int64_t n : frames) {
    const int64_t as_cut = (n - 1) / kFramesOfLatent * kFramesOfLatent + 1;
    if (as_cut != n)
      log_warning("{}: target_frames {} is cut to {}, 1 plus a multiple of {}, as musubi-tuner does",
                  r.where("target_frames"), n, as_cut, kFramesOfLatent);
    lengths.insert(as_cut);
  }
  const int64_t samples = r.whole("frame_sample", 1, 1), most = r.whole("max_frames", 129, 1);
  if (how != "full") r.ignore({"max_frames"}, "frame_extraction is not full");
  if (how != "uniform") r.ignore({"frame_sample"}, "frame_extraction is not uniform");
  r.ignore({"frame_stride"}, "frame_extraction is not slide");
  if (how == "full") {
    r.ignore({"target_frames"}, "frame_extraction is full");
    for (int64_t n = 1; n <= most; n += kFramesOfLatent) clips.images.frames.push_back(n);
    return {std::move(clips)};
  }
  if (how == "head" && lengths.empty()) return {std::move(clips)};
  check(!lengths.empty(), Code::invalid_config, "{}: target_frames is missing; expected it with frame_extraction={}",
        r.where("frame_extraction"), how);
  std::vector<DataFolder> out;
  for (const int64_t n : lengths)
    for (int64_t i = 0; i < (how == "uniform" ? samples : 1); ++i) {
      out.push_back(clips);
      out.back().images.frames = {n};
      out.back().images.start = i == 0 ? 0 : static_cast<double>(i) / static_cast<double>(samples - 1);
    }
  return out;
}

void read_musubi(const DatasetValue& all, const std::string& file, DatasetFile& out, const FolderImages& usual) {
  static const DatasetValue kNone{.kind = ValueKind::table};
  const DatasetValue* general = all.find("general");
  if (!general) general = &kNone;
  for (const DatasetValue& dataset : tables_of(all, "datasets", file)) {
    DatasetReader r(file, {&dataset, general});
    DataFolder f{.where = r.where(), .group = std::ssize(out.folders), .images = usual};
    read_sizes(r, f.images);
    if (!r.value("min_bucket_reso") && !r.value("max_bucket_reso")) allow_all_shapes(f.images);
    std::string place;
    for (const char* key : {"image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"}) {
      const std::string path = r.text(key);
      if (path.empty()) continue;
      check(place.empty(), Code::invalid_config, "{}: {} and {} are both given; expected one", r.where(key), place,
            key);
      place = key;
      f.where = r.where(key);
      f.clips = place.starts_with("video");
      (place.ends_with("file") ? f.metadata : f.folder) = resolved(path, file);
    }
    check(!place.empty(), Code::invalid_config,
          "{}: image_directory is missing; expected it, image_jsonl_file, video_directory or video_jsonl_file",
          r.where());
    check(f.metadata.empty() || f.metadata.ends_with(".jsonl"), Code::invalid_config,
          "{}: {} is '{}'; expected a .jsonl file", f.where, place, f.metadata);
    if (!f.metadata.empty() && !f.clips) f.references_of_lines = control_images_of_lines(f.metadata);
    f.repeats = r.whole("num_repeats", 1, 1);
    if (const std::string e = r.text("caption_extension"); !e.empty()) f.caption_extensions = {with_dot(e)};
    f.missing_caption = "";
    check(f.clips || !dataset.find("target_frames"), Code::invalid_config,
          "{}: target_frames is given; expected videos", r.where("target_frames"));
    r.refuse("source_fps", "the rate comes from the files and the key fps");
    r.ignore({"cache_directory"}, kCached);
    if (const std::string folder = resolved(r.text("control_directory"), file); !folder.empty()) {
      check(f.metadata.empty(), Code::invalid_config, "{}: control_directory with {}; expected image_directory",
            r.where("control_directory"), place);
      f.references = {folder};
    }
    for (const char* key : {"control_resolution", "no_resize_control"})
      r.refuse(key, "reference images have the size of their image");
    r.refuse("multiple_target", kUnsupported);
    for (const char* key :
         {"fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post",
          "flux_kontext_no_resize_control", "qwen_image_edit_no_resize_control", "qwen_image_edit_control_resolution"})
      r.refuse(key, "it belongs to models that are not supported, or to reference images");
    read_batch_size(r, out);
    std::vector<DataFolder> folders = {f};
    if (f.clips)
      folders = extracted(r, std::move(f));
    else  // of [general], for the videos
      for (const char* key : {"target_frames", "frame_extraction", "frame_sample", "frame_stride", "max_frames"})
        r.value(key);
    r.finish();
    for (DataFolder& folder : folders) out.folders.push_back(std::move(folder));
  }
  for (const auto& [key, value] : all.members)
    check(key == "general" || key == "datasets", Code::invalid_config,
          "{}:{}: unknown key '{}'; expected [general] and [[datasets]]", file, value.line, key);
}

// ---- SimpleTuner

void read_simple_tuner_size(DatasetReader& r, FolderImages& images) {
  const std::string type = r.word("resolution_type", "pixel_area", {"pixel", "area", "pixel_area"});
  const double amount = r.number("resolution", type == "area" ? 1 : 1024, 0, kAny);
  const bool crop = r.flag("crop", true);
  const std::string shape = r.word("crop_aspect", "square", {"square", "preserve", "closest"});
  const std::string place = r.word("crop_style", "center", {"center", "random"});
  const bool square = crop && shape == "square";
  check(type != "pixel" || square, Code::invalid_config,
        "{}: resolution_type is pixel, with other shapes than squares; expected pixel_area: buckets have the area of "
        "resolution",
        r.where("resolution_type"));
  const auto side = std::llround(type == "area" ? std::sqrt(amount * 1e6) : amount);
  check(side > 0, Code::invalid_config, "{}: resolution is {}; expected more than 0", r.where("resolution"), amount);
  images.size = {side, side};
  images.enable_bucket = !square;
  allow_all_shapes(images);
  images.random_crop = crop && place == "random";
  const double least = r.number("minimum_image_size", 0, 0, kAny);
  if (type == "pixel")
    images.least_side = std::llround(least);
  else
    images.least_area = std::llround(type == "area" ? least * 1e6 : least * least);
  images.least_aspect = r.number("minimum_aspect_ratio", 0, 0, kAny);
  images.greatest_aspect = r.number("maximum_aspect_ratio", 0, 0, kAny);
  r.ignore({"maximum_image_size", "target_downsample_size"}, "images are always resized before they are cut");
  r.refuse("crop_aspect_buckets", "buckets follow from resolution and bucket_reso_steps");
  r.refuse("max_upscale_threshold", "see minimum_image_size");
}

void read_simple_tuner_captions(DatasetReader& r, const std::string& file, DataFolder& f) {
  CaptionRules& c = f.captions;
  const std::string strategy = r.word("caption_strategy", "filename", {"filename", "textfile", "instanceprompt"});
  const std::string prompt = r.text("instance_prompt");
  f.names_are_captions = strategy == "filename";
  if (strategy == "textfile") f.missing_caption = "";
  c.lines = r.flag("disable_multiline_split", false) ? CaptionRules::Lines::all : CaptionRules::Lines::any;
  const bool only = r.flag("only_instance_prompt", false) || strategy == "instanceprompt";
  if (only) {
    check(!prompt.empty(), Code::invalid_config, "{}: instance_prompt is missing; expected the caption of all images",
          r.where("caption_strategy"));
    f.only_caption = prompt;
  }
  if (r.flag("prepend_instance_prompt", false) && !only) c.prefix = prompt;
  if (const DatasetValue* shuffle = r.value("caption_shuffle")) {
    DatasetReader s(file, {shuffle});
    c.shuffle = s.flag("enable", false);
    const std::string at = s.word("split_on", "comma", {"comma", "space", "period"});
    c.separator = at == "comma" ? "," : at == "space" ? " " : ".";
    check(at == "comma" || !c.shuffle, Code::invalid_config, "{}: split_on is {}; expected comma", s.where("split_on"),
          at);
    c.keep_tokens = s.whole("position_start", 0, 0);
    s.ignore({"count", "seed", "include_original"}, "tags are shuffled each time, from the run's seed");
    s.finish();
  }
}

void read_simple_tuner(const DatasetValue& all, const std::string& file, DatasetFile& out, const FolderImages& usual) {
  for (const DatasetValue& backend : all.items) {
    DatasetReader r(file, {&backend});
    if (r.flag("disabled", false) | r.flag("disable", false)) continue;
    const std::string type = r.word("dataset_type", "image", {"image", "video", "text_embeds", "image_embeds"});
    if (type == "text_embeds" || type == "image_embeds") {
      log_info("{}: a cache of {} is not used: {}", r.where("dataset_type"), type, kCached);
      continue;
    }
    DataFolder f{.where = r.where("id"),
                 .recursive = true,
                 .clips = type == "video",
                 .group = std::ssize(out.folders),
                 .images = usual};
    r.value("id");
    r.word("type", "local", {"local"});
    f.folder = resolved(r.text("instance_data_dir"), file);
    check(!f.folder.empty(), Code::invalid_config,
          "{}: instance_data_dir is missing; expected the folder of the images", r.where());
    read_simple_tuner_size(r, f.images);
    read_simple_tuner_captions(r, file, f);
    f.repeats = r.whole("repeats", 0, 0) + 1;
    f.most = r.whole("max_num_samples", -1, 1);
    if (const DatasetValue* video = r.value("video")) {
      DatasetReader v(file, {video});
      if (const int64_t n = v.whole("num_frames", 0, 1); n > 0) f.images.frames = {n};
      v.ignore({"min_frames"}, "clips with fewer frames than are trained are left out");
      v.word("bucket_strategy", "aspect_ratio", {"aspect_ratio"});
      for (const char* key : {"max_frames", "frame_interval"}) v.refuse(key, "use num_frames");
      v.ignore({"is_i2v"}, "it follows from the model");
      v.finish();
    }
    r.refuse("probability", "folders are weighed by repeats", "1");
    for (const char* key : {"is_regularisation_data", "is_regularization_data"})
      r.refuse(key, "predictions of the base model are no targets");
    for (const char* key :
         {"conditioning", "conditioning_data", "conditioning_type", "source_dataset_id", "slider_strength",
          "timestep_sampling_offset", "start_step", "end_epoch", "end_step", "audio", "delete_unwanted_images",
          "delete_problematic_images", "delete_nsfw_images", "parquet", "huggingface", "csv", "is_i2v"})
      r.refuse(key, kUnsupported);
    r.refuse("start_epoch", kUnsupported, "1");
    r.word("metadata_backend", "discovery", {"discovery"});
    r.ignore({"cache_dir_vae", "cache_dir", "text_embeds", "image_embeds", "conditioning_image_embeds",
              "cache_dir_conditioning_image_embeds", "conditioning_image_embed_batch_size",
              "vae_cache_clear_each_epoch", "vae_cache_ondemand", "vae_cache_disable", "write_batch_size",
              "text_encoder_batch_size", "text_cache_ondemand", "text_cache_disable", "preserve_data_backend_cache",
              "skip_file_discovery", "hash_filenames", "metadata_update_interval", "default"},
             kCached);
    r.finish();
    out.folders.push_back(std::move(f));
  }
}

// ---- ai-toolkit

void read_ai_toolkit_list(const DatasetValue& process, const std::string& file, DatasetFile& out,
                          const FolderImages& usual) {
  std::string trigger;
  if (const DatasetValue* v = process.find("trigger_word"); v && v->kind == ValueKind::text) trigger = v->text;
  for (const DatasetValue& dataset : tables_of(process, "datasets", file)) {
    DatasetReader r(file, {&dataset});
    DataFolder f{.where = r.where("folder_path"), .recursive = true, .images = usual};
    f.folder = resolved(r.text("folder_path"), file);
    if (const std::string path = r.text("dataset_path"); f.folder.empty()) f.folder = resolved(path, file);
    check(!f.folder.empty(), Code::invalid_config, "{}: folder_path is missing; expected the folder of the images",
          r.where());
    f.caption_extensions = {with_dot(r.text("caption_ext", r.text("caption_type", ".txt")))};
    f.missing_caption = r.text("default_caption");
    f.regularization = r.flag("is_reg", false);
    CaptionRules& c = f.captions;
    c.trigger = r.text("trigger_word", trigger);
    c.add_trigger = !f.regularization;
    c.shuffle = r.flag("shuffle_tokens", false);
    c.dropout = r.number("caption_dropout_rate", 0, 0, 1);
    c.tag_dropout = r.number("token_dropout_rate", 0, 0, 1);
    c.keep_tokens = r.whole("keep_tokens", 0, 0);
    check(!c.shuffle || c.keep_tokens == 0, Code::invalid_config,
          "{}: keep_tokens with shuffle_tokens; expected one: ai-toolkit keeps them only from drop-out",
          r.where("keep_tokens"));
    f.loss_weight = r.number("loss_multiplier", 1, 0, kAny);
    f.repeats = r.whole("num_repeats", 1, 1);
    FolderImages& images = f.images;
    const bool square = r.flag("square_crop", false);
    images.enable_bucket = r.flag("buckets", true) && !square;
    images.bucket_no_upscale = images.enable_bucket;  // it never enlarges images
    images.bucket_reso_steps = r.whole("bucket_tolerance", 64, 1);
    images.random_crop = r.flag("random_crop", false);
    images.random_flip = r.flag("flip_x", false);
    images.alpha_mask = r.flag("alpha_mask", false);
    images.unmasked_weight = r.number("mask_min_value", 0, 0, 1);
    f.masks = resolved(r.text("mask_path"), file);
    for (const char* key : {"control_path", "control_path_1", "control_path_2", "control_path_3"})
      if (const std::string folder = resolved(r.text(key), file); !folder.empty()) f.references.push_back(folder);
    f.clips = r.whole("num_frames", 1, 1) > 1;
    if (f.clips) images.frames = {r.whole("num_frames", 1, 1)};
    r.refuse("flip_y", "images are mirrored left to right only");
    r.refuse("scale", kUnsupported, "1");
    r.refuse("network_weight", kUnsupported, "1");
    for (const char* key : {"random_scale",
                            "augments",
                            "augmentations",
                            "prior_reg",
                            "control_from_same_folder",
                            "inpaint_path",
                            "unconditional_path",
                            "invert_mask",
                            "poi",
                            "use_short_captions",
                            "clip_image_path",
                            "clip_image_from_same_folder",
                            "clip_image_augmentations",
                            "clip_image_shuffle_augmentations",
                            "replacements",
                            "random_triggers",
                            "standardize_images",
                            "extra_values",
                            "auto_frame_count",
                            "diff_output_preservation",
                            "do_i2v",
                            "do_audio"})
      r.refuse(key, kUnsupported);
    r.word("type", "image", {"image", "sd"});
    r.ignore({"cache_latents", "cache_latents_to_disk", "cache_tensors_to_disk", "cache_text_embeddings",
              "cache_clip_vision_to_disk", "load_image_when_caching_latents", "num_workers", "prefetch_factor",
              "cache_latents_num_workers"},
             kCached);
    r.ignore({"shrink_video_to_frames", "fps"}, "frames are taken at the rate of the key fps");
    r.ignore(
        {"num_controls_from_same_folder", "control_transparent_color", "full_size_control_images", "replay_transforms",
         "shuffle_augmentations", "random_triggers_max", "guidance_type", "diff_output_preservation_class"},
        "it belongs to a key that is not given");
    std::vector<int64_t> sides = r.wholes("resolution");
    if (sides.empty()) sides = {512};
    read_batch_size(r, out);
    r.finish();
    for (int64_t side : sides) {  // each resolution is a separate data set
      images.size = {side, side};
      out.folders.push_back(f);
    }
  }
}

void read_ai_toolkit(const DatasetValue& all, const std::string& file, DatasetFile& out, const FolderImages& usual) {
  const DatasetValue* config = all.find("config");
  if (!config) return read_ai_toolkit_list(all, file, out, usual);
  log_info("{}: datasets and trigger_word are read, other sections are not", file);
  for (const DatasetValue& process : tables_of(*config, "process", file))
    if (process.find("datasets")) read_ai_toolkit_list(process, file, out, usual);
}

}  // namespace

DatasetFile read_dataset_file(const std::string& where, const std::string& class_folder, const FolderImages& usual) {
  DatasetFile out;
  std::error_code ec;
  if (fs::is_directory(where, ec)) {
    out.name = fmt::format("folders '{}'", where);
    read_kohya_folders(where, false, out, usual);
    if (!class_folder.empty()) read_kohya_folders(class_folder, true, out, usual);
    return out;
  }
  check(class_folder.empty(), Code::invalid_config,
        "reg_data_dir is '{}'; expected empty with a dataset file, which says is_reg of its folders", class_folder);
  check(fs::exists(where, ec), Code::io, "dataset_config: '{}' does not exist", where);
  const DatasetValue all = parse_dataset_text(read_text_file(where), where);
  const DatasetValue* datasets = all.find("datasets");
  const bool listed = datasets && datasets->kind == ValueKind::list && !datasets->items.empty();
  const auto holds = [&](const char* key) { return listed && datasets->items[0].find(key); };
  if (all.kind == ValueKind::list) {
    out.name = fmt::format("SimpleTuner's backends '{}'", where);
    read_simple_tuner(all, where, out, usual);
  } else if (all.find("config") || holds("folder_path") || holds("dataset_path")) {
    out.name = fmt::format("ai-toolkit's datasets '{}'", where);
    read_ai_toolkit(all, where, out, usual);
  } else if (holds("image_directory") || holds("image_jsonl_file") || holds("video_directory") ||
             holds("video_jsonl_file")) {
    out.name = fmt::format("musubi-tuner's datasets '{}'", where);
    read_musubi(all, where, out, usual);
  } else if (holds("subsets")) {
    out.name = fmt::format("kohya's datasets '{}'", where);
    read_kohya(all, where, out, usual);
  } else {
    throw Error(Code::invalid_config, fmt::format("dataset_config: '{}' describes no dataset", where))
        .note(
            "try: [[datasets]] with [[datasets.subsets]] (kohya) or image_directory (musubi-tuner), a JSON list "
            "(SimpleTuner), or datasets: with folder_path (ai-toolkit)");
  }
  check(!out.folders.empty(), Code::invalid_config, "dataset_config: '{}' has no folder of images", where);
  return out;
}

}  // namespace md
